"""Search for the schedule with the shortest step that fits in memory, given the costs of the stages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from hybridpp.errors import ConfigError, ScheduleError
from hybridpp.schedule import ActionKind, Programs
from hybridpp.schedule.counts import check_counts
from hybridpp.simulate.candidates import known_schedules, one_microbatch, placements
from hybridpp.simulate.climb import climb, starts
from hybridpp.simulate.costs import Costs
from hybridpp.simulate.greedy import Rules, greedy_schedule
from hybridpp.simulate.lower_bound import lower_bound_ms
from hybridpp.simulate.recomputation import (
    cheapest_stages,
    least_bytes,
    peaks_with_recomputation,
    reserved_bytes,
)
from hybridpp.simulate.simulate import simulate

# A trial takes about 5 microseconds per action: so about 5 seconds for 3,000 actions.
_ACTIONS = 1_000_000
_MAX_TRIALS = 400
# Sets of recomputed stages that the trials are divided among.
_MAX_SETS = 3
# Sums of bytes are rounded: what fits exactly must fit, in whatever order it is summed.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class FoundSchedule:
    """The best schedule of a search.

    Attributes:
        programs: what each rank computes, in order.
        name: a named schedule's, ``"v-offsets"`` with the four, or ``"greedy"``.
        recomputed_stages: those that must recompute their activations, so that it fits.
        step_ms: the simulated time of a step.
        lower_bound_ms: no schedule with a placement that the search tries is shorter, in this memory.
        peak_bytes: by rank, with what a stage computes again.
    """

    programs: Programs
    name: str
    recomputed_stages: tuple[int, ...]
    step_ms: float
    lower_bound_ms: float
    peak_bytes: tuple[float, ...]

    @property
    def gap(self) -> float:
        """How much longer the step takes than the lower bound, as a share of the bound: the best has at most this."""
        # Both are sums of rounded times: the shortest possible step may come out just below the bound.
        return max(self.step_ms / self.lower_bound_ms - 1, 0.0) if self.lower_bound_ms else 0.0


def search_schedule(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    *,
    memory_bytes: float | Sequence[float] | None = None,
    num_trials: int | None = None,
) -> FoundSchedule:
    """The schedule with the shortest step that fits in memory, of all named ones and of those that a search finds.

    The search varies how far ranks run ahead, which backward passes they split, what they prefer, where stages are
    (looped or in a V) and which stages recompute. The result is a function of the arguments alone: all ranks find the
    same. It is never longer than the best named schedule with as many stages that fits.

    Args:
        costs: of each stage; measured ones are ``Costs.from_timeline(timeline, num_stages)``. Stages may recompute if
            ``recomputed_bytes`` is given.
        num_ranks: ranks of the pipeline; the number of stages is a multiple.
        num_microbatches: micro-batches per batch.
        memory_bytes: the bytes that a rank can hold for micro-batches, one number or one per rank; None: any.
        num_trials: how many schedules to try beside the named ones; None: what takes a few seconds.

    Raises:
        ScheduleError: nothing fits, or a count is below 1.
        ConfigError: stages do not divide among the ranks, there are not as many ``memory_bytes`` as ranks, or
            ``num_trials`` is negative.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    search = _Search(costs, num_ranks, num_microbatches, _caps(memory_bytes, num_ranks))
    if costs.num_stages % num_ranks:
        raise ConfigError(
            f"every rank needs as many stages: got {costs.num_stages} stages for {num_ranks} ranks. Use a multiple."
        )
    if num_trials is not None and num_trials < 0:
        raise ConfigError(f"num_trials must be at least 0: got {num_trials}.")
    num_actions = 3 * costs.num_stages * num_microbatches
    trials = min(_MAX_TRIALS, max(20, _ACTIONS // num_actions)) if num_trials is None else num_trials
    return search.run(trials)


def _caps(memory_bytes: float | Sequence[float] | None, num_ranks: int) -> tuple[float, ...]:
    if memory_bytes is None:
        return (inf,) * num_ranks
    caps = tuple(memory_bytes) if isinstance(memory_bytes, Sequence) else (memory_bytes,) * num_ranks
    if len(caps) != num_ranks:
        raise ConfigError(f"memory_bytes is one number, or one per rank: got {len(caps)} for {num_ranks} ranks.")
    if invalid := [cap for cap in caps if not cap >= 0]:
        raise ConfigError(f"memory_bytes must be at least 0: got {invalid[0]!r}.")
    return tuple(cap * (1 + _ROUNDING) for cap in caps)


@dataclass(frozen=True)
class _Candidate:
    step_ms: float
    name: str
    programs: Programs
    recomputed: frozenset[int]


@dataclass(frozen=True)
class _Search:
    costs: Costs
    num_ranks: int
    num_microbatches: int
    caps: tuple[float, ...]

    @property
    def _placements(self) -> tuple[tuple[int, ...], ...]:
        return placements(self.num_ranks, self.costs.num_stages // self.num_ranks)

    def run(self, num_trials: int) -> FoundSchedule:
        fewest = self._fewest_recomputed()
        known = sorted(self._known(), key=lambda candidate: candidate.step_ms)
        # Those that the best known schedules use, then those with which anything fits.
        sets = list(dict.fromkeys([*(one.recomputed for one in known), *fewest]))[:_MAX_SETS]
        found = known[:1]
        for number, recomputed in enumerate(sets):
            share = num_trials // len(sets) + (number < num_trials % len(sets))
            # Without any known schedule, one of each set is tried whatever the number of trials.
            found += self._greedy(recomputed, share if known else max(share, 1))
        return self._result(min(found, key=lambda candidate: candidate.step_ms))

    def _known(self) -> Iterator[_Candidate]:
        """The known schedules that fit, with as little recomputation as they need."""
        num_chunks = self.costs.num_stages // self.num_ranks
        for name, programs in known_schedules(self.num_ranks, num_chunks, self.num_microbatches):
            recomputed = cheapest_stages(programs, self.costs, self.caps)
            if recomputed is not None:
                yield self._candidate(name, programs, recomputed)

    def _fewest_recomputed(self) -> list[frozenset[int]]:
        """For each placement in which one micro-batch fits, the stages that recompute for it; then all, if those do.

        Raises:
            ScheduleError: not even one micro-batch fits.
        """
        alone = [one_microbatch(rank_of) for rank_of in self._placements]
        sets = [stages for one in alone if (stages := cheapest_stages(one, self.costs, self.caps)) is not None]
        if not sets:
            raise ScheduleError(self._too_little(alone))
        saving = (stage for stage in range(self.costs.num_stages) if self.costs.recompute_saves_bytes(stage) > 0)
        everything = frozenset(saving)
        fits = any(self._rank_caps(rank_of, everything) for rank_of in self._placements)
        return [*sets, everything] if fits else sets

    def _too_little(self, alone: Sequence[Programs]) -> str:
        """Names the rank that lacks the most, in the placement where it lacks the least."""
        shortages = []
        for programs in alone:
            least = [least_bytes(program, self.costs) for program in programs]
            lacking = ((need - cap, need, rank) for rank, (need, cap) in enumerate(zip(least, self.caps, strict=True)))
            shortages.append(max(lacking))
        _, need, rank = min(shortages)
        way_out = "recompute (recomputed_bytes), " if self.costs.recomputed_bytes is None else ""
        return (
            f"no schedule fits: rank {rank} holds at least {need:,.0f} bytes for one micro-batch, and it can hold "
            f"{self.caps[rank]:,.0f}. Use smaller micro-batches, {way_out}or move layers to another rank."
        )

    def _rank_caps(self, rank_of: tuple[int, ...], recomputed: frozenset[int]) -> tuple[float, ...] | None:
        """What each rank can hold beside what it computes again; None: one micro-batch does not fit."""
        costs, caps = self.costs.with_recomputation(recomputed), []
        for rank, cap in enumerate(self.caps):
            own = [stage for stage, other in enumerate(rank_of) if other == rank]
            reserved = reserved_bytes(self.costs, own, recomputed)
            if sum(costs.held_bytes(stage, ActionKind.FORWARD) for stage in own) + reserved > cap:
                return None
            caps.append(cap - reserved + _ROUNDING * cap)
        return tuple(caps)

    def _greedy(self, recomputed: frozenset[int], num_trials: int) -> Iterator[_Candidate]:
        """The best schedules that the greedy scheduler makes with these stages recomputed."""
        costs = self.costs.with_recomputation(recomputed)
        caps = {rank_of: self._rank_caps(rank_of, recomputed) for rank_of in self._placements}
        usable = {rank_of: room for rank_of, room in caps.items() if room is not None}
        if not usable:
            return

        def made(rules: Rules) -> tuple[Programs, float]:
            return greedy_schedule(costs, self.num_microbatches, rules, usable[rules.rank_of])

        begin = starts(tuple(usable), self.num_ranks, self.num_microbatches)
        for rules in climb(lambda rules: made(rules)[1], begin, self.num_microbatches, num_trials):
            yield self._candidate("greedy", made(rules)[0], recomputed)

    def _candidate(self, name: str, programs: Programs, recomputed: frozenset[int]) -> _Candidate:
        step_ms = simulate(programs, self.costs.with_recomputation(recomputed)).timeline.makespan_ms
        return _Candidate(step_ms, name, programs, recomputed)

    def _result(self, best: _Candidate) -> FoundSchedule:
        bounds = [lower_bound_ms(self.costs, rank_of, self.num_microbatches, self.caps) for rank_of in self._placements]
        return FoundSchedule(
            programs=best.programs,
            name=best.name,
            recomputed_stages=tuple(sorted(best.recomputed)),
            step_ms=best.step_ms,
            lower_bound_ms=min(bounds),
            peak_bytes=peaks_with_recomputation(best.programs, self.costs, best.recomputed),
        )
