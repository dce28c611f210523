"""Random numbers by place: what a part of the forward draws depends on its name, not on where it runs.

The parts are the finest units that a model can be cut into, whatever number of stages it is cut into, so splitting it
more finely changes nothing. Before such a unit, and again for the glue behind it, torch's generators are set from the
micro-batch's key and the unit's name; and before every linear layer inside it, so that how many numbers were drawn on
divided activations, which lie between two of them, does not matter behind.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from hybridpp.cluster import place_seed, seed_place
from hybridpp.partition.intercept import Forward


@lru_cache(maxsize=65536)
def _place(name: str, occurrence: int, behind: bool) -> int:
    digest = hashlib.blake2b(f"{name} {occurrence} {behind}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def inner_layers(model: nn.Module, units: Iterable[str]) -> tuple[str, ...]:
    """Names of the linear layers inside the units."""
    inside = tuple(f"{unit}." for unit in units)
    return tuple(name for name, module in model.named_modules() if name.startswith(inside) and _is_linear(module))


def _is_linear(module: nn.Module) -> bool:
    """Whether a module only multiplies by a matrix, whatever its class."""
    if isinstance(module, nn.Embedding | torch.jit.ScriptModule) or next(module.children(), None) is not None:
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2


class Seen(NamedTuple):
    """What a forward leaves for running parts of it again.

    Attributes:
        units: which call of a unit it was (0 for the first), by its name and the place before it.
        layers: the place of a linear layer's call, by its name and the seed before it.
    """

    units: dict[tuple[str, int], int]
    layers: dict[tuple[str, int], int]


class Dice:
    """The unit handler, over the finest units, of one micro-batch's forward; and :meth:`layer`, over what is in them.

    Args:
        key: of the micro-batch.
        device: where the forward draws.

    Attributes:
        seen: its calls.
    """

    def __init__(self, key: int, device: torch.device):
        self.seen = Seen({}, {})
        self._key = key
        self._device = device
        self._occurrences: dict[str, int] = {}
        self._layer_calls: dict[str, int] = {}
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
        self.seen.units[name, self._last] = occurrence
        self._move(_place(name, occurrence, False))
        self._inside = True
        self._layer_calls.clear()
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = False
            self._move(_place(name, occurrence, True))

    def layer(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The handler of linear layers: each call inside a unit is a place of its own."""
        if self._inside and not torch.compiler.is_compiling():
            occurrence = self._layer_calls.get(name, 0)
            self._layer_calls[name] = occurrence + 1
            # Counted from the unit's call, since others may run elsewhere.
            place = self._last + _place(name, occurrence, False)
            self.seen.layers[name, torch.default_generator.initial_seed()] = place
            seed_place(self._key, place, self._device)
        return forward(*args, **kwargs)

    def skip(self, names: Iterable[str]) -> None:
        """Go past units that run elsewhere."""
        for name in names:
            occurrence = self._enter(name)
            self._move(_place(name, occurrence, True))


class Recompute:
    """The handlers, over the finest units and the linear layers inside them, of a backward pass.

    Activation checkpointing runs a unit (or a part of one) again, after it has put the generators back to where they
    stood before it: from that follows which call of the unit it is, and it draws the same numbers again.
    """

    def __init__(self, seen: Seen | None, key: int, device: torch.device):
        units, self._layers = seen or Seen({}, {})
        self._seen = {(name, place_seed(key, place)): occurrence for (name, place), occurrence in units.items()}
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

    def layer(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The handler of linear layers: as in the forward."""
        place = self._layers.get((name, torch.default_generator.initial_seed()))
        if place is not None:
            seed_place(self._key, place, self._device)
        return forward(*args, **kwargs)
