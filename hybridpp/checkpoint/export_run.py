"""Write a model of a run's checkpoint in other formats, in one process."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from hybridpp.checkpoint.folder import SaveTarget
from hybridpp.checkpoint.new_output import library_errors, new_output
from hybridpp.checkpoint.run_contents import StoredRunModel
from hybridpp.errors import CheckpointError


def export_folder(
    run: StoredRunModel,
    out: Path,
    shell: nn.Module,
    max_shard_size: str,
    on_written: Callable[[int], Any] | None = None,
) -> None:
    """Write the weights to a folder that ``from_pretrained`` reads, with one tensor in memory.

    Args:
        run: the model.
        out: does not exist.
        shell: says the class and the configuration; see :func:`hybridpp.checkpoint.model_origin.model_shell`.
        max_shard_size: of a file, like ``"1024MB"``.
        on_written: called with the number of bytes of each tensor, after it.

    Raises:
        CheckpointError: ``out`` exists, or cannot be written.
    """
    floating = [spec.dtype for spec in run.specs.values() if spec.dtype.is_floating_point]
    with new_output(out) as temporary, _named(temporary, out):
        target = SaveTarget(temporary, shell)
        aliases = {alias: name for alias, name in run.aliases.items() if name in run.specs}
        dtype = max(floating, key=floating.count) if floating else None
        for names in target.plan(run.specs, aliases, dtype, max_shard_size):
            target.write_next(run.weights(names), on_written)
        target.finish()


@contextmanager
def _named(temporary: Path, out: Path) -> Iterator[None]:
    """A context in which errors name the path that was asked for."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(temporary), str(out))) from error


def export_torch(run: StoredRunModel, out: Path) -> None:
    """Write ``{"model": ..., "optimizer": ...}`` by names to one file of ``torch.save``; all of it is in memory.

    Raises:
        CheckpointError: ``out`` exists, or cannot be written.
    """
    state = _state(run)
    with new_output(out) as temporary, library_errors(out):
        torch.save(state, temporary)


def export_dcp(run: StoredRunModel, out: Path) -> None:
    """Write the same to a folder of ``torch.distributed.checkpoint``; all of it is in memory.

    Raises:
        CheckpointError: ``out`` exists, or cannot be written.
    """
    state = _state(run)
    with new_output(out) as temporary, one_process(), library_errors(out):
        save(state, storage_writer=FileSystemWriter(temporary, overwrite=False), no_dist=True)


@contextmanager
def one_process() -> Iterator[None]:
    """A context in which DCP does not warn that it runs without a job."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _state(run: StoredRunModel) -> dict[str, Any]:
    names = tuple(run.specs)
    weights = dict(zip(names, run.weights(names), strict=True))
    weights |= {alias: weights[name] for alias, name in run.aliases.items() if name in weights}
    state: dict[str, Any] = {"model": weights}
    if run.has_optimizer:
        state["optimizer"] = run.optimizer()
    return state
