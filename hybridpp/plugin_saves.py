"""What plugins can save and load: models, runs, and parts of a run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from hybridpp.boosted import Boosted
from hybridpp.checkpoint.remote_path import AnyPath


class SavesModels(ABC):
    """A plugin that writes and reads weights: ``Booster.save_model`` and ``load_model`` need it."""

    @abstractmethod
    def save_model(
        self, model: nn.Module, path: Path, *, shard: bool, size_per_shard_mb: int, asynchronous: bool
    ) -> None:
        """Write the complete model. Collective: every rank of the world; one of them writes.

        The booster has checked the arguments.

        Args:
            model: the boosted model, or a copy of it.
            path: a folder in Hugging Face's format, or one file, by its suffix (``.safetensors``, ``.pt``, …).
            shard: whether a folder may hold several files.
            size_per_shard_mb: size limit of each, in MB (10**6 bytes).
            asynchronous: return once the weights are copied, and write them in the background.

        Raises:
            CheckpointError: nothing can be written; on every rank.
        """

    @abstractmethod
    def load_model(self, model: nn.Module, path: Path, *, strict: bool) -> None:
        """Read what :meth:`save_model`, or ``save_pretrained`` of transformers, wrote. Collective: every rank.

        Args:
            model: the boosted model.
            path: a folder or a file.
            strict: whether missing and unexpected names are an error.

        Raises:
            CheckpointError: the weights are missing or broken, or do not fit the model; on every rank.
        """


class Resumed(NamedTuple):
    """Where a run goes on; of a new run, nothing is done yet.

    Attributes:
        step: of the checkpoint, as the script counted it.
        epoch: of the dataloader that was given to ``boost``; 0 without one.
        batches: steps of that epoch that are done, counted in those of ``len(dataloader)``.
        extras: that the script saved.
    """

    step: int = 0
    epoch: int = 0
    batches: int = 0
    extras: Mapping[str, Any] = MappingProxyType({})


class InitializesModels(ABC):
    """A plugin that initialises weights: ``Booster.init_model`` needs it."""

    @abstractmethod
    def init_model(self, model: nn.Module, *, seed: int | None, initialize: Callable[[nn.Module], Any] | None) -> None:
        """Set the weights of a boosted model. Collective: every rank of the world.

        Args:
            model: the boosted model.
            seed: of random numbers; None: the run's.
            initialize: called with modules instead of their own methods; None: those.

        Raises:
            ConfigError: nothing initialises a weight; on every rank, and no weight has changed.
        """


class SavesRuns(ABC):
    """A plugin that saves and resumes complete runs: ``Booster.save`` and ``resume`` need it."""

    @abstractmethod
    def save_run(
        self,
        parts: Sequence[Boosted],
        path: AnyPath,
        *,
        step: int,
        extras: Mapping[str, Any],
        keep_last: int | None,
        asynchronous: bool,
    ) -> None:
        """Write a checkpoint. Collective: every rank of the world. The booster has checked the arguments.

        Args:
            parts: what :meth:`hybridpp.plugin.Plugin.configure` returned for each model, in order.
            path: the folder of checkpoints.
            step: of the run.
            extras: values of the script.
            keep_last: how many checkpoints stay; None: all.
            asynchronous: return once the run's values are copied, and write them in the background.

        Raises:
            CheckpointError: it, or the one in the background before it, cannot be written; on every rank, and earlier
                checkpoints are as they were.
        """

    @abstractmethod
    def wait_for_save(self) -> None:
        """Wait for the save in the background, if there is one. Collective: every rank of the world.

        Raises:
            CheckpointError: it failed on some rank; on every rank.
        """

    @abstractmethod
    def resume_run(
        self, parts: Sequence[Boosted], path: AnyPath, *, start_fresh: bool, resumed: Collection[str]
    ) -> Resumed:
        """Go on from the newest checkpoint that is intact. Collective: every rank of the world.

        Args:
            parts: as in :meth:`save_run`.
            path: the folder of checkpoints.
            start_fresh: whether a folder without checkpoints is no error.
            resumed: which of :data:`hybridpp.saving.RUN_PARTS`; the others stay as they are.

        Raises:
            CheckpointError: there is none, or it does not fit; on every rank.
        """


class SavesParts(ABC):
    """A plugin that saves optimizers and LR schedules by themselves: ``Booster.save_optimizer`` and the like need it.

    The booster has checked the arguments. Everything is collective: every rank of the world.
    """

    @abstractmethod
    def save_optimizer(self, part: Boosted, path: Path, *, file_bytes: int, asynchronous: bool) -> None:
        """Write the optimizer's state, in a form that any layout loads.

        Args:
            part: what :meth:`hybridpp.plugin.Plugin.configure` returned.
            path: a folder.
            file_bytes: the most that one of its files holds.
            asynchronous: return once the state is copied, and write it in the background.

        Raises:
            CheckpointError: it cannot be written; on every rank, and what was there before is as it was.
        """

    @abstractmethod
    def load_optimizer(self, part: Boosted, path: Path) -> None:
        """Read what :meth:`save_optimizer` wrote.

        Raises:
            CheckpointError: it is missing or damaged, or does not fit; on every rank, and nothing was changed.
        """

    @abstractmethod
    def save_lr_scheduler(self, lr_scheduler: Any, path: Path) -> None:
        """Write the state of an LR schedule, of rank 0.

        Raises:
            CheckpointError: see :meth:`save_optimizer`.
        """

    @abstractmethod
    def load_lr_scheduler(self, lr_scheduler: Any, path: Path) -> None:
        """Read what :meth:`save_lr_scheduler` wrote.

        Raises:
            CheckpointError: see :meth:`load_optimizer`.
        """
