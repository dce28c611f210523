"""The run of a model of many equal blocks, from a run that leaves most of them out.

Where blocks are equal, the record of one follows that of another in the forward, in the backward pass and in what it
leaves for later (W). Two blocks in a row show it; then the second one's part is repeated for those that were left out.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.estimate.allocations import Allocation
from hybridpp.estimate.model_run import ModelRun
from hybridpp.estimate.op_log import Op
from hybridpp.estimate.unit_marks import UnitMarks

# Of equal blocks these run at the start (the third and the fourth show the period) and at the end: what a block
# allocates may live until the block after the next one.
_FIRST, _LAST = 4, 2
# So many must be left out, or it is not worth it.
_LEAST = 2
# ``forward`` is where layers of ours are.
_OF_MODULES = {*vars(nn.Module()), "forward"}
_CHOICES = (dict, list, tuple, set, frozenset, torch.dtype, FunctionType, BuiltinFunctionType, Enum)


def repeated_blocks(model: nn.Module, units: Sequence[str], recomputed: frozenset[str]) -> tuple[str, ...]:
    """Blocks that need not run: those in the longest row of equal units, but for the first four and the last two.

    Args:
        model: that runs.
        units: names, in the order of their calls.
        recomputed: units that run again in the backward pass.
    """
    longest: list[str] = []
    row: list[str] = []
    for name in units:
        if row and not _are_equal(model, row[-1], name, recomputed):
            row = []
        row.append(name)
        if len(row) > len(longest):
            longest = list(row)
    inner = longest[_FIRST:-_LAST]
    return tuple(inner) if len(inner) >= _LEAST else ()


def _are_equal(model: nn.Module, name: str, other: str, recomputed: frozenset[str]) -> bool:
    if (name in recomputed) != (other in recomputed):
        return False
    both = model.get_submodule(name), model.get_submodule(other)
    parts = [list(one.named_modules()) for one in both]
    if [(path, type(part)) for path, part in parts[0]] != [(path, type(part)) for path, part in parts[1]]:
        return False
    return all(_do_the_same(first, second) for (_, first), (_, second) in zip(*parts, strict=True))


def _do_the_same(first: nn.Module, second: nn.Module) -> bool:
    """Whether the tensors and plain attributes of two modules are alike. A module may know the number of its block."""
    tensors = [
        [(name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in _own_tensors(module)]
        for module in (first, second)
    ]
    plain = [{name: value for name, value in vars(one).items() if _is_plain(value)} for one in (first, second)]
    if tensors[0] != tensors[1] or plain[0].keys() != plain[1].keys():
        return False
    if not _are_same(_choices(first), _choices(second)):
        return False
    different = [(value, plain[1][name]) for name, value in plain[0].items() if plain[1][name] != value]
    return all(type(value) is type(other) is int and other == value + 1 for value, other in different)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)


def _choices(module: nn.Module) -> dict[str, object]:
    """What else may decide what a module does: functions, dtypes and containers that are attributes of it."""
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


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


class _Position(NamedTuple):
    """Where an event is: in a phase of a block, so many events after its begin; or in none (``phase`` is empty)."""

    phase: str
    block: int
    offset: int


class _Segments:
    """The parts of a record that belong to each of the blocks that ran.

    Args:
        run: recorded, with the first blocks and the last.
        calls: the numbers of these blocks' calls.
    """

    def __init__(self, run: ModelRun, calls: Sequence[int]):
        self.run = run
        marks = [run.calls[call] for call in calls]
        first = run.calls[calls[0] - 1].end if calls[0] else 0
        ends = [first, *(mark.end for mark in marks)]
        gradients = [mark.gradient for mark in marks]
        self.parts: list[tuple[int, int, str, int]] = []
        for block in range(1, len(calls)):
            self.parts.append((ends[block], ends[block + 1], "F", block))
            if gradients[block] is None or gradients[block - 1] is None:
                raise NotPeriodicError
            self.parts.append((gradients[block], gradients[block - 1], "B", block))
        self.parts.sort()
        self._begins = [part[0] for part in self.parts]
        self._add_weight_gradients(len(calls))

    def _add_weight_gradients(self, num_blocks: int) -> None:
        """What W computes has no marks: a block's part ends when the last is freed of what it had left for it."""
        ends: list[int] = []
        for block in range(num_blocks - 1, 0, -1):
            later = [
                one.died
                for one in self.run.allocations
                if one.died is not None and one.died > self.run.backward_end and self.position(one.born).block == block
            ]
            ends += [max(later)] if later else []
        if len(ends) < num_blocks - 1:
            return
        # The last block is the first here, and its begin is not known: it is as long as the next one.
        ends.insert(0, 2 * ends[0] - ends[1])
        for number, (begin, end) in enumerate(pairwise(ends)):
            if end <= begin:
                raise NotPeriodicError
            self.parts.append((begin, end, "W", num_blocks - 1 - number))
        self.parts.sort()
        self._begins = [part[0] for part in self.parts]

    def position(self, event: int) -> _Position:
        """Where an event is; the number of the event itself, where it is in none."""
        index = bisect_left(self._begins, event) - 1
        if index >= 0:
            begin, end, phase, block = self.parts[index]
            if event <= end:
                return _Position(phase, block, event - begin)
        return _Position("", -1, event)

    def bounds(self, phase: str, block: int) -> tuple[int, int]:
        """The events of a phase of a block: after the first, until the second; equal ones: it has none."""
        return next(((b, e) for b, e, kind, own in self.parts if (kind, own) == (phase, block)), (0, 0))


