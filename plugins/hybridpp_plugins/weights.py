"""A boosted model's weights, to disk and back."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridpp.checkpoint import Contents, gather_objects, gather_tensors, open_folder, write_folder
from hybridpp.errors import CheckpointError, HybridppError, PeerError
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.sharding import placements, whole_tensors


def save_weights(engine: Engine, path: Path, max_shard_size: str) -> None:
    """Gather the weights of one replica on rank 0 and write them. Collective: all ranks."""
    engine.before.unfilled.check()
    control = engine.layout.control
    sources = engine.layout.pipelines[0]
    tensors: dict[str, Tensor] = {}
    if control.rank in sources:
        mine = (
            (name, tensor.to(engine.before.dtypes.get(name, tensor.dtype))) for name, tensor in _full_precision(engine)
        )
        tensors = whole_tensors(mine, placements(engine.model), engine.layout.tp)
    whole = gather_tensors(control, sources, tensors)
    failure: Exception | None = None
    if control.rank == 0:
        state = whole | {alias: whole[name] for alias, name in engine.before.aliases.items() if name in whole}
        try:
            write_folder(engine.model, state, path, engine.before.model_dtype, max_shard_size)
        except Exception as error:
            failure = error
    _agree(engine, failure, "writing the model")


def _full_precision(engine: Engine) -> list[tuple[str, Tensor]]:
    masters = engine.masters.masters
    state = engine.model.state_dict()
    return [
        (name, masters[name].detach() if name in masters else tensor)
        for name, tensor in state.items()
        if name not in engine.before.aliases and isinstance(tensor, Tensor)
    ]


def load_weights(engine: Engine, path: Path, strict: bool) -> None:
    """Read what this rank owns. Collective: all ranks."""
    failure: Exception | None = None
    found: set[str] = set()
    try:
        contents = open_folder(engine.model, path, strict)
        places = _places(engine, contents)
        targets = _check(engine, contents, places, path, strict)
        _copy(engine, contents, places, targets)
        found = set(places)
    except Exception as error:
        failure = error
    _agree(engine, failure, "reading the weights")
    engine.before.unfilled.fill(found)


def _places(engine: Engine, contents: Contents) -> dict[str, str]:
    """The names in the folder of the whole model's weights. A tied one may be there under any of its names."""
    names = {name: name for name in (*engine.staged.owners, *engine.before.buffer_names) if name in contents.shapes}
    for alias, name in engine.before.aliases.items():
        if alias in contents.shapes:
            names.setdefault(name, alias)
    return names


def _check(
    engine: Engine, contents: Contents, places: Mapping[str, str], path: Path, strict: bool
) -> dict[str, Tensor]:
    """This rank's tensors that the folder has, if it fits."""
    kind = type(engine.model).__name__
    targets = {
        name: tensor
        for name, tensor in engine.model.state_dict().items()
        if name not in engine.before.aliases and isinstance(tensor, Tensor)
    }
    known = {*engine.staged.owners, *engine.before.aliases, *engine.before.buffer_names}
    missing = sorted(name for name in targets if name not in places)
    unexpected = sorted(name for name in contents.shapes if name not in known)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{path} does not fit {kind}: missing {missing}, unexpected {unexpected}. "
            "Use strict=False to load what fits."
        )
    targets = {name: tensor for name, tensor in targets.items() if name in places}
    lies = placements(engine.model)
    for name, tensor in targets.items():
        there = contents.shapes[places[name]]
        here = lies[name].full_shape if name in lies else tuple(tensor.shape)
        if there != here:
            raise CheckpointError(
                f"{path} does not fit {kind}: {name} has shape {there} there, {here} here. "
                "Load it with from_pretrained(ignore_mismatched_sizes=True) first."
            )
    return targets


@torch.no_grad()
def _copy(engine: Engine, contents: Contents, places: Mapping[str, str], targets: Mapping[str, Tensor]) -> None:
    wanted = {places[name]: name for name in targets}
    lies = placements(engine.model)
    for there, stored in contents.read(list(wanted)):
        name = wanted[there]
        value = lies[name].take(stored, engine.layout.tp.rank) if name in lies else stored.whole()
        if name in engine.masters.masters:
            engine.masters.set(name, value)
        else:
            targets[name].copy_(value)


def _agree(engine: Engine, failure: Exception | None, what: str) -> None:
    """All ranks fail where one did, so that none is left waiting."""
    failed = [rank for rank, bad in enumerate(gather_objects(engine.layout.control, failure is not None)) if bad]
    if failure is not None:
        raise failure
    if failed:
        error: HybridppError = PeerError(f"{what} failed on rank {failed[0]}. See the error printed there.")
        raise error
