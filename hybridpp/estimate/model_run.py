"""One recorded run of a model: forward and backward of one micro-batch, with all its layers on one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy
from numpy.typing import NDArray

from hybridpp.estimate.allocations import Allocation
from hybridpp.estimate.op_log import Ops
from hybridpp.estimate.unit_marks import UnitMarks

Numbers: TypeAlias = NDArray[numpy.int64]
ALIVE = int(numpy.iinfo(numpy.int64).max)
"""When an allocation died that is alive at the end."""


@dataclass(frozen=True, eq=False)
class Memory:
    """The allocations of a run, in order.

    Attributes:
        sizes: bytes of each.
        born: the event of each.
        died: the event at which each was freed; :data:`ALIVE`: it was not.
        savers: at these events autograd saved something of an allocation, in the order of the allocations.
        saved: the number of the allocation of each of these.
    """

    sizes: Numbers
    born: Numbers
    died: Numbers
    savers: Numbers
    saved: Numbers

    @classmethod
    def of(cls, allocations: Sequence[Allocation]) -> "Memory":
        """The table of these allocations."""
        counts = [len(one.savers) for one in allocations]
        return cls(
            _numbers([one.size for one in allocations]),
            _numbers([one.born for one in allocations]),
            _numbers([ALIVE if one.died is None else one.died for one in allocations]),
            _numbers([event for one in allocations for event in one.savers]),
            numpy.repeat(numpy.arange(len(allocations)), counts),
        )

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """The recorded run.

    Attributes:
        calls: of the model's units, in order; times are numbers of events, arguments and results those of allocations.
        memory: what was allocated.
        ops: in order.
        loss: the event at which the loss was computed.
        pass_end: the event at which the backward pass of B, or I, had run.
        backward_end: the event at which what it left had been added to the gradients' sums.
        end: the event at which everything had run.
        recomputed: units that ran again in the backward pass.
    """

    calls: tuple[UnitMarks, ...]
    memory: Memory
    ops: Ops
    loss: int
    pass_end: int
    backward_end: int
    end: int
    recomputed: frozenset[str] = frozenset()

    @property
    def sizes(self) -> Numbers:
        """Bytes of each allocation."""
        return self.memory.sizes

    @property
    def born(self) -> Numbers:
        """The event of each allocation."""
        return self.memory.born

    @property
    def died(self) -> Numbers:
        """The event at which each was freed."""
        return self.memory.died

    @cached_property
    def saved(self) -> tuple[Numbers, Numbers]:
        """Pairs of an allocation's index and an event at which something of it was saved for the backward pass."""
        # What is recomputed holds its arguments.
        held = [
            (number, call.begin + 1)
            for call in self.calls
            if call.name in self.recomputed
            for number in call.arguments
            if number is not None
        ]
        pairs = numpy.array(held, dtype=numpy.int64).reshape(-1, 2)
        return (
            numpy.concatenate([self.memory.saved, pairs[:, 0]]),
            numpy.concatenate([self.memory.savers, pairs[:, 1]]),
        )

    @cached_property
    def in_unit(self) -> NDArray[numpy.bool_]:
        """Whether each allocation was made inside the forward of a unit."""
        if not self.calls:
            return numpy.zeros(len(self.memory), dtype=bool)
        begins = numpy.array([call.begin for call in self.calls], dtype=numpy.int64)
        ends = numpy.array([call.end for call in self.calls], dtype=numpy.int64)
        call = numpy.searchsorted(begins, self.born, side="left") - 1
        return (call >= 0) & (self.born <= ends[numpy.maximum(call, 0)])

    def forward_window(self, first: int, last: int) -> tuple[int, int]:
        """The events of the forward of a stage that has the calls from ``first`` to ``last``."""
        begin = 0 if first == 0 else self.calls[first - 1].end
        return begin, self.loss if last == len(self.calls) - 1 else self.calls[last].end

    def backward_window(self, first: int, last: int) -> tuple[int, int]:
        """The events of its backward pass, without what W leaves for later."""
        begin = self.loss if last == len(self.calls) - 1 else self._gradient_after(last)
        return begin, self.backward_end if first == 0 else self._gradient_after(first - 1)

    def _gradient_after(self, call: int) -> int:
        """When the backward pass came to a call: when it left all later ones, if its own result has no gradient."""
        later = [one.gradient for one in self.calls[call:] if one.gradient is not None]
        own = self.calls[call].gradient
        return int(own if own is not None else max(later, default=self.loss))


def _numbers(values: Sequence[int]) -> Numbers:
    """As an array, also of none."""
    return numpy.array(values, dtype=numpy.int64)


def peak(sizes: Numbers, born: Numbers, died: Numbers, window: tuple[int, int]) -> tuple[int, int]:
    """The most bytes that are alive at once in a window of events, and the event."""
    begin, end = window
    here = (born <= end) & (died > begin)
    sizes, starts, stops = sizes[here], numpy.maximum(born[here], begin), numpy.minimum(died[here], end + 1)
    changes = numpy.zeros(end - begin + 2, dtype=numpy.int64)
    numpy.add.at(changes, starts - begin, sizes)
    numpy.add.at(changes, stops - begin, -sizes)
    alive = numpy.cumsum(changes[:-1])
    at = int(alive.argmax())
    return int(alive[at]), begin + at


def total(sizes: Numbers, chosen: NDArray[numpy.bool_] | Sequence[bool]) -> int:
    """Bytes of the chosen allocations."""
    return int(sizes[chosen].sum())
