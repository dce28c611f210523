"""What a plugin is: the one place where the parts of a training run are joined."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from hybridpp.config import ParallelConfig

Criterion = Callable[[Any, Any], Tensor]


class Boosted(NamedTuple):
    """What :meth:`hybridpp.Booster.boost` returns; unpacks in this order."""

    model: nn.Module
    optimizer: Optimizer | None = None
    criterion: Criterion | None = None
    dataloader: DataLoader[Any] | None = None
    lr_scheduler: LRScheduler | None = None


class Plugin:
    """A way to train. Every hook has a harmless default; a plugin overrides what it changes."""

    def configure(self, parts: Boosted, *, device: torch.device | None = None, sample: Any = None) -> Boosted:
        """Prepare the parts of a run for training; see :meth:`hybridpp.Booster.boost`."""
        return parts

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """Add the gradient of ``loss``."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """A context in which gradients only add up on each replica."""
        return nullcontext()

    def prepare_dataloader(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> DataLoader[Any]:
        """A dataloader over this replica's part of the dataset."""
        return DataLoader(dataset, batch_size, **options)


class RunsPipeline(ABC):
    """A plugin whose model runs through a schedule."""

    @abstractmethod
    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None,
        optimizer: Optimizer | None,
        *,
        return_loss: bool,
        return_outputs: bool,
    ) -> dict[str, Any]:
        """Run one step; see :meth:`hybridpp.Booster.execute_pipeline`."""


class RecordsTimelines(ABC):
    """A plugin that can say when each rank did what."""

    @abstractmethod
    def record_timeline(self, model: nn.Module) -> AbstractContextManager[Any]:
        """See :meth:`hybridpp.Booster.record_timeline`."""


class BlockOnShards(NamedTuple):
    """Where the shards of sequences that a block runs on are put together and taken apart; names are inside the block.

    Attributes:
        joined: the modules that are given whole sequences, and make divided activations of them.
        scattered: the layers behind which what the ranks made is summed, and each keeps its shard of it.
        wholes: modules that every rank runs on whole sequences.
    """

    joined: tuple[str, ...]
    scattered: tuple[str, ...]
    wholes: tuple[str, ...]


class LayerDivision(NamedTuple):
    """How the layers of a model are divided over ranks.

    Attributes:
        styles: what becomes of divided modules, by name; of what no style tells, only shapes are there.
        reasons: why a module stays whole, where one could expect it to be divided; by name.
        shapes: of what each rank holds of every parameter, by name.
        on_shards: the blocks that run on shards of sequences, by name.
        on_wholes: why other blocks do not, by name.
    """

    styles: Mapping[str, str]
    reasons: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    on_shards: Mapping[str, BlockOnShards] = {}
    on_wholes: Mapping[str, str] = {}


class DividesLayers(ABC):
    """A plugin that divides layers over ranks, and can say beforehand how."""

    @classmethod
    @abstractmethod
    def preview_division(cls, model: nn.Module, config: ParallelConfig) -> LayerDivision:
        """How a model, also on the meta device, would be divided over ``tp_size`` ranks; it is left as it was.

        Of the settings, those count that say something about ranks that share layers.
        """


class SavesModels(ABC):
    """A plugin that writes and reads the weights of its models."""

    @abstractmethod
    def save_model(self, model: nn.Module, path: Path, *, shard: bool, size_per_shard_mb: int) -> None:
        """Write a folder of weights; see :meth:`hybridpp.Booster.save_model`."""

    @abstractmethod
    def load_model(self, model: nn.Module, path: Path, *, strict: bool) -> None:
        """Read a folder of weights; see :meth:`hybridpp.Booster.load_model`."""
