"""Bring what the ranks have together on rank 0: tensors one at a time, and descriptions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpp.cluster import Group, gather_numbers, gather_objects


def gather_tensors(control: Group, sources: Sequence[int], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of the ranks in ``sources``, on the host of rank 0; empty elsewhere.

    A name that several ranks have is taken from the first of them.

    Collective: all of ``control``; one message per tensor.

    Args:
        control: all ranks of the world, over host memory.
        sources: ranks to take tensors from.
        tensors: this rank's, by global name.
    """
    own_specs = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()
    }
    listed = gather_objects(
        control, "in booster.save_model, which gathers the weights", own_specs if control.rank in sources else {}
    )
    owner = {name: rank for rank in reversed(sources) for name in listed[rank]}
    complete: dict[str, Tensor] = {}
    for name in sorted(owner):
        rank = owner[name]
        if rank == control.rank:
            host = tensors[name].detach().cpu().contiguous()
            if rank == 0:
                complete[name] = host
            else:
                control.send(host, 0).wait()
        elif control.rank == 0:
            dtype, shape = listed[rank][name]
            complete[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            control.receive(complete[name], rank).wait()
    return complete


def gather_json(control: Group, call: str, value: Any) -> list[Any]:
    """Every rank's ``value``, by rank, on rank 0; empty elsewhere. Large values are sent to rank 0 only.

    Collective: all of ``control``.

    Args:
        control: over host memory.
        call: that this rank is in, see :mod:`hybridpp.cluster.gather_numbers`.
        value: anything that JSON can hold.
    """
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(size) for (size,) in gather_numbers(control, call, [data.numel()])]
    if control.rank:
        control.send(data, 0).wait()
        return []
    values = [value]
    for rank, size in enumerate(sizes[1:], start=1):
        received = torch.empty(size, dtype=torch.uint8)
        control.receive(received, rank).wait()
        values.append(json.loads(received.numpy().tobytes()))
    return values
