"""Exchange small Python values between ranks."""

import json
from typing import Any

import torch

from hybridpp.cluster.gather_numbers import gather_numbers
from hybridpp.cluster.world import Group


def gather_objects(group: Group, call: str, value: Any) -> list[Any]:
    """Every member's ``value``, in the group's order.

    Collective: two all-gathers over ``group``, of lengths and of text; every member must call it.

    Args:
        group: over host memory.
        call: that this rank is in, see :mod:`hybridpp.cluster.gather_numbers`.
        value: anything that JSON can hold.

    Raises:
        UnlikeCallsError: the ranks are in different calls; raised on every rank.
    """
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [int(length) for (length,) in gather_numbers(group, call, [data.numel()])]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = group.all_gather(padded)
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]
