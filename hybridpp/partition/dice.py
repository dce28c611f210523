"""Random numbers by place: what a part of the forward draws depends on its name, not on where it runs.

The parts are the finest units that a model can be cut into, whatever number of stages it is cut into, so splitting it
more finely changes nothing. Before such a unit, and again for the glue behind it, torch's generators are set from the
micro-batch's key and the unit's name.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from hybridpp.cluster import place_seed, seed_place
from hybridpp.partition.intercept import Forward


@lru_cache(maxsize=65536)
def _place(name: str, occurrence: int, behind: bool) -> int:
    digest = hashlib.blake2b(f"{name} {occurrence} {behind}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Dice:
    """The unit handler, over the finest units, of one micro-batch's forward.

    Args:
        key: of the micro-batch.
        device: where the forward draws.

    Attributes:
        seen: which call of a unit it was (0 for the first), by its name and the place before it.
    """

    def __init__(self, key: int, device: torch.device):
        self.seen: dict[tuple[str, int], int] = {}
        self._key = key
        self._device = device
        self._occurrences: dict[str, int] = {}
        self._inside = False
        self._move(_place("", 0, False))

    def _move(self, place: int) -> None:
        self._last = place
        seed_place(self._key, place, self._device)

    def _enter(self, name: str) -> int:
        occurrence = self._occurrences.get(name, 0)
        self._occurrences[name] = occurrence + 1
        return occurrence

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        occurrence = self._enter(name)
        self.seen[name, self._last] = occurrence
        self._move(_place(name, occurrence, False))
        self._inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = False
            self._move(_place(name, occurrence, True))

    def skip(self, names: Iterable[str]) -> None:
        """Go past units that run elsewhere."""
        for name in names:
            occurrence = self._enter(name)
            self._move(_place(name, occurrence, True))


class Recompute:
    """The unit handler, over the finest units, of a backward pass.

    Activation checkpointing runs a unit again, after it has put the generators back to where they stood before it:
    from that follows which call of the unit it is, and it draws the same numbers again.
    """

    def __init__(self, seen: dict[tuple[str, int], int], key: int, device: torch.device):
        self._seen = {(name, place_seed(key, place)): occurrence for (name, place), occurrence in seen.items()}
        self._key = key
        self._device = device
        self._inside = False

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        occurrence = self._seen.get((name, torch.default_generator.initial_seed()), 0)
        seed_place(self._key, _place(name, occurrence, False), self._device)
        self._inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = False
            seed_place(self._key, _place(name, occurrence, True), self._device)
