"""Bring what the ranks own together on rank 0, one tensor at a time."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpp.cluster import Group


def gather_objects(group: Group, value: Any) -> list[Any]:
    """Every member's ``value`` (anything JSON can hold), in the group's order. Collective: all of ``group``."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [int(length) for length in group.all_gather(torch.tensor([data.numel()]))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = group.all_gather(padded)
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]


def gather_tensors(control: Group, sources: Sequence[int], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of the ranks in ``sources``, on the host of rank 0; empty elsewhere.

    A name that several ranks have is taken from the first of them.

    Collective: all of ``control``; one message per tensor.

    Args:
        control: all ranks of the world, over host memory.
        sources: ranks to take tensors from.
        tensors: this rank's, by global name.
    """
    mine = {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()}
    listed = gather_objects(control, mine if control.rank in sources else {})
    owner = {name: rank for rank in reversed(sources) for name in listed[rank]}
    whole: dict[str, Tensor] = {}
    for name in sorted(owner):
        rank = owner[name]
        if rank == control.rank:
            host = tensors[name].detach().cpu().contiguous()
            if rank == 0:
                whole[name] = host
            else:
                control.send(host, 0).wait()
        elif control.rank == 0:
            dtype, shape = listed[rank][name]
            whole[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            control.receive(whole[name], rank).wait()
    return whole
