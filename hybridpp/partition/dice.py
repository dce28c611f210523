"""Random numbers by place: what a part of the forward draws depends on its name, not on where it runs.

The parts are the finest units that a model can be cut into, whatever number of stages it is cut into, so splitting it
more finely changes nothing. Before such a unit, and again for the glue behind it, torch's generators are set from the
micro-batch's key and the unit's name; and before every linear layer inside it, so that how many numbers were drawn on
divided activations, which lie between two of them, does not matter behind.
"""

import hashlib
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from hybridpp.cluster import place_seed, place_seeder
from hybridpp.partition.intercept import Forward

# Looked up for every layer that runs.
_is_compiling = torch.compiler.is_compiling
_host_seed = torch.default_generator.initial_seed


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
        layers: of each call of a linear layer its name, the seed before it, and its place.
    """

    units: dict[tuple[str, int], int]
    layers: list[tuple[str, int, int]]


class Dice:
    """The unit handler, over the finest units, of one micro-batch's forward; and :meth:`before_layer`, over what is in
    them.

    Args:
        key: of the micro-batch.
        device: where the forward draws.

    Attributes:
        seen: its calls.
    """

    def __init__(self, key: int, device: torch.device):
        self.seen = Seen({}, [])
        self._seed = place_seeder(key, device)
        self._occurrences: dict[str, int] = {}
        self._layer_calls: dict[str, int] = {}
        self._inside = False
        self._move(_place("", 0, False))

    def _move(self, place: int) -> None:
        self._last = place
        self._seed(place)

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

    def before_layer(self, name: str) -> None:
        """The listener to linear layers: each call inside a unit is a place of its own."""
        if not self._inside or _is_compiling():
            return
        occurrence = self._layer_calls.get(name, 0)
        self._layer_calls[name] = occurrence + 1
        # Counted from the unit's call, since others may run elsewhere.
        place = self._last + _place(name, occurrence, False)
        self.seen.layers.append((name, _host_seed(), place))
        self._seed(place)

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
        self._seen = seen or Seen({}, [])
        self._key = key
        self._seed = place_seeder(key, device)
        self._inside = False

    # Most backward passes run nothing again.
    @cached_property
    def _units(self) -> dict[tuple[str, int], int]:
        return {(name, place_seed(self._key, place)): call for (name, place), call in self._seen.units.items()}

    @cached_property
    def _layers(self) -> dict[tuple[str, int], int]:
        return {(name, seed): place for name, seed, place in self._seen.layers}

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        occurrence = self._units.get((name, _host_seed()), 0)
        self._seed(_place(name, occurrence, False))
        self._inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = False
            self._seed(_place(name, occurrence, True))

    def before_layer(self, name: str) -> None:
        """The listener to linear layers: as in the forward."""
        place = self._layers.get((name, _host_seed()))
        if place is not None:
            self._seed(place)
