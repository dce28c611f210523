"""Search for the cheapest cut within a memory limit."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, combinations, pairwise

from hybridpp.partition.balance import Interval, balance, cheapest, summed
from hybridpp.partition.calls import Trace
from hybridpp.partition.memory import MemoryBudget

# Largest number of cuts that are all compared if ranks run several stages; of more, only those near good ones.
_MAX_CUTS = 4000
_STEPS = (1, 2, 4, 8)


class Segments:
    """Which parameters what lies between two ends of blocks uses.

    Args:
        trace: of the forward.
        ends: indices of the calls that end them, in order; later calls belong to the last segment.
        names: of all parameters; those that nothing uses belong to the first.
    """

    def __init__(self, trace: Trace, ends: Sequence[int], names: Sequence[str]):
        self.names: list[set[str]] = []
        bounds = [0, *(end + 1 for end in ends[:-1]), len(trace.calls)]
        for start, end in pairwise(bounds):
            calls = trace.calls[start:end]
            used = {name for call in calls for name in call.parameters}
            self.names.append(used | {s for call in calls for s in call.sources if isinstance(s, str)})
        self.names[-1] |= {source for source in trace.result_sources if isinstance(source, str)}
        self.names[0] |= set(names).difference(*self.names)

    def of(self, counts: Sequence[int]) -> list[set[str]]:
        """What each stage of so many segments holds."""
        ends = list(accumulate(counts))
        return [set().union(*self.names[end - n : end]) for end, n in zip(ends, counts, strict=True)]


class BudgetedCutSearch:
    """Finds the cut with the cheapest most expensive stage among those within the memory limit.

    Where each rank runs one stage, that is the best there is. Where ranks run several, which of them fit together
    cannot be decided for one stage: few cuts are all compared; of many, those near the best by cost and by memory.

    Args:
        costs: of each segment.
        segments: what they use.
        held: by the ranks.
    """

    def __init__(self, costs: Sequence[float], segments: Segments, held: MemoryBudget):
        self._cost, self._costs = summed(costs), costs
        self._segments, self._held = segments, held
        self._num_stages = len(held.ranks)

    def find(self) -> tuple[int, ...]:
        """How many segments each stage gets.

        Raises:
            PartitionError: no cut keeps to the limit; with the least that one does.
        """
        held, segments = self._held, self._segments
        assert held.limit is not None, "there is something to keep to"
        if len(set(held.ranks)) == self._num_stages:
            limit = held.limit
            fitting = cheapest(
                len(self._costs), self._num_stages, self._cost, lambda start, end: self._bytes[start][end] <= limit
            )
            least = fitting or self._least()
        else:
            least = self._searched()
        names = segments.of(least)
        held.check(names, max(held.by_rank(names).values()))
        return least

    @cached_property
    def _bytes(self) -> list[list[int]]:
        """Bytes of a stage from one segment up to another."""
        rows = []
        for start in range(len(self._costs)):
            seen: set[str] = set()
            row, size = [0] * (start + 1), 0
            for names in self._segments.names[start:]:
                size += sum(self._held.sizes[name] for name in names - seen)
                seen |= names
                row.append(size)
            rows.append(row)
        return rows

    def _least(self) -> tuple[int, ...]:
        found = cheapest(len(self._costs), self._num_stages, lambda start, end: self._bytes[start][end])
        assert found is not None, "there are blocks for all stages"
        return found

    def _price(self, counts: tuple[int, ...]) -> tuple[float, float, float]:
        """Bytes above the limit, then the largest cost, then the sum of squared costs."""
        ends = list(accumulate(counts))
        costs = [self._cost(end - count, end) for end, count in zip(ends, counts, strict=True)]
        excess = max(0, self._largest(ends) - (self._held.limit or 0))
        return excess, max(costs), sum(cost**2 for cost in costs)

    def _largest(self, ends: list[int]) -> float:
        """The most that a rank holds: as :meth:`MemoryBudget.by_rank` counts, for thousands of cuts."""
        own, shared = self._alone_and_shared
        ranks = self._held.ranks
        held = dict.fromkeys(ranks, 0.0)
        for rank, (start, end) in zip(ranks, pairwise((0, *ends)), strict=True):
            held[rank] += own(start, end)
        for size, segments in shared:
            for rank in {ranks[bisect_right(ends, segment)] for segment in segments}:
                held[rank] += size
        return max(held.values())

    @cached_property
    def _alone_and_shared(self) -> tuple[Interval, list[tuple[int, list[int]]]]:
        """What parameters of one segment alone take; each other one's size, with its segments."""
        segments_of: dict[str, list[int]] = {}
        for segment, names in enumerate(self._segments.names):
            for name in names:
                segments_of.setdefault(name, []).append(segment)
        own = [0] * len(self._costs)
        shared = []
        for name, at in segments_of.items():
            if len(at) == 1:
                own[at[0]] += self._held.sizes[name]
            else:
                shared.append((self._held.sizes[name], at))
        return summed(own), shared

    def _searched(self) -> tuple[int, ...]:
        num_segments = len(self._costs)
        if math.comb(num_segments - 1, self._num_stages - 1) <= _MAX_CUTS:
            return min(_every_cut(num_segments, self._num_stages), key=self._price)
        starts = [balance(self._costs, self._num_stages), self._least(), balance([1] * num_segments, self._num_stages)]
        return min((_improved(start, self._price) for start in starts), key=self._price)


def _every_cut(num_segments: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for points in combinations(range(1, num_segments), num_stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *points, num_segments)))


def _improved(counts: tuple[int, ...], price: Callable[[tuple[int, ...]], tuple[float, ...]]) -> tuple[int, ...]:
    """The best that is reached by giving segments of one stage to another, as long as that helps."""
    best = price(counts)
    while True:
        found = min(((price(other), other) for other in _moves(counts)), default=(best, counts))
        if found[0] >= best:
            return counts
        best, counts = found


def _moves(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for giver, count in enumerate(counts):
        for taker in range(len(counts)):
            for number in [step for step in _STEPS if step < count] if taker != giver else ():
                changed = list(counts)
                changed[giver] -= number
                changed[taker] += number
                yield tuple(changed)
