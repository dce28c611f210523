"""Bring descriptions of what the ranks have together on rank 0."""

import json
from typing import Any

import torch

from hybridpp.cluster import Group, gather_numbers


def gather_json(control: Group, call: str, value: Any) -> list[Any]:
    """Every rank's ``value``, by rank, on rank 0; empty elsewhere. Large values are sent to rank 0 only.

    Collective: all of ``control``.

    Args:
        control: over host memory.
        call: that this rank is in, see :mod:`hybridpp.cluster.gather_numbers`.
        value: anything that JSON can hold.
    """
    text = json.dumps(value).encode() if control.rank else b" "
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
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
