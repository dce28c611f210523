"""The run of a model of many equal blocks, from a run that leaves most of them out.

Where blocks are equal, or take turns (one with all tokens after five with a window), the record of one period follows
that of another in the forward, in the backward pass and in what it leaves for later (W). Two periods in a row show it;
then the second one's part is repeated for those that were left out.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import nn

from hybridpp.estimate.model_run import ALIVE, Memory, ModelRun, Numbers
from hybridpp.estimate.op_log import Ops
from hybridpp.estimate.unit_marks import UnitMarks

# Blocks that take turns: at most so many.
_LONGEST_PERIOD = 8
# So many periods must be left out, or it is not worth it.
_LEAST = 2
# ``forward`` is where layers of ours are.
_OF_MODULES = {*vars(nn.Module()), "forward"}
_CHOICES = (dict, list, tuple, set, frozenset, torch.dtype, FunctionType, BuiltinFunctionType, Enum)


class Repeated(NamedTuple):
    """Blocks that need not run, as others of the same row do.

    Attributes:
        names: of the blocks, in the order of their calls: whole periods.
        period: how many blocks take turns; 1: all are equal.
        row: all blocks of the row, also those that run.
    """

    names: tuple[str, ...]
    period: int
    row: tuple[str, ...] = ()

    @property
    def reach(self) -> int:
        """In how many later periods something may live that a period allocates: until the block after the next one."""
        return 2 if self.period == 1 else 1


def repeated_blocks(model: nn.Module, units: Sequence[str], recomputed: frozenset[str]) -> tuple[Repeated, ...]:
    """Blocks that need not run: of each row of periods those in its middle.

    Of a row, the first and the last periods run, as what a block allocates may live for some blocks more; and between
    them two, to show that they are alike.

    Args:
        model: that runs.
        units: names, in the order of their calls.
        recomputed: units that run again in the backward pass.
    """
    described = [_described(model.get_submodule(name), name in recomputed) for name in units]
    found: list[Repeated] = []
    start = 0
    while start < len(units):
        end, best = max((_row(described, units, start, period) for period in range(1, _LONGEST_PERIOD + 1)), key=_size)
        if best is None:
            start += 1
        else:
            found.append(best)
            start = end
    return tuple(found)


def _size(row: tuple[int, Repeated | None]) -> int:
    return len(row[1].names) if row[1] else 0


def _row(described: Sequence["_Unit"], units: Sequence[str], start: int, period: int) -> tuple[int, Repeated | None]:
    """Where the row of periods ends that starts there, and what of it need not run."""
    end = start + period
    while end < len(units) and described[end].follows(described[end - period], period):
        end += 1
    end -= (end - start) % period
    found = Repeated((), period)
    first, last = start + (found.reach + 2) * period, end - found.reach * period
    is_worth_it = last - first >= _LEAST * period
    return end, Repeated(tuple(units[first:last]), period, tuple(units[start:end])) if is_worth_it else None


def repeated_inside(model: nn.Module, unit: str) -> tuple[Repeated, ...]:
    """The same of the lists of blocks inside of a unit, which is not cut itself: a tower for images.

    Such blocks may get other numbers (ends of windows, or of images) than their neighbours: that is not looked at.
    """
    lists = (
        [".".join(filter(None, (unit, path, str(number)))) for number in range(len(part))]
        for path, part in model.get_submodule(unit).named_modules()
        if isinstance(part, nn.ModuleList)
    )
    return tuple(row for names in lists for row in repeated_blocks(model, names, frozenset()))


class _Unit(NamedTuple):
    """What decides how a unit runs.

    Attributes:
        parts: name, class, and tensors of each module.
        plain: numbers and texts that are attributes of each.
        choices: what else may decide what each does: functions, dtypes and containers.
        is_recomputed: whether it runs again in the backward pass.
    """

    parts: Hashable
    plain: list[dict[str, object]]
    choices: list[dict[str, object]]
    is_recomputed: bool

    def follows(self, other: "_Unit", distance: int) -> bool:
        """Whether it does what another does, so many blocks before. A module may know the number of its block."""
        return (
            self.is_recomputed == other.is_recomputed
            and self.parts == other.parts
            and all(_is_later(*both, distance) for both in zip(other.plain, self.plain, strict=True))
            and all(map(_are_same, other.choices, self.choices))
        )


def _described(unit: nn.Module, is_recomputed: bool) -> _Unit:
    modules = list(unit.named_modules())
    return _Unit(
        tuple((path, type(part), tuple(_tensors_of(part))) for path, part in modules),
        [{name: value for name, value in vars(part).items() if _is_plain(value)} for _, part in modules],
        [_choices(part) for _, part in modules],
        is_recomputed,
    )


def _tensors_of(module: nn.Module) -> Iterator[Hashable]:
    own = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
    for name, one in own:
        yield name, tuple(one.shape), one.dtype, one.requires_grad


def _is_later(first: Mapping[str, object], second: Mapping[str, object], distance: int) -> bool:
    if first.keys() != second.keys():
        return False
    different = [(value, second[name]) for name, value in first.items() if second[name] != value]
    return all(type(value) is type(other) is int and other == value + distance for value, other in different)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)


def _choices(module: nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_MODULES and isinstance(value, _CHOICES) and not _is_plain(value)
    }


def _are_same(first: Mapping[str, object], second: Mapping[str, object]) -> bool:
    return first.keys() == second.keys() and all(
        value is second[name] or _is_equal(value, second[name]) for name, value in first.items()
    )


def _is_equal(first: object, second: object) -> bool:
    try:
        return bool(first == second)
    except (RuntimeError, ValueError):  # of tensors or arrays in a container
        return False


class NotPeriodicError(Exception):
    """Blocks that seem to be equal do not run alike.

    Args:
        row: which.
    """

    def __init__(self, row: Repeated):
        super().__init__(f"from {row.names[0]} to {row.names[-1]}")
        self.row = row


class _Positions(NamedTuple):
    """Where events are.

    Attributes:
        phase: the number of the phase that each is in; -1: in none.
        block: the number of the period whose part it is.
        offset: events after the begin of that part; or the event itself.
    """

    phase: Numbers
    block: Numbers
    offset: Numbers

    def of(self, chosen: NDArray[Any]) -> "_Positions":
        return _Positions(self.phase[chosen], self.block[chosen], self.offset[chosen])

    def seen_from(self, block: int) -> NDArray[Any]:
        """The same of any period, as rows. What is in no phase is there for all: when exactly, does not matter."""
        rows = numpy.stack([self.phase, self.block - block, self.offset], axis=-1)
        rows[self.phase < 0] = (-1, 0, 0)
        return rows


_FORWARD, _BACKWARD, _WEIGHTS = _PHASES = range(3)


class _Segments:
    """The parts of a record that belong to each of the periods that ran.

    Args:
        run: recorded, with the first periods and the last.
        start: the number of the first period's first call.
        calls: the numbers of the periods' last calls.

    Raises:
        ValueError: a block has no gradient, or its part no length.
    """

    def __init__(self, run: ModelRun, start: int, calls: Sequence[int]):
        self._run = run
        marks = [run.calls[call] for call in calls]
        ends = [0, *(mark.end for mark in marks)]
        # By phase and period: after the first event, until the second. Equal ones: it has none.
        self.bounds = numpy.zeros((len(_PHASES), len(calls), 2), dtype=numpy.int64)
        for block in range(1, len(calls)):
            self.bounds[_FORWARD, block] = ends[block], ends[block + 1]
            gradients = marks[block].gradient, marks[block - 1].gradient
            if None in gradients:
                raise ValueError("no gradient")
            self.bounds[_BACKWARD, block] = gradients
        # Of the first period, what it allocates forwards may be there for all, but gradients of the next one end in it.
        before = run.calls[start - 1].gradient if start else None
        begin = marks[0].gradient
        # That of a unit around all of them came earlier.
        end = run.pass_end if before is None or before < begin else before
        self.bounds[_BACKWARD, 0] = begin, max(begin, end)
        if (self.bounds[:, :, 0] > self.bounds[:, :, 1]).any():
            raise ValueError("another order")
        self._order()
        self._add_weight_gradients(len(calls))
        self._order()

    def _order(self) -> None:
        parts = [(*self.bounds[phase, block], phase, block) for phase in _PHASES for block in range(self.num_blocks)]
        ordered = sorted(part for part in parts if part[0] < part[1])
        self._begins, self._ends, self._phases, self._blocks = (
            numpy.array([part[field] for part in ordered], dtype=numpy.int64) for field in range(4)
        )

    @property
    def num_blocks(self) -> int:
        """Periods that ran."""
        return self.bounds.shape[1]

    def _add_weight_gradients(self, num_blocks: int) -> None:
        """What W computes has no marks: a period's part ends when the last is freed of what it had left for it."""
        run = self._run
        block = self.positions(run.born).block
        is_later = (run.died != ALIVE) & (run.died > run.backward_end) & (block > 0)
        last = numpy.zeros(num_blocks, dtype=numpy.int64)
        numpy.maximum.at(last, block[is_later], run.died[is_later])
        ends = [int(end) for end in last[:0:-1]]
        if not all(ends):
            return
        # The last one is the first here, and its begin is not known: it is as long as the next one.
        begins = [2 * ends[0] - ends[1], *ends]
        for number, (begin, end) in enumerate(zip(begins, ends, strict=False)):
            if end <= begin:
                raise ValueError("no part of W")
            self.bounds[_WEIGHTS, num_blocks - 1 - number] = begin, end

    def positions(self, events: Numbers) -> _Positions:
        """Where these events are."""
        index = numpy.searchsorted(self._begins, events, side="left") - 1
        known = numpy.maximum(index, 0)
        is_inside = (index >= 0) & (events <= self._ends[known])
        return _Positions(
            numpy.where(is_inside, self._phases[known], -1),
            numpy.where(is_inside, self._blocks[known], -1),
            numpy.where(is_inside, events - self._begins[known], events),
        )


