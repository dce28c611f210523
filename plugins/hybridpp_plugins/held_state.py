"""Bytes that a rank holds from step to step, as they lie in memory."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hybridpp_plugins.engine import Engine


def held_bytes(engine: Engine) -> dict[str, int]:
    """Bytes of this rank's weights, gradients, masters, moments and buffers, and what of that is in host memory.

    Tensors that share memory count once, at the first of these names. Weights that are gathered only while they are
    used (ZeRO 3) count as what this replica keeps of them.
    """
    weights, optimizer = engine.weights, engine.optimizer
    with weights.internal():
        parameters = [parameter.detach() for parameter in engine.model.parameters()]
    if weights.flat is not None:
        parameters += weights.flat.pieces.values()
    if weights.sharded is not None:
        parameters += weights.sharded.own_parts().values()
    states: Iterable[dict[str, Any]] = () if optimizer is None else optimizer.state.values()
    tensors: dict[str, list[Tensor]] = {
        "weights": parameters,
        "gradients": [] if engine.buckets is None else engine.buckets.held_tensors,
        "masters": list(engine.masters.masters.values()),
        "moments": [value for state in states for value in state.values() if isinstance(value, Tensor)],
        "buffers": list(engine.model.buffers()),
    }
    on_device, seen = engine.device.type, set[int]()
    held = dict.fromkeys((*tensors, "host"), 0)
    for name, members in tensors.items():
        for device, num_bytes in _storages(members, seen):
            held[name if device == on_device else "host"] += num_bytes
    return held


def _storages(tensors: Iterable[Tensor], seen: set[int]) -> Iterable[tuple[str, int]]:
    """The device and the bytes of each storage that has not been seen."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key and key not in seen and tensor.device != torch.device("meta"):
            seen.add(key)
            yield tensor.device.type, storage.nbytes()
