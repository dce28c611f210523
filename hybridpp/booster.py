"""The front door: boost what you have, run a step."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hybridpp.config import Precision
from hybridpp.errors import ConfigError, NotBuiltError
from hybridpp.plugin import Boosted, Criterion, Plugin, RecordsTimelines, RunsPipeline, SavesModels
from hybridpp.registry import plugin_class

# What scripts of this kind call, and what to do as long as it is not built.
_NOT_BUILT = {
    "save_optimizer": "Save optimizer.state_dict() on every rank, and load it in the same layout.",
    "load_optimizer": "Load each rank's own optimizer.state_dict(), in the layout that saved it.",
    "save_lr_scheduler": "Save lr_scheduler.state_dict().",
    "load_lr_scheduler": "Call lr_scheduler.load_state_dict().",
    "enable_lora": "Wrap the model with the peft library before boost.",
}


class Booster:
    """Turns an ordinary training script into a parallel one.

    Args:
        plugin: how to train: a plugin, or the name of one; None trains whole replicas (``HybridParallelPlugin`` with
            one stage).
        mixed_precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``, where ``plugin`` is None or a name; a plugin object has
            its own ``precision``.
        device: where to compute, say ``"cpu"``; None takes the CUDA device of this rank where there is one.

    Raises:
        ConfigError: the plugin or the precision is unknown, or the precision is given twice.
    """

    def __init__(
        self,
        plugin: Plugin | str | None = None,
        mixed_precision: str | None = None,
        device: str | torch.device | None = None,
    ):
        if isinstance(plugin, Plugin):
            if mixed_precision is not None:
                raise ConfigError(
                    f"precision belongs to the plugin: got mixed_precision={mixed_precision!r} beside "
                    f"{type(plugin).__name__}. Pass precision={mixed_precision!r} to it."
                )
        elif plugin is None or isinstance(plugin, str):
            precision = Precision.parse(mixed_precision or "fp32")
            options: dict[str, Any] = {"tp_size": 1, "pp_size": 1, "num_microbatches": 1, "precision": precision}
            plugin = plugin_class(plugin or "hybrid_parallel")(**options)
        else:
            raise ConfigError(
                f"plugin is a Plugin, the name of one, or None: got {type(plugin).__name__}. "
                "Pass HybridParallelPlugin(...)."
            )
        self.plugin: Plugin = plugin
        self._device = None if device is None else torch.device(device)

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
        *,
        sample: Any = None,
    ) -> Boosted:
        """Prepare the parts of a run; call it once, with the whole model and an optimizer on all its parameters.

        The model keeps its class and its names, but holds only what this rank owns afterwards; the optimizer is
        re-pointed to that and keeps every group's settings.

        Collective: all ranks, with the same model and weights.

        Args:
            model: any module, with the same weights on every rank; or built on the meta device, to be filled by
                :meth:`load_model` before anything else.
            optimizer: any ``torch.optim`` optimizer.
            criterion: ``criterion(outputs, inputs)`` -> scalar; returned as it is.
            dataloader: returned as it is; a sample of its dataset shows how the model is called.
            lr_scheduler: made on ``optimizer``; afterwards it stands still at skipped steps.
            sample: a small batch like those to come; needed only to cut a model whose dataloader is not given, and from
                whose configuration none can be made.

        Returns:
            The five, in this order, as a named tuple.

        Raises:
            ConfigError: the parts do not fit together.
            PartitionError: the model cannot be cut into the stages asked for.
        """
        return self.plugin.configure(
            Boosted(model, optimizer, criterion, dataloader, lr_scheduler), device=self._device, sample=sample
        )

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Take one batch and run it: forward, loss and, where gradients are enabled, backward.

        Collective: every rank of the world.

        Args:
            data_iter: gives this replica's batch: a dict (``model(**batch)``), a tuple or list (``model(*batch)``) or
                a tensor. It is split along dimension 0; any size and shape will do, another one at every call too.
            model: the boosted model.
            criterion: ``criterion(outputs, inputs)`` gives the mean loss of a micro-batch as a scalar tensor. It may
                have a method ``num_items(inputs)`` that says what the mean is taken over (say, tokens that count);
                without, it is the samples. Needed unless ``return_loss`` is false and gradients are disabled.
            optimizer: the boosted optimizer; needed where gradients are enabled.
            return_loss: whether to compute the loss.
            return_outputs: whether to keep the model's outputs.

        Returns:
            ``loss``: on every rank, a detached fp32 scalar, the mean over this replica's batch (None if not asked
            for). ``outputs``: on the last stage, what the model returned, merged over the micro-batches; else None.

        Raises:
            ConfigError: the arguments do not fit together.
            DataError: the batch cannot be split, or the ranks of a pipeline hold different ones.
            NonFiniteLossError: a micro-batch's loss is NaN or infinite.
            StopIteration: every rank is out of data.
        """
        if not isinstance(self.plugin, RunsPipeline):
            raise ConfigError(
                f"{type(self.plugin).__name__} runs no pipeline. Use HybridParallelPlugin; it takes pp_size=1 too."
            )
        return self.plugin.execute_pipeline(
            data_iter, model, criterion, optimizer, return_loss=return_loss, return_outputs=return_outputs
        )

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """Backward pass of a loss that you computed by calling the model yourself; for one stage.

        The gradient is the mean over the replicas' losses. Collective: all replicas.
        """
        self.plugin.backward(loss, optimizer)

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """A context in which gradients add up on each replica without being reduced; the next step outside does it."""
        return self.plugin.no_sync(model, optimizer)

    def record_timeline(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context that takes down when each action of the steps inside it ran, on every rank of the pipeline.

        Behind the block, ``recording.timeline`` is a :class:`hybridpp.timeline.Timeline`, which can be drawn, traced
        and simulated. Clocks of several hosts are aligned to about a message's time.

        Collective: every rank of the world, at the start and at the end of the block.

        Example:
            with booster.record_timeline(model) as recording:
                booster.execute_pipeline(data_iter, model, criterion, optimizer)
            draw(recording.timeline, "step.svg")
        """
        if not isinstance(self.plugin, RecordsTimelines):
            raise ConfigError(f"{type(self.plugin).__name__} records no timelines. Use HybridParallelPlugin.")
        return self.plugin.record_timeline(model)

    def save_model(self, model: nn.Module, path: str | Path, shard: bool = True, size_per_shard: int = 1024) -> None:
        """Write the whole model to a folder that Hugging Face's ``from_pretrained`` reads.

        Weights are written in the dtype that the model had before ``boost``: trained ones from their fp32 masters,
        frozen ones as the precision rounded them. Collective: all ranks; rank 0 writes.

        Args:
            model: the boosted model.
            path: a folder; made if it does not exist.
            shard: whether to write several files, of at most
            size_per_shard: MB (10**6 bytes) each.
        """
        self._saver().save_model(model, Path(path), shard=shard, size_per_shard_mb=size_per_shard)

    def load_model(self, model: nn.Module, path: str | Path, strict: bool = True) -> None:
        """Read weights from such a folder into the boosted model. Collective: all ranks.

        Each rank reads the tensors that it owns. Beside them, its memory holds at most one file of the folder, mapped.

        Args:
            model: the boosted model.
            path: a folder with safetensors files.
            strict: whether missing and unexpected names are an error.

        Raises:
            CheckpointError: the folder holds no weights, or they do not fit the model.
        """
        self._saver().load_model(model, Path(path), strict=strict)

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_BUILT:
            raise NotBuiltError(f"booster.{name} is not built yet. {_NOT_BUILT[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _saver(self) -> SavesModels:
        if not isinstance(self.plugin, SavesModels):
            raise ConfigError(f"{type(self.plugin).__name__} cannot save models. Use torch.save on the model's state.")
        return self.plugin
