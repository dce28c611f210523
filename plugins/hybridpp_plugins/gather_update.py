"""What replicas update in parts (ZeRO), put together on each of them: weights, and the optimizer's state."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybridpp.checkpoint.plain_values import decode, encode
from hybridpp.cluster import gather_objects
from hybridpp.data_parallel import ShardLayout
from hybridpp.data_parallel.bucket import piece_in, views_in
from hybridpp.errors import ConfigError
from hybridpp_plugins.agreement import agree
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.optimizer import HybridOptimizer

_CALL = "in booster.unboost"
# A tensor of the parameter's shape; another tensor, which belongs to all of the parameter; anything else.
_LIKE, _FULL, _VALUE = "like", "full", "value"

Described: TypeAlias = dict[str, dict[str, list[Any]]]


class CompleteUpdate(NamedTuple):
    """What the optimizer of a model works on, on every replica.

    Attributes:
        weights: values of the weights, by name: of trained ones in half precision those of their masters.
        state: of the optimizer, by the parameter's name.
    """

    weights: dict[str, Tensor]
    state: dict[str, dict[str, Any]]


def gather_update(engine: Engine, boosted: HybridOptimizer) -> CompleteUpdate:
    """Put together what the replicas of a model have. Collective: all replicas, each of which has all layers.

    Args:
        engine: of the model.
        boosted: its optimizer.

    Raises:
        ConfigError: the state of a part of a parameter says nothing about the complete one, or the script has given a
            parameter other memory; on every replica.
    """
    layout, described, failure = engine.weights.layout, Described(), None
    assert layout is not None, "there is an optimizer"
    try:
        engine.adapter.check_removable()
        boosted.target.pull()
        described = _described(boosted, layout)
    except ConfigError as error:
        failure = error
    agree(engine.layout.control, _CALL, failure, "booster.unboost")
    merged: Described = {}
    first_rank: dict[str, int] = {}
    for rank, row in enumerate(gather_objects(engine.layout.control, _CALL, described)):
        for name, entries in row.items():
            merged.setdefault(name, entries)
            first_rank.setdefault(name, rank)
    tensors = boosted.target.tensors
    weights = complete_tensors(engine, {name: tensor.detach() for name, tensor in tensors.items()})
    if engine.weights.sharded is not None:
        with engine.weights.unsharded():
            frozen = {name: p for name, p in engine.model.named_parameters() if name not in engine.weights.parameters}
            weights |= {name: p.detach().clone() for name, p in frozen.items() if engine.weights.sharded.holds(name)}
    return CompleteUpdate(weights, _complete_state(engine, boosted, merged, first_rank))


def _described(boosted: HybridOptimizer, layout: ShardLayout) -> Described:
    """What of the state this replica has: by parameter and key the kind, with the dtype, shape or value.

    Raises:
        ConfigError: see :func:`gather_update`.
    """
    optimizer, found = boosted.unwrap(), Described()
    for name, tensor in boosted.target.tensors.items():
        if entries := optimizer.state.get(tensor):
            found[name] = {key: _entry(name, key, tensor, value) for key, value in entries.items()}
            torn = [key for key, (kind, *_) in found[name].items() if kind == _FULL]
            if torn and not layout.pieces[name].is_whole:
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps {torn[0]!r} of shape {tuple(entries[torn[0]].shape)} for a part "
                    f"of {name}, from which that of the complete parameter cannot be put together. Call "
                    "booster.save_model, and load the folder into a new model."
                )
    return found


def _entry(name: str, key: str, tensor: Tensor, value: Any) -> list[Any]:
    if not isinstance(value, Tensor) or (value.dim() == 0 and tensor.dim() > 0):
        return [_VALUE, encode(value, f"optimizer.state[{name!r}][{key!r}]")]
    dtype = str(value.dtype).removeprefix("torch.")
    return [_LIKE, dtype] if value.shape == tensor.shape else [_FULL, dtype, list(value.shape)]


def complete_tensors(
    engine: Engine, parts: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Tensors of the parameters' shapes, from what each replica has of them, by name. Collective: all replicas.

    Args:
        engine: of the model.
        parts: of this replica.
        dtype: of all parts, on all replicas; None: in each bucket that of what the optimizer updates.
    """
    layout, found = engine.weights.layout, dict[str, Tensor]()
    assert layout is not None, "there is an optimizer"
    for bucket in layout.buckets:
        parameter = engine.weights.parameters[bucket.slots[0].name]
        wide = torch.promote_types(parameter.dtype, torch.float32) if engine.weights.in_half else parameter.dtype
        flat = torch.zeros(bucket.size, dtype=dtype or wide, device=engine.device)
        for piece in bucket.pieces(layout.index):
            if piece.name in parts:
                piece_in(flat, piece).copy_(parts[piece.name])
        engine.weights.replicas.all_gather_segments(flat).wait()
        # Copies, because a view would keep all of the bucket.
        found |= {name: view.clone() for name, view in views_in(flat, bucket).items()}
    return found


def _complete_state(
    engine: Engine, boosted: HybridOptimizer, merged: Described, first_rank: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    tensors, held = boosted.target.tensors, boosted.unwrap().state
    own = {name: held[tensor] for name, tensor in tensors.items() if name in merged}
    state: dict[str, dict[str, Any]] = {name: {} for name in merged}
    for key, dtype, names in _like(merged):
        parts = {name: own[name][key] for name in names if name in own}
        complete = complete_tensors(engine, parts, dtype)
        for name in names:
            state[name][key] = complete[name]
    for name, entries in merged.items():
        for key, (kind, *what) in entries.items():
            if kind == _FULL:
                dtype, shape = getattr(torch, what[0]), what[1]
                local = own[name][key] if name in own else torch.zeros(shape, dtype=dtype, device=engine.device)
                state[name][key] = engine.layout.dp.all_gather(local.to(engine.device))[first_rank[name]]
            elif kind == _VALUE:
                state[name][key] = own[name][key] if name in own else decode(what[0])
    # In the order in which the optimizer has made them, in which a saved state lists them.
    return {name: {key: state[name][key] for key in entries} for name, entries in merged.items()}


def _like(merged: Described) -> Iterator[tuple[str, torch.dtype, list[str]]]:
    """The keys of tensors of the parameters' shapes, each with its dtype and the names of its parameters."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, entries in merged.items():
        for key, (kind, *what) in entries.items():
            if kind == _LIKE:
                found[key, what[0]].append(name)
    for key, dtype in sorted(found):
        yield key, getattr(torch, dtype), found[key, dtype]