def with_repeated_blocks(run: ModelRun, left_out: Sequence[Repeated]) -> ModelRun:
    """The complete run.

    Args:
        run: in which some rows of blocks were left out.
        left_out: these.

    Raises:
        NotPeriodicError: the records of two periods differ.
    """
    for row in left_out:
        names = [call.name for call in run.calls]
        # What was left out has neighbours that ran.
        begin, end = row.row.index(row.names[0]), row.row.index(row.names[-1]) + 1
        around = row.row[begin - (row.reach + 2) * row.period : end + row.reach * row.period]
        first = names.index(row.names[0]) if row.names[0] in names else -1
        start = first - (row.reach + 2) * row.period
        is_there = start >= 0 and names[start : start + len(around)] == list(around)
        if not is_there or sum(name in row.names for name in names) != len(row.names):
            raise NotPeriodicError(row)
        try:
            run = _Expansion(run, row, first).complete()
        except (IndexError, ValueError) as error:  # parts that are missing, or of other lengths
            raise NotPeriodicError(row) from error
    return run


class _Expansion:
    """A run with one row of blocks more.

    Args:
        run: without them.
        row: of the blocks.
        first: the number of the first one's call.

    Raises:
        ValueError: there is no period.
    """

    def __init__(self, run: ModelRun, row: Repeated, first: int):
        self.run, self._period, self._first = run, row.period, first
        self._count, num_left_out = len(row.names) // row.period, len(row.names)
        # The period whose part is repeated, and the one before it.
        self._template, self._before = row.reach + 1, row.reach
        start = first - (row.reach + 2) * row.period
        last = first + num_left_out + row.reach * row.period
        ends = [*range(start, first, row.period), *range(first + num_left_out, last, row.period)]
        self._segments = _Segments(run, start, [one + row.period - 1 for one in ends])
        self._bounds = self._segments.bounds[:, self._template]
        self._lengths = self._bounds[:, 1] - self._bounds[:, 0]
        self._born, self._died = (self._segments.positions(events) for events in (run.born, run.died))
        self._savers = self._segments.positions(run.memory.savers)
        self._own, self._alike = self._pairs()
        self._check_ops()

    def complete(self) -> ModelRun:
        run = self.run
        memory = self._memory()
        return replace(
            run,
            calls=tuple(self._calls()),
            memory=memory,
            ops=self._ops(),
            loss=self._moved_one(run.loss),
            pass_end=self._moved_one(run.pass_end),
            backward_end=self._moved_one(run.backward_end),
            end=self._moved_one(run.end),
        )

    def _of(self, block: int, phase: int) -> Numbers:
        return numpy.flatnonzero((self._born.block == block) & (self._born.phase == phase))

    def _pairs(self) -> tuple[Numbers, Numbers]:
        """The numbers of what the template allocates, and of what the period before allocates for them."""
        own, before = (
            numpy.concatenate([self._of(block, phase) for phase in _PHASES]) for block in (self._template, self._before)
        )
        if len(own) != len(before):
            raise ValueError("other allocations")
        # What all periods leave to the very end (a cache of keys and values) is freed there for all.
        is_kept = (self._died.block[own] == 0) & (self._died.block[before] == 0)
        for kept in (own[is_kept], before[is_kept]):
            self._died.phase[kept] = self._died.block[kept] = -1
            self._died.offset[kept] = self.run.died[kept]
        described = [
            self._described(chosen, block) for chosen, block in ((own, self._template), (before, self._before))
        ]
        # The last period's backward pass comes right after the loss, where some things are freed at other moments.
        died, expected = described[0][0], described[1][0]
        is_last = self._died.block[own] == self._segments.num_blocks - 1
        is_last &= (died[:, :2] == expected[:, :2]).all(axis=1)
        died[is_last] = expected[is_last]
        if not all(map(numpy.array_equal, *described)):
            raise ValueError("other allocations")
        return own, before

    def _described(self, chosen: Numbers, block: int) -> list[NDArray[Any]]:
        memory = self.run.memory
        savers, counts = self._savers_of(chosen)
        return [
            self._died.of(chosen).seen_from(block),
            self._born.of(chosen).seen_from(block),
            self._savers.of(savers).seen_from(block),
            memory.sizes[chosen],
            memory.died[chosen] == ALIVE,
            counts,
        ]

    def _savers_of(self, chosen: Numbers) -> tuple[Numbers, Numbers]:
        """The numbers of the events at which these allocations were saved, one allocation after the other; how many."""
        memory = self.run.memory
        begins, ends = (numpy.searchsorted(memory.saved, chosen, side=side) for side in ("left", "right"))
        parts = [numpy.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
        return numpy.concatenate([numpy.zeros(0, dtype=numpy.int64), *parts]), ends - begins

    def _check_ops(self) -> None:
        rows = self.run.ops.rows
        for phase in _PHASES:
            parts = []
            for block in (self._template, self._before):
                begin, end = self._segments.bounds[phase, block]
                part = rows[(rows["event"] > begin) & (rows["event"] <= end)].copy()
                part["event"] -= begin
                parts.append(part)
            if not numpy.array_equal(*parts):
                raise ValueError("other operators")

    def _lines(self, events: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Events in the complete run; in the first of the repeated periods; how far it is from one to the next."""
        moved, first, step = events.copy(), events.copy(), numpy.zeros_like(events)
        for phase, (begin, end) in enumerate(self._bounds):
            length = self._lengths[phase]
            shift = numpy.where(events > end, self._count * length, 0)
            moved += shift
            first += shift
            inside = (events > begin) & (events <= end)
            # Forwards follow each other as the blocks do, all else in reverse.
            step[inside] = length if phase == _FORWARD else -length
            first[inside] += 0 if phase == _FORWARD else self._count * length
        return moved, first, step

    def _at(self, events: Numbers, turns: Numbers | int) -> Numbers:
        """Events in the complete run, of which those of the template are in these turns."""
        _, first, step = self._lines(events)
        return first + turns * step

    def _moved(self, events: Numbers) -> Numbers:
        return self._lines(events)[0]

    def _moved_one(self, event: int) -> int:
        return int(self._moved(numpy.array([event]))[0])

    def _relative(self, positions: _Positions, blocks: Numbers | int, turns: Numbers) -> Numbers:
        """Events of what a period allocated, seen from a period in its turn.

        Args:
            positions: of the events in the record.
            blocks: the periods that allocated it.
            turns: of the periods that are meant: below 0 before the template, above the count behind the repeated ones.
        """
        targets = turns + positions.block - blocks
        blocks_there = self._template + numpy.minimum(targets, 0) + numpy.maximum(targets - self._count, 0)
        is_somewhere = positions.phase >= 0
        if (((blocks_there < 0) | (blocks_there >= self._segments.num_blocks)) & is_somewhere).any():
            raise ValueError("it lives too long")
        parts = self._segments.bounds[positions.phase, numpy.where(is_somewhere, blocks_there, 0)]
        there = numpy.minimum(parts[..., 0] + positions.offset, parts[..., 1])
        return numpy.where(is_somewhere, self._at(there, targets), self._moved(positions.offset))

    def _seen(self, number: Numbers, positions: _Positions, events: Numbers) -> tuple[Numbers, Numbers]:
        """What happened to allocations that are not of the template: for each event, the allocation and the new event.

        Of something that no period allocated, an event of the template is one of each of the repeated periods.
        """
        block = self._born.block[number]
        is_own = self._born.phase[number] >= 0
        is_each = ~is_own & (positions.block == self._template)
        turns = numpy.where(block > self._template, self._count, 0) + block - self._template
        moved = self._moved(events)
        moved[is_own] = self._relative(positions.of(is_own), block[is_own], turns[is_own])
        each = self._at(events[is_each][:, None], numpy.arange(self._count + 1))
        return (
            numpy.concatenate([number[~is_each], numpy.repeat(number[is_each], self._count + 1)]),
            numpy.concatenate([moved[~is_each], each.ravel()]),
        )

    def _memory(self) -> Memory:
        memory, turns = self.run.memory, numpy.arange(self._count + 1)
        is_other = numpy.ones(len(memory), dtype=bool)
        is_other[self._own] = False
        others = numpy.flatnonzero(is_other)
        is_freed = is_other & (memory.died != ALIVE)
        died = numpy.full(len(memory), ALIVE)
        died[is_freed] = 0
        freed = numpy.flatnonzero(is_freed)
        numpy.maximum.at(died, *self._seen(freed, self._died.of(freed), memory.died[freed]))
        is_saver = is_other[memory.saved]
        saved, savers = self._seen(memory.saved[is_saver], self._savers.of(is_saver), memory.savers[is_saver])
        # Those of the repeated periods, one row for each allocation.
        alike = self._alike
        born_again = self._at(memory.born[self._own][:, None], turns)
        positions = _Positions(*(field[:, None] for field in self._died.of(alike)))
        died_again = numpy.full(born_again.shape, ALIVE)
        gone = memory.died[alike] != ALIVE
        died_again[gone] = self._relative(_Positions(*(field[gone] for field in positions)), self._before, turns)
        events, counts = self._savers_of(alike)
        of_savers = _Positions(*(field[:, None] for field in self._savers.of(events)))
        savers_again = self._relative(of_savers, self._before, turns)
        rows = len(others) + numpy.arange(born_again.size).reshape(born_again.shape)
        saved_again = numpy.repeat(rows, counts, axis=0)
        # In the order of their births; ``_made`` says where each is then.
        born = numpy.concatenate([self._moved(memory.born[others]), born_again.ravel()])
        order = numpy.argsort(born, kind="stable")
        position = numpy.empty_like(order)
        position[order] = numpy.arange(len(order))
        self._made = numpy.empty((len(memory), self._count + 1), dtype=numpy.int64)
        self._made[others] = position[: len(others), None]
        self._made[self._own] = position[rows]
        all_saved = numpy.concatenate([self._made[saved, 0], position[saved_again.ravel()]])
        by_allocation = numpy.argsort(all_saved, kind="stable")
        sizes = numpy.concatenate([memory.sizes[others], numpy.repeat(memory.sizes[self._own], self._count + 1)])
        return Memory(
            sizes[order],
            born[order],
            numpy.concatenate([died[others], died_again.ravel()])[order],
            numpy.concatenate([savers, savers_again.ravel()])[by_allocation],
            all_saved[by_allocation],
        )

    def _ops(self) -> Ops:
        rows = self.run.ops.rows
        is_repeated = self._segments.positions(rows["event"]).block == self._template
        once, again = rows[~is_repeated], numpy.repeat(rows[is_repeated], self._count + 1)
        once["event"] = self._moved(once["event"])
        turns = numpy.tile(numpy.arange(self._count + 1), int(is_repeated.sum()))
        again["event"] = self._at(again["event"], turns)
        made = numpy.concatenate([once, again])
        numbers = numpy.arange(len(rows))
        numbers = numpy.concatenate([numbers[~is_repeated], numpy.repeat(numbers[is_repeated], self._count + 1)])
        return replace(self.run.ops, rows=made[numpy.lexsort((numbers, made["event"]))])

    @cached_property
    def _counterparts(self) -> Mapping[int, int]:
        """Of what the period before allocates: what the template does for it."""
        return dict(zip(self._alike.tolist(), self._own.tolist(), strict=True))

    def _calls(self) -> Iterator[UnitMarks]:
        template = self._first - self._period
        for number, call in enumerate(self.run.calls):
            turn, position = divmod(number - template, self._period)
            if 0 <= turn <= self._count:
                yield self._call(self.run.calls[template + position]._replace(name=call.name), turn, position)
            else:
                # Where it begins may be where the template ends.
                events = numpy.array([call.begin, call.end, call.gradient or 0])
                begin, end, gradient = self._at(events, 0 if number < template else self._count).tolist()
                yield call._replace(
                    begin=begin,
                    end=end,
                    gradient=None if call.gradient is None else gradient,
                    arguments=self._found(call.arguments, self._count),
                    results=self._found(call.results, self._count),
                )

    def _call(self, call: UnitMarks, turn: int, position: int) -> UnitMarks:
        """A call of the template, in a turn."""
        forward, backward = int(self._lengths[_FORWARD]), int(self._lengths[_BACKWARD])
        if position == self._period - 1:
            # Its gradient is where the template's backward pass begins.
            gradient = self._moved_one(call.gradient) + (self._count - turn) * backward
        elif call.gradient is not None:
            gradient = int(self._at(numpy.array([call.gradient]), turn)[0])
        else:
            gradient = None
        return call._replace(
            begin=call.begin + turn * forward,
            end=call.end + turn * forward,
            gradient=gradient,
            arguments=self._found(call.arguments, turn, shift=-1),
            results=self._found(call.results, turn),
        )

    def _found(self, given: Sequence[int | None], turn: int, shift: int = 0) -> tuple[int | None, ...]:
        return tuple(None if one is None else self._counterpart(one, turn, shift) for one in given)

    def _counterpart(self, one: int, turn: int, shift: int) -> int:
        """What stands for an allocation in one of the repeated periods; ``shift``: it is that of the one before."""
        if shift and turn and self._born.block[one] == self._before:
            return int(self._made[self._counterparts[one], turn - 1])
        return int(self._made[one, turn])
