"""RNG streams: the random numbers that a part of the forward draws depend on its name, not on the rank that runs it.

A stream belongs to one of the finest units of the model, which do not depend on the number of stages. Torch's
generators are set before such a unit and again for the container code after it, from the micro-batch's key and the
unit's name. They are also set before every linear layer inside the unit, so that the number of values drawn on sharded
activations, which lie between two linear layers, has no effect on later ones. For parts that draw nothing they are not
set: see :class:`UnitRng`.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from hybridpp.cluster import DrawMonitor, default_generators, has_drawn, stream_seed, stream_seeder
from hybridpp.module_adapter import Forward
from hybridpp.nn import walk
from hybridpp.nn.linear import is_matrix_layer
from hybridpp.partition.compiled import compiled_parts
from hybridpp.partition.drawing_code import ConditionalDraws
from hybridpp.partition.drawing_parts import warn_of_draws

# Looked up for every layer that runs.
_is_compiling = torch.compiler.is_compiling
_host_seed = torch.default_generator.initial_seed

_NONE = ConditionalDraws()


@lru_cache(maxsize=65536)
def _stream_id(name: str, occurrence: int, after_unit: bool) -> int:
    digest = hashlib.blake2b(f"{name} {occurrence} {after_unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def inner_linear_layers(model: nn.Module, units: Iterable[str]) -> tuple[str, ...]:
    """Names of the linear layers inside the units, except those in compiled modules, which have one stream."""
    inside = tuple(f"{unit}." for unit in units)
    compiled = compiled_parts(model)
    named = [(name, module) for name, module in walk.named_modules(model) if module not in compiled]
    return tuple(name for name, module in named if name.startswith(inside) and is_matrix_layer(module))


class RngTrace(NamedTuple):
    """The streams of one forward, for recomputing parts of it.

    Attributes:
        units: the number of a unit's call (0 for the first), by its name and the stream before it. Of calls between
            which no generator was set, the last one counts: the others are followed by nothing that draws.
        layers: the name of each linear layer called inside a unit that may draw, the seed before it, and its stream.
        streams: those for which the generators were set.
        quiet: those of units that do not draw.
    """

    units: dict[tuple[str, int], int]
    layers: list[tuple[str, int, int]]
    streams: set[int]
    quiet: set[int]


class UnitRng:
    """Unit handler for the finest units in one micro-batch's forward; :meth:`before_layer` handles layers inside them.

    The generators are set only for parts that draw, and after them. A part that has not run in this mode before is
    treated as one that draws, and observed. Where parts were not expected to draw, :meth:`finish` checks that they did
    not: that costs one look at the generators per forward, instead of two seeds per unit and one per linear layer.

    Args:
        key: the micro-batch's key.
        device: where the forward draws.
        parts: whether the part of a stream draws, as far as it is known; it is added to. None: every part may.
        monitor: of the model.
        conditional: parts that draw in some micro-batches only, as their code shows. They count as parts that draw.

    Attributes:
        trace: the calls so far.
    """

    def __init__(
        self,
        key: int,
        device: torch.device,
        parts: dict[int, bool] | None = None,
        monitor: DrawMonitor | None = None,
        conditional: ConditionalDraws = _NONE,
    ):
        self.trace = RngTrace({}, [], set(), set())
        self._conditional = conditional
        self._key = key
        self._seed = stream_seeder(key, device)
        self._generators = default_generators(device)
        self._parts = parts
        self._monitor = monitor or DrawMonitor()
        self._monitor.stop()  # the forward before may have failed
        self._occurrences: dict[str, int] = {}
        self._layer_calls: dict[str, int] = {}
        self._inside = False
        self._learned: int | None = None
        self._trusted: list[tuple[str, int]] = []
        self._has_drawn = True
        self._begin("", _stream_id("", 0, False), conditional.in_containers)

    def _begin(self, name: str, stream: int, is_conditional: bool) -> bool:
        """Begin the part of a stream; whether it may draw."""
        draws = True if is_conditional else None if self._parts is None else self._parts.get(stream)
        if draws is False and not self._has_drawn:
            self._trusted.append((name, stream))
            return False
        if self._trusted:
            self._check()
        self._last = self._latest = stream
        self._seed(stream)
        self.trace.streams.add(stream)
        self._has_drawn = draws is not False
        if draws is None and self._parts is not None:
            self._learned = stream
            self._monitor.observe()
        return self._has_drawn

    def _end(self, is_complete: bool = True) -> None:
        """End a part; if it was observed, whether it drew is known now."""
        stream, self._learned = self._learned, None
        if stream is None or self._parts is None:
            return
        self._monitor.stop()
        if is_complete:
            self._has_drawn = self._monitor.found or self._has_moved()
            self._parts[stream] = self._has_drawn

    def _has_moved(self) -> bool:
        """Whether a generator is not as it was seeded last."""
        is_other = _host_seed() != stream_seed(self._key, self._latest)
        return is_other or any(map(has_drawn, self._generators))

    def _check(self) -> None:
        """Find out whether parts drew that were trusted not to; then they are no longer."""
        trusted, self._trusted = self._trusted, []
        if self._parts is not None and self._has_moved():
            self._parts.update((stream, True) for _, stream in trusted)
            warn_of_draws([name for name, _ in trusted])

    def finish(self, is_last: bool) -> None:
        """End the forward; the criterion, which follows the last stage's, draws as part of the model's last part."""
        self._end()
        if not self._trusted:
            return
        stream = self._trusted[-1][1]
        self._check()
        if is_last:
            self._seed(stream)

    def _enter(self, name: str) -> int:
        occurrence = self._occurrences.get(name, 0)
        self._occurrences[name] = occurrence + 1
        return occurrence

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        occurrence = self._enter(name)
        self._end()
        self.trace.units[name, self._last] = occurrence
        stream = _stream_id(name, occurrence, False)
        self._monitor.expected = self._begin(name, stream, name in self._conditional.units)
        if not self._monitor.expected:
            self.trace.quiet.add(stream)
            # Also if its stream was set: those of the layers inside are not.
            if not self._trusted:
                self._trusted.append((name, stream))
        self._inside = True
        self._layer_calls.clear()
        is_complete = False
        try:
            output = forward(*args, **kwargs)
            is_complete = True
            return output
        finally:
            self._inside, self._monitor.expected = False, True
            self._end(is_complete)
            self._begin(name, _stream_id(name, occurrence, True), self._conditional.in_containers)

    def before_layer(self, name: str) -> None:
        """Listener to linear layers: each call inside a unit has a stream of its own."""
        if not self._inside or not self._monitor.expected or _is_compiling():
            return
        occurrence = self._layer_calls.get(name, 0)
        self._layer_calls[name] = occurrence + 1
        if self._learned is not None:
            for generator in self._generators:
                self._monitor.note(generator)
        # Relative to the unit's stream, because other units may run on other ranks.
        self._latest = stream = self._last + _stream_id(name, occurrence, False)
        self.trace.layers.append((name, _host_seed(), stream))
        self._seed(stream)

    def skip(self, names: Sequence[str]) -> None:
        """Advance past units that run on other ranks."""
        if not names:
            return
        self._end()
        for name in names:
            occurrence = self._enter(name)
        self._begin(name, _stream_id(name, occurrence, True), self._conditional.in_containers)


class RecomputeRng:
    """Handlers for the finest units and the linear layers inside them in a backward pass.

    Activation checkpointing restores the generators and then runs a unit, or a part of it, again. The restored seed
    identifies the unit's call, so the unit draws the same random numbers.
    """

    def __init__(self, trace: RngTrace, key: int, device: torch.device, monitor: DrawMonitor | None = None):
        self._trace = trace
        self._key = key
        self._seed = stream_seeder(key, device)
        self._monitor = monitor or DrawMonitor()
        self._inside = False

    # Most backward passes recompute nothing.
    @cached_property
    def _units(self) -> dict[tuple[str, int], int]:
        return {(name, stream_seed(self._key, stream)): call for (name, stream), call in self._trace.units.items()}

    @cached_property
    def _layers(self) -> dict[tuple[str, int], int]:
        return {(name, seed): stream for name, seed, stream in self._trace.layers}

    def _set(self, stream: int) -> None:
        if stream in self._trace.streams:
            self._seed(stream)

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        occurrence = self._units.get((name, _host_seed()), 0)
        stream = _stream_id(name, occurrence, False)
        self._set(stream)
        self._inside = True
        try:
            with self._monitor.expecting(stream not in self._trace.quiet):
                return forward(*args, **kwargs)
        finally:
            self._inside = False
            self._set(_stream_id(name, occurrence, True))

    def before_layer(self, name: str) -> None:
        """Listener to linear layers, as in the forward."""
        stream = self._layers.get((name, _host_seed()))
        if stream is not None:
            self._seed(stream)
