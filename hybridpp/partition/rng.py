"""RNG streams: the random numbers that a part of the forward draws depend on its name, not on the rank that runs it.

A stream belongs to one of the finest units of the model, which do not depend on the number of stages. Torch's
generators are set before such a unit and again for the container code after it, from the micro-batch's key and the
unit's name. They are also set before every linear layer inside the unit, so that the number of values drawn on sharded
activations, which lie between two linear layers, has no effect on later ones.
"""

import hashlib
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from hybridpp.cluster import stream_seed, stream_seeder
from hybridpp.module_adapter import Forward
from hybridpp.nn.linear import is_matrix_layer
from hybridpp.partition.compiled import compiled_parts

# Looked up for every layer that runs.
_is_compiling = torch.compiler.is_compiling
_host_seed = torch.default_generator.initial_seed


@lru_cache(maxsize=65536)
def _stream_id(name: str, occurrence: int, after_unit: bool) -> int:
    digest = hashlib.blake2b(f"{name} {occurrence} {after_unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def inner_linear_layers(model: nn.Module, units: Iterable[str]) -> tuple[str, ...]:
    """Names of the linear layers inside the units, except those in compiled modules, which have one stream."""
    inside = tuple(f"{unit}." for unit in units)
    compiled = compiled_parts(model)
    named = [(name, module) for name, module in model.named_modules() if module not in compiled]
    return tuple(name for name, module in named if name.startswith(inside) and is_matrix_layer(module))


class RngTrace(NamedTuple):
    """The streams of one forward, for recomputing parts of it.

    Attributes:
        units: the number of a unit's call (0 for the first), by its name and the stream before it.
        layers: the name of each linear layer called, the seed before it, and its stream.
    """

    units: dict[tuple[str, int], int]
    layers: list[tuple[str, int, int]]


class UnitRng:
    """Unit handler for the finest units in one micro-batch's forward; :meth:`before_layer` handles layers inside them.

    Args:
        key: the micro-batch's key.
        device: where the forward draws.

    Attributes:
        trace: the calls so far.
    """

    def __init__(self, key: int, device: torch.device):
        self.trace = RngTrace({}, [])
        self._seed = stream_seeder(key, device)
        self._occurrences: dict[str, int] = {}
        self._layer_calls: dict[str, int] = {}
        self._inside = False
        self._move(_stream_id("", 0, False))

    def _move(self, stream: int) -> None:
        self._last = stream
        self._seed(stream)

    def _enter(self, name: str) -> int:
        occurrence = self._occurrences.get(name, 0)
        self._occurrences[name] = occurrence + 1
        return occurrence

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        occurrence = self._enter(name)
        self.trace.units[name, self._last] = occurrence
        self._move(_stream_id(name, occurrence, False))
        self._inside = True
        self._layer_calls.clear()
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = False
            self._move(_stream_id(name, occurrence, True))

    def before_layer(self, name: str) -> None:
        """Listener to linear layers: each call inside a unit has a stream of its own."""
        if not self._inside or _is_compiling():
            return
        occurrence = self._layer_calls.get(name, 0)
        self._layer_calls[name] = occurrence + 1
        # Relative to the unit's stream, because other units may run on other ranks.
        stream = self._last + _stream_id(name, occurrence, False)
        self.trace.layers.append((name, _host_seed(), stream))
        self._seed(stream)

    def skip(self, names: Iterable[str]) -> None:
        """Advance past units that run on other ranks."""
        for name in names:
            occurrence = self._enter(name)
            self._move(_stream_id(name, occurrence, True))


class RecomputeRng:
    """Handlers for the finest units and the linear layers inside them in a backward pass.

    Activation checkpointing restores the generators and then runs a unit, or a part of it, again. The restored seed
    identifies the unit's call, so the unit draws the same random numbers.
    """

    def __init__(self, trace: RngTrace, key: int, device: torch.device):
        self._trace = trace
        self._key = key
        self._seed = stream_seeder(key, device)
        self._inside = False

    # Most backward passes recompute nothing.
    @cached_property
    def _units(self) -> dict[tuple[str, int], int]:
        return {(name, stream_seed(self._key, stream)): call for (name, stream), call in self._trace.units.items()}

    @cached_property
    def _layers(self) -> dict[tuple[str, int], int]:
        return {(name, seed): stream for name, seed, stream in self._trace.layers}

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        occurrence = self._units.get((name, _host_seed()), 0)
        self._seed(_stream_id(name, occurrence, False))
        self._inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = False
            self._seed(_stream_id(name, occurrence, True))

    def before_layer(self, name: str) -> None:
        """Listener to linear layers, as in the forward."""
        stream = self._layers.get((name, _host_seed()))
        if stream is not None:
            self._seed(stream)
