"""A boosted model's weights, to disk and back."""

from pathlib import Path

import torch
from torch import Tensor

from hybridpp.checkpoint import gather_objects, gather_tensors, read_folder, write_folder
from hybridpp.errors import CheckpointError, HybridppError, PeerError
from hybridpp_plugins.engine import Engine


def save_weights(engine: Engine, path: Path, max_shard_size: str) -> None:
    """Gather the weights of one replica on rank 0 and write them. Collective: all ranks."""
    control = engine.layout.control
    tensors = {name: tensor.to(engine.dtypes.get(name, tensor.dtype)) for name, tensor in _full_precision(engine)}
    whole = gather_tensors(control, engine.layout.pipelines[0], tensors)
    failure: Exception | None = None
    if control.rank == 0:
        state = whole | {alias: whole[name] for alias, name in engine.aliases.items() if name in whole}
        try:
            write_folder(engine.model, state, path, engine.model_dtype, max_shard_size)
        except Exception as error:
            failure = error
    _agree(engine, failure, "writing the model")


def _full_precision(engine: Engine) -> list[tuple[str, Tensor]]:
    masters = engine.masters.masters
    state = engine.model.state_dict()
    return [
        (name, masters[name].detach() if name in masters else tensor)
        for name, tensor in state.items()
        if name not in engine.aliases and isinstance(tensor, Tensor)
    ]


@torch.no_grad()
def load_weights(engine: Engine, path: Path, strict: bool) -> None:
    """Read what this rank owns. Collective: all ranks."""
    failure: Exception | None = None
    try:
        _copy(engine, read_folder(engine.model, path, strict), path, strict)
    except Exception as error:
        failure = error
    _agree(engine, failure, "reading the weights")


def _copy(engine: Engine, state: dict[str, Tensor], path: Path, strict: bool) -> None:
    # A tied weight may be in the file under any of its names.
    for alias, name in engine.aliases.items():
        if alias in state:
            state.setdefault(name, state[alias])
    targets = {
        name: tensor
        for name, tensor in engine.model.state_dict().items()
        if name not in engine.aliases and isinstance(tensor, Tensor)
    }
    known = {*engine.staged.owners, *engine.aliases, *engine.buffer_names}
    missing = sorted(name for name in targets if name not in state)
    unexpected = sorted(name for name in state if name not in known)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{path} does not fit {type(engine.model).__name__}: missing {missing}, unexpected {unexpected}. "
            "Use strict=False to load what fits."
        )
    for name, target in targets.items():
        if name not in state:
            continue
        if state[name].shape != target.shape:
            raise CheckpointError(
                f"{path} does not fit {type(engine.model).__name__}: {name} has shape {tuple(state[name].shape)} "
                f"there, {tuple(target.shape)} here. Load it with from_pretrained(ignore_mismatched_sizes=True) first."
            )
        target.copy_(state[name])
        if name in engine.masters.masters:
            engine.masters.masters[name].copy_(state[name])


def _agree(engine: Engine, failure: Exception | None, what: str) -> None:
    """All ranks fail where one did, so that none is left waiting."""
    failed = [rank for rank, bad in enumerate(gather_objects(engine.layout.control, failure is not None)) if bad]
    if failure is not None:
        raise failure
    if failed:
        error: HybridppError = PeerError(f"{what} failed on rank {failed[0]}. See the error printed there.")
        raise error