class NotPeriodicError(Exception):
    """Blocks that seem to be equal do not run alike."""


# The block whose part is repeated, and the one before it.
_TEMPLATE, _BEFORE = 3, 2
_PHASES = ("F", "B", "W")


def with_repeated_blocks(run: ModelRun, left_out: Sequence[str]) -> ModelRun:
    """The complete run.

    Args:
        run: in which some blocks in a row were left out.
        left_out: their names.

    Raises:
        NotPeriodicError: the record of the third block is not that of the fourth.
    """
    names = [call.name for call in run.calls]
    first = names.index(left_out[0])
    if names[first : first + len(left_out)] != list(left_out) or len(set(names)) != len(names):
        raise NotPeriodicError
    # What was left out has neighbours that ran.
    if first < _FIRST or first + len(left_out) + _LAST > len(names):
        raise NotPeriodicError
    return _Expansion(run, first, len(left_out)).complete()


class _Expansion:
    def __init__(self, run: ModelRun, first: int, count: int):
        self.run, self._first, self._count = run, first, count
        calls = [*range(first - _FIRST, first), *range(first + count, first + count + _LAST)]
        self._segments = _Segments(run, calls)
        self._bounds = {phase: self._segments.bounds(phase, _TEMPLATE) for phase in _PHASES}
        self._length = {phase: end - begin for phase, (begin, end) in self._bounds.items()}
        self._moved = cache(self._line_of)
        self._begins, self._position = cache(self._segments.bounds), cache(self._segments.position)
        self._made: dict[tuple[int, int], Allocation] = {}
        self._born: dict[int, list[int]] = {}
        for index, one in enumerate(run.allocations):
            self._born.setdefault(id(one), []).append(index)
        self._positions = [self._segments.position(one.born) for one in run.allocations]
        self._check_period()

    def complete(self) -> ModelRun:
        run = self.run
        allocations = self._allocations()
        return ModelRun(
            calls=tuple(self._calls()),
            allocations=tuple(sorted(allocations, key=lambda one: one.born)),
            ops=tuple(sorted(self._ops(), key=lambda op: op.event)),
            loss=self._at(run.loss),
            pass_end=self._at(run.pass_end),
            backward_end=self._at(run.backward_end),
            end=self._at(run.end),
            recomputed=run.recomputed,
        )

    def _of(self, block: int, phase: str) -> list[int]:
        return [n for n, position in enumerate(self._positions) if position.block == block and position.phase == phase]

    def _check_period(self) -> None:
        for phase in _PHASES:
            own = [self._described(index, _TEMPLATE) for index in self._of(_TEMPLATE, phase)]
            before = [self._described(index, _BEFORE) for index in self._of(_BEFORE, phase)]
            if own != before or self._ops_of(_TEMPLATE, phase) != self._ops_of(_BEFORE, phase):
                raise NotPeriodicError

    def _described(self, index: int, block: int) -> tuple[object, ...]:
        one = self.run.allocations[index]
        events = [one.born, *([] if one.died is None else [one.died]), *one.savers]
        positions = [self._segments.position(event) for event in events]
        relative = [
            position._replace(block=position.block - block) if position.phase else position for position in positions
        ]
        # What is freed between two phases is freed there for all blocks: when exactly, does not matter.
        return one.size, one.died is None, tuple(p if p.phase else _Position("", 0, 0) for p in relative)

    def _ops_of(self, block: int, phase: str) -> list[tuple[object, ...]]:
        begin, end = self._segments.bounds(phase, block)
        return [(op.event - begin, *op[1:]) for op in self.run.ops if begin < op.event <= end]

    def _at(self, event: int, turn: int | None = None) -> int:
        """The event in the complete run; ``turn``: which of the repeated blocks, if the event is in the template's."""
        moved, first, step = self._moved(event)
        return moved if turn is None else first + turn * step

    def _line_of(self, event: int) -> tuple[int, int, int]:
        """An event in the complete run; in the first of the repeated blocks; and how far it is from one to the next."""
        moved = first = event
        step = 0
        for phase, (begin, end) in self._bounds.items():
            if event > end:
                moved += self._count * self._length[phase]
                first += self._count * self._length[phase]
            elif event > begin:
                # Forwards follow each other as the blocks do, all else in reverse.
                step = self._length[phase] if phase == "F" else -self._length[phase]
                first += 0 if phase == "F" else self._count * self._length[phase]
        return moved, first, step

    def _allocations(self) -> list[Allocation]:
        found = []
        for index, one in enumerate(self.run.allocations):
            if self._positions[index].block != _TEMPLATE:
                made = Allocation(one.size, self._at(one.born))
                made.died = None if one.died is None else max(self._all_seen_from(index, one.died))
                made.savers = [event for saver in one.savers for event in self._all_seen_from(index, saver)]
                self._made[index, 0] = made
                found.append(made)
        for phase in _PHASES:
            pairs = zip(self._of(_TEMPLATE, phase), self._of(_BEFORE, phase), strict=True)
            for index, before in pairs:
                found += [self._repeated(index, before, turn) for turn in range(self._count + 1)]
        return found

    def _repeated(self, index: int, before: int, turn: int) -> Allocation:
        """An allocation of one of the repeated blocks."""
        own, like = self.run.allocations[index], self.run.allocations[before]
        made = self._made[index, turn] = Allocation(own.size, self._at(own.born, turn))
        made.died = None if like.died is None else self._relative(like.died, _BEFORE, turn)
        made.savers = [self._relative(saver, _BEFORE, turn) for saver in like.savers]
        return made

    def _relative(self, event: int, block: int, turn: int) -> int:
        """An event of something that a block allocated, seen from the block in its turn.

        Args:
            event: in the record.
            block: that allocated it.
            turn: of the block that is meant: below 0 before the template, above the count behind the repeated ones.
        """
        position = self._position(event)
        if not position.phase:
            return self._at(event)
        target = turn + position.block - block
        begin, _ = self._begins(position.phase, _TEMPLATE + min(target, 0) + max(target - self._count, 0))
        return self._at(begin + position.offset, target)

    def _all_seen_from(self, index: int, event: int) -> list[int]:
        """An event of something that the template did not allocate: of all blocks, if none allocated it."""
        block = self._positions[index].block
        if self._positions[index].phase:
            return [self._relative(event, block, block - _TEMPLATE + (self._count if block > _TEMPLATE else 0))]
        turns = range(self._count + 1) if self._segments.position(event).block == _TEMPLATE else (None,)
        return [self._at(event, turn) for turn in turns]

    def _ops(self) -> Iterator[Op]:
        for op in self.run.ops:
            turns = range(self._count + 1) if self._segments.position(op.event).block == _TEMPLATE else (None,)
            for turn in turns:
                yield op._replace(event=self._at(op.event, turn))

    def _calls(self) -> Iterator[UnitMarks]:
        like = self.run.calls[self._first - 1]
        for number, call in enumerate(self.run.calls):
            if self._first <= number < self._first + self._count:
                yield self._call(like._replace(name=call.name), number - self._first + 1)
            elif number == self._first - 1:
                yield self._call(call, 0)
            else:
                # Where it begins may be where the template ends.
                turn = 0 if number < self._first else self._count
                yield call._replace(
                    begin=self._at(call.begin, turn),
                    end=self._at(call.end, turn),
                    gradient=None if call.gradient is None else self._at(call.gradient, turn),
                    arguments=self._found(call.arguments, self._count),
                    results=self._found(call.results, self._count),
                )

    def _call(self, call: UnitMarks, turn: int) -> UnitMarks:
        assert call.gradient is not None
        forward, backward = self._length["F"], self._length["B"]
        return call._replace(
            begin=call.begin + turn * forward,
            end=call.end + turn * forward,
            gradient=self._at(call.gradient) + (self._count - turn) * backward,
            arguments=self._found(call.arguments, turn, shift=-1),
            results=self._found(call.results, turn),
        )

    def _found(self, given: Sequence[Allocation | None], turn: int, shift: int = 0) -> tuple[Allocation | None, ...]:
        return tuple(None if one is None else self._counterpart(one, turn, shift) for one in given)

    def _counterpart(self, one: Allocation, turn: int, shift: int) -> Allocation:
        """What stands for an allocation in one of the repeated blocks; ``shift``: it is that of the block before."""
        index = self._born[id(one)][0]
        position = self._positions[index]
        if position.block == _TEMPLATE:
            return self._made[index, turn]
        if shift and turn and position.block == _BEFORE:
            alike = self._of(_TEMPLATE, position.phase)[self._of(_BEFORE, position.phase).index(index)]
            return self._made[alike, turn - 1]
        return self._made[index, 0]
