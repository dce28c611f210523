"""Save and load a boosted model's weights."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hybridpp.checkpoint import CheckpointContents, SaveTarget, open_folder
from hybridpp.cluster import gather_numbers
from hybridpp.errors import CheckpointError, PeerError, some_of, text_of
from hybridpp.nn.peft_model import is_peft_model
from hybridpp.nn.pretrained_model import is_pretrained_model
from hybridpp_plugins.adapters import holds_adapters, open_adapters
from hybridpp_plugins.agreement import agree
from hybridpp_plugins.apply_tp import placements
from hybridpp_plugins.background_weights import BackgroundWeights, DeferredTarget
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.weight_stream import SAVE_CALL, WeightStream

_Result = TypeVar("_Result")
_READING = "reading the weights"


def save_weights(engine: Engine, path: Path, max_shard_size: str, copy: nn.Module | None = None) -> None:
    """Write the weights, or those of a copy of the model, tensor by tensor on rank 0. Collective: all ranks."""
    engine.original.uninitialized.check(engine.layout.control)
    _save(engine, _target(engine, path), max_shard_size, copy)


def start_save_of_weights(
    engine: Engine, path: Path, max_shard_size: str, copy: nn.Module | None = None
) -> BackgroundWeights:
    """Bring the weights to the host memory of rank 0, and write them while training goes on. Collective: all ranks."""
    engine.original.uninitialized.check(engine.layout.control)
    target = _target(engine, path)
    deferred = DeferredTarget(target) if target else None
    _save(engine, deferred, max_shard_size, copy)
    control = engine.layout.control
    (last_on_host,) = max(gather_numbers(control, SAVE_CALL, [engine.layout.world.local_rank]))
    return BackgroundWeights(control, 1 + int(last_on_host), deferred.write if deferred else None)


def _save(
    engine: Engine, target: SaveTarget | DeferredTarget | None, max_shard_size: str, copy: nn.Module | None
) -> None:
    try:
        stream = WeightStream(engine, copy)
        for names in stream.share(_plan(engine, target, stream, max_shard_size)):
            _write_file(engine, target, stream, names)
        _attempt(engine, None if target is None else target.finish)
    except BaseException:
        if target is not None:
            target.discard()
        raise


def _target(engine: Engine, path: Path) -> SaveTarget | None:
    """The target on rank 0, checked before anything is gathered. Collective: all ranks."""
    is_first = engine.layout.control.rank == 0
    return _attempt(engine, (lambda: SaveTarget(path, engine.model)) if is_first else None)


def _plan(
    engine: Engine, target: SaveTarget | DeferredTarget | None, stream: WeightStream, max_shard_size: str
) -> list[tuple[str, ...]]:
    """The names that each file needs, on rank 0. Collective: all ranks."""
    original = engine.original
    aliases = {alias: name for alias, name in original.aliases.items() if name in stream.specs}
    plan = partial(target.plan, stream.specs, aliases, original.model_dtype, max_shard_size) if target else None
    return _attempt(engine, plan) or []


def _write_file(
    engine: Engine, target: SaveTarget | DeferredTarget | None, stream: WeightStream, names: Sequence[str]
) -> None:
    """Write one file on rank 0. Where that fails, what the others send is taken all the same. Collective: all ranks."""
    failure: Exception | None = None
    if target is None:
        stream.send(names)
    else:
        tensors = stream.read(names)
        try:
            target.write_next(tensors)
        except PeerError:
            raise
        except Exception as error:
            failure = error
            for _ in tensors:
                pass
    _agree(engine, failure, "writing the model")


def _attempt(engine: Engine, run: Callable[[], _Result] | None) -> _Result | None:
    """Run something on the ranks that have it; a failure is one on all ranks. Collective: all ranks."""
    failure: Exception | None = None
    result: _Result | None = None
    try:
        result = None if run is None else run()
    except Exception as error:
        failure = error
    _agree(engine, failure, "writing the model")
    return result


def load_weights(engine: Engine, path: Path, strict: bool, copy: nn.Module | None = None) -> None:
    """Read what this rank owns, into the model or a copy of it. No weight changes unless the folder fits on all ranks.

    Collective: all ranks.
    """
    has_adapters = is_peft_model(engine.model) and holds_adapters(path)

    def contents() -> CheckpointContents:
        return open_adapters(engine, path) if has_adapters else open_folder(engine.model, path, strict)

    set_weights(engine, contents, path, strict and not has_adapters, copy=copy)


def set_weights(
    engine: Engine,
    open_contents: Callable[[], CheckpointContents],
    path: Path,
    strict: bool,
    what: str = _READING,
    copy: nn.Module | None = None,
) -> None:
    """Set what this rank owns. No weight changes unless all ranks can. Collective: all ranks.

    Args:
        engine: of the model.
        open_contents: returns values by the model's names.
        path: of the folder that they come from, in errors.
        strict: whether missing and unexpected names are an error.
        what: the ranks do, in errors.
        copy: of the model, whose weights are set instead.
    """
    failure: Exception | None = None
    stored_names: dict[str, str] = {}
    try:
        if engine.weights.sharded is not None:
            engine.weights.sharded.refuse_inside()
        contents = open_contents()
        stored_names = _stored_names(engine, contents)
        with engine.weights.internal():
            targets = _check(engine, contents, stored_names, path, strict, copy or engine.model)
    except Exception as error:
        failure = error
    _agree(engine, failure, what)
    uninitialized = engine.original.uninitialized
    lacking = uninitialized.lacking()
    try:
        _copy(engine, contents, stored_names, targets, is_own=copy is None)
    except (OSError, SafetensorError) as error:
        failure = CheckpointError(f"{path} cannot be read: {text_of(error)}. Copy it again, or save the model again.")
        failure.__cause__ = error
    except Exception as error:
        failure = error
    try:
        _agree(engine, failure, what)
    except Exception:
        uninitialized.mark(lacking)
        raise
    if copy is None:
        uninitialized.fill(stored_names)


def _stored_names(engine: Engine, contents: CheckpointContents) -> dict[str, str]:
    """The stored name of each weight of the complete model. A tied weight may be stored under any of its names."""
    names = {name: name for name in (*engine.staged.owners, *engine.original.buffer_names) if name in contents.shapes}
    for alias, name in engine.original.aliases.items():
        if alias in contents.shapes:
            names.setdefault(name, alias)
    return names


def _check(
    engine: Engine,
    contents: CheckpointContents,
    stored_names: Mapping[str, str],
    path: Path,
    strict: bool,
    model: nn.Module,
) -> dict[str, Tensor]:
    """This rank's tensors of the model, or of a copy of it, that the folder holds.

    Raises:
        CheckpointError: the folder does not fit the model.
    """
    kind = type(engine.model).__name__
    targets = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in engine.original.aliases and isinstance(tensor, Tensor)
    }
    known = {*engine.staged.owners, *engine.original.aliases, *engine.original.buffer_names}
    missing = sorted(name for name in targets if name not in stored_names)
    unexpected = sorted(name for name in contents.shapes if name not in known)
    if strict and (missing or unexpected):
        hub = ""
        if path.is_file() and is_pretrained_model(engine.model):
            hub = " Hub names are converted only when a folder is loaded: pass the folder."
        raise CheckpointError(
            f"{path} does not fit {kind}: missing {some_of(missing)}, unexpected {some_of(unexpected)}. "
            f"Use strict=False to load what fits.{hub}"
        )
    targets = {name: tensor for name, tensor in targets.items() if name in stored_names}
    sharded = placements(engine.model)
    for name, tensor in targets.items():
        there = contents.shapes[stored_names[name]]
        here = sharded[name].full_shape if name in sharded else tuple(tensor.shape)
        if there != here:
            raise CheckpointError(
                f"{path} does not fit {kind}: {name} has shape {there} in the folder and {here} in the model. "
                "Load it with from_pretrained(ignore_mismatched_sizes=True) first."
            )
    return targets


@torch.no_grad()
def _copy(
    engine: Engine,
    contents: CheckpointContents,
    stored_names: Mapping[str, str],
    targets: Mapping[str, Tensor],
    is_own: bool,
) -> None:
    wanted = {stored_names[name]: name for name in targets}
    sharded, weights = placements(engine.model), engine.weights.sharded
    for there, stored in contents.read(list(wanted)):
        name = wanted[there]
        value = sharded[name].take(stored, engine.layout.tp.rank) if name in sharded else stored.full()
        if not is_own:
            targets[name].copy_(value)
        elif name in engine.masters.masters:
            engine.masters.set(name, value)
        elif weights is not None and weights.holds(name):
            weights.assign(name, value)
        else:
            targets[name].copy_(value)


def _agree(engine: Engine, failure: Exception | None, what: str) -> None:
    """Fail on all ranks if one rank failed. Collective: all ranks."""
    agree(engine.layout.control, f"{what} (booster.save_model or booster.load_model)", failure, what)
