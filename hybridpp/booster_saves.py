"""The part of the booster that saves and loads: models, runs, optimizers and LR schedules."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hybridpp.boosted_runs import BoostedRuns
from hybridpp.checkpoint.remote_path import absolute, as_path
from hybridpp.config import require_bools
from hybridpp.errors import ConfigError
from hybridpp.plugin import Plugin, Resumed, SavesModels, SavesParts, SavesRuns
from hybridpp.saving import (
    check_run_arguments,
    check_save_arguments,
    check_size_per_shard,
    file_bytes_of,
    require_path,
    run_parts_of,
    with_prefix,
)


class BoosterSaves:
    """What :class:`hybridpp.Booster` saves and loads.

    Attributes:
        plugin: of the booster.
    """

    plugin: Plugin
    _runs: BoostedRuns

    def save_model(
        self,
        model: nn.Module,
        path: str | Path,
        shard: bool = True,
        size_per_shard: int = 1024,
        *,
        use_safetensors: bool | None = None,
        prefix: str | None = None,
        gather_dtensor: bool = True,
        use_async: bool = False,
    ) -> None:
        """Write the complete model to a folder that its own ``from_pretrained`` reads, or to one file.

        That is the one of transformers, diffusers, ``PyTorchModelHubMixin`` or timm; of other models, a folder of
        safetensors files.

        Weights are written in the dtype that they had before ``boost``: trained weights from their fp32 masters,
        frozen weights as the precision rounded them. Collective: every rank of the world; rank 0 writes.

        New files are written next to existing weights and then replace them, so the disk must hold both. If the job is
        killed during the save, or the disk is full, a load finds either the old or the new weights, never a mixture;
        the next save removes incomplete files. Other files in the folder are kept.

        Args:
            model: the boosted model; or every rank's copy of it, or its ``torch.optim.swa_utils.AveragedModel``.
            path: a folder, created if it does not exist. A path that ends in ``.safetensors``, ``.pt``, ``.pth`` or
                ``.bin`` and is not a folder becomes one file with the complete model's ``state_dict()``.
            shard: whether to split the weights in a folder into several files, where the model's library reads several.
            size_per_shard: the maximum size of such a file, in MB (10**6 bytes).
            use_safetensors: None derives the format from the path; a folder holds safetensors files.
            prefix: the name of a folder in ``path`` to write to, so that several models can be saved under one path.
            gather_dtensor: accepted for compatibility, as True only.
            use_async: return once the weights are in the host memory of rank 0, all of them, and write them while
                training goes on; see ``asynchronous`` of :meth:`save`. Adapters of peft are on disk then.

        Raises:
            CheckpointError: the path, or that of the asynchronous save before it, cannot be written to; raised on
                every rank.
            ConfigError: an argument is not supported, or the arguments do not fit together.
        """
        require_path(path)
        check_save_arguments(
            Path(path),
            shard=shard,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            gather_dtensor=gather_dtensor,
        )
        require_bools(use_async=use_async)
        self._saver().save_model(
            model,
            with_prefix(path, prefix).absolute(),
            shard=shard,
            size_per_shard_mb=size_per_shard,
            asynchronous=use_async,
        )

    def load_model(
        self,
        model: nn.Module,
        path: str | Path,
        strict: bool = True,
        *,
        low_cpu_mem_mode: bool = True,
        prefix: str | None = None,
    ) -> None:
        """Read weights from such a folder or file into the boosted model. Collective: every rank of the world.

        Each rank reads only the tensors that it owns. In addition to these, it maps one file of the folder at a time.

        Args:
            model: the boosted model; or every rank's copy of it, or its ``torch.optim.swa_utils.AveragedModel``, whose
                next update then goes on from what was loaded.
            path: a folder with safetensors files; or one file with a state dict under the model's own names, written
                by safetensors or by ``torch.save`` (read with ``weights_only=True``, so it cannot run code).
            strict: whether missing and unexpected names are an error.
            low_cpu_mem_mode: accepted for compatibility, as True only: each rank reads only what it owns.
            prefix: as given to :meth:`save_model`.

        Raises:
            ConfigError: an argument has the wrong type or is not supported.
            CheckpointError: there are no weights, they are corrupt or do not fit the model, or the folder holds two
                models of which one is out of date; raised on every rank.
        """
        require_bools(strict=strict, low_cpu_mem_mode=low_cpu_mem_mode)
        if not low_cpu_mem_mode:
            raise ConfigError(
                "low_cpu_mem_mode=False is not supported: each rank reads only what it owns, file by file. Leave it "
                "out."
            )
        self._saver().load_model(model, with_prefix(path, prefix), strict=strict)

    def save_optimizer(
        self,
        optimizer: Optimizer,
        path: str | Path,
        shard: bool = True,
        size_per_shard: int = 1024,
        *,
        prefix: str | None = None,
        use_async: bool = False,
    ) -> None:
        """Write the optimizer's state to a folder, which :meth:`load_optimizer` reads in this or another layout.

        It holds, by the names of parameters, the state and the settings of all groups; counts of steps, loss scale,
        and the seed and step of dropout; and in half precision the fp32 master weights. With :meth:`save_model` and
        :meth:`save_lr_scheduler` it is what a run needs to go on. :meth:`save` does all of this in one call, and keeps
        generators and the position in the data, too.

        Every rank writes what it updates. A checkpoint counts from one moment: if the job is killed, or the disk is
        full, the folder holds the old state or the new one.

        Collective: every rank of the world, between ``optimizer.step()`` and the next ``execute_pipeline``.

        Args:
            optimizer: that :meth:`boost` returned.
            path: a folder on a file system that all ranks share, whatever its name; created if it does not exist.
            shard: whether a rank may write several files.
            size_per_shard: the most that one of them holds, in MB (10**6 bytes).
            prefix: the name of a folder in ``path`` to write to.
            use_async: return as soon as the state is copied to host memory, and write it while training goes on; see
                ``asynchronous`` of :meth:`save`.

        Raises:
            CheckpointError: it, or the asynchronous save before it, cannot be written; raised on every rank.
            ConfigError: gradients are held, an argument is wrong, or the optimizer was not boosted by this booster.

        Example:
            booster.save_model(model, "outputs/step100/model")
            booster.save_optimizer(optimizer, "outputs/step100/optimizer")
            booster.save_lr_scheduler(lr_scheduler, "outputs/step100/lr_scheduler")
        """
        require_bools(shard=shard, use_async=use_async)
        check_size_per_shard(size_per_shard)
        part = self._runs.part_of(optimizer)
        self._part_saver().save_optimizer(
            part,
            with_prefix(path, prefix).absolute(),
            file_bytes=file_bytes_of(size_per_shard if shard else None),
            asynchronous=use_async,
        )

    def load_optimizer(self, optimizer: Optimizer, path: str | Path, *, prefix: str | None = None) -> None:
        """Go on from the state that :meth:`save_optimizer` wrote, in any layout, precision and number of replicas.

        Call it after :meth:`load_model`: master weights, which it holds in half precision, replace the weights, of
        which files may hold roundings. Gradients that are held are dropped.

        Collective: every rank of the world.

        Args:
            optimizer: that :meth:`boost` returned, over the same parameters in the same groups.
            path: the folder that :meth:`save_optimizer` was given.
            prefix: as given there.

        Raises:
            CheckpointError: there is no such state, it is damaged, or of another optimizer or model; raised on every
                rank, and then nothing was changed.
            ConfigError: the optimizer was not boosted by this booster, or the model has weights without values.
        """
        part = self._runs.part_of(optimizer)
        self._part_saver().load_optimizer(part, with_prefix(path, prefix))

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, path: str | Path, *, prefix: str | None = None) -> None:
        """Write the state of an LR schedule to a folder; see :meth:`save_optimizer`.

        Collective: every rank of the world; the state of rank 0 is written.

        Raises:
            CheckpointError: it cannot be written; raised on every rank.
            ConfigError: it has no state, or one with objects in it.
        """
        self._part_saver().save_lr_scheduler(lr_scheduler, with_prefix(path, prefix))

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, path: str | Path, *, prefix: str | None = None) -> None:
        """Go on from the state that :meth:`save_lr_scheduler` wrote, in any layout.

        The learning rates in use are the optimizer's: :meth:`load_optimizer` sets them. Collective: every rank of the
        world.

        Raises:
            CheckpointError: there is no such state, it is damaged, or of another class of schedule; raised on every
                rank.
        """
        self._part_saver().load_lr_scheduler(lr_scheduler, with_prefix(path, prefix))

    def _part_saver(self) -> SavesParts:
        if not isinstance(self.plugin, SavesParts):
            raise ConfigError(
                f"{type(self.plugin).__name__} saves no optimizers and schedules. Use torch.save on their state_dict()."
            )
        return self.plugin

    def save(
        self,
        path: str | Path,
        *,
        step: int,
        extras: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        """Write a checkpoint of the run, from which :meth:`resume` goes on bit for bit, in this or another layout.

        It holds, of every model that this booster boosted, weights in full precision, optimizer state, loss scale, LR
        schedule and the position in the dataloader that was given to :meth:`boost`; and random generators, Python's,
        numpy's and torch's. Each rank writes what it owns to ``path/step-00000120/``. If the job is killed, or the disk
        is full, earlier checkpoints are as they were, and so is the run.

        Collective: every rank of the world, between ``optimizer.step()`` and the next ``execute_pipeline``.

        Args:
            path: the folder of the run's checkpoints, on a file system that all ranks share, or a URL of fsspec
                (``s3://bucket/run``); created if it does not exist.
            step: number of the step, which names the checkpoint; one of the same number is replaced.
            extras: values to keep with it: numbers, text, lists, tuples, dicts, tensors, numpy arrays. Those of rank 0
                are, so not a rank's part of a model or of an average of it; a warning names those that ranks give
                differently.
            keep_last: how many checkpoints stay, this one included; older ones are removed once it is complete. None:
                all.
            asynchronous: return as soon as this rank's part is copied to host memory, and write it while training goes
                on, with 0.75 % of the processors that the rank has. The checkpoint counts when all ranks have written
                theirs. What made it fail is raised on all ranks by the same ``execute_pipeline``, before it takes a
                batch: gradients and data are as they were. The next save, :meth:`resume` and :meth:`wait_for_save` wait
                for it, and raise that, too.

        Raises:
            CheckpointError: it, or the asynchronous one before it, cannot be written, or the folder has
                this step of other models; raised on every rank.
            ConfigError: gradients are held, an argument is wrong, or nothing was boosted.
        """
        check_run_arguments(step, keep_last, extras)
        require_bools(asynchronous=asynchronous)
        self._run_saver().save_run(
            self._runs.parts(),
            absolute(as_path(path)),  # the script may change its folder while a thread writes
            step=int(step),  # numpy's, too
            extras={} if extras is None else extras,
            keep_last=keep_last,
            asynchronous=asynchronous,
        )

    def wait_for_save(self) -> None:
        """Wait until the last asynchronous save is complete. Collective: every rank of the world.

        A script that ends waits by itself, but only calls raise what made it fail: this one, the next save, and the
        training step after the failure.

        Raises:
            CheckpointError: it could not be written; raised on every rank.
        """
        self._run_saver().wait_for_save()

    def resume(
        self,
        path: str | Path,
        *,
        missing: Literal["error", "fresh"] = "error",
        parts: Collection[str] | None = None,
    ) -> Resumed:
        """Go on from the newest checkpoint in a folder that is intact. Call it after :meth:`boost`.

        The layout, the schedule, the precision, the batch size and the number of workers may differ from those that
        saved it: then the run is the same up to rounding. Each rank reads what it owns.

        Collective: every rank of the world, with the models, optimizers and dataloaders boosted in the order of the
        run that saved it.

        Args:
            path: the folder that :meth:`save` was given.
            missing: what a folder without checkpoints is: ``"error"``, or ``"fresh"``: the start of a new run.
            parts: what is resumed: some of ``"model"``, ``"optimizer"``, ``"lr_scheduler"``, ``"dataloader"``,
                ``"generators"`` and ``"extras"``; None: all. What is left out begins anew, and need not fit: for
                another schedule, other parameter groups, or weights only. The same on every rank.

        Returns:
            Where the run goes on: step, epoch, batches of the epoch that are done, and extras.

        Raises:
            CheckpointError: there is no checkpoint, none is intact, or it does not fit the run; raised on every rank,
                and then nothing was changed.
            ConfigError: an argument is wrong, or nothing was boosted.
        """
        if missing not in ("error", "fresh"):
            raise ConfigError(f'missing must be "error" or "fresh": got {missing!r}.')
        return self._run_saver().resume_run(
            self._runs.parts(), as_path(path), start_fresh=missing == "fresh", resumed=run_parts_of(parts)
        )

    def _run_saver(self) -> SavesRuns:
        if not isinstance(self.plugin, SavesRuns):
            raise ConfigError(f"{type(self.plugin).__name__} saves no runs. Use HybridParallelPlugin.")
        return self.plugin

    def _saver(self) -> SavesModels:
        if not isinstance(self.plugin, SavesModels):
            raise ConfigError(f"{type(self.plugin).__name__} cannot save models. Use torch.save on the model's state.")
        return self.plugin
