"""Which stages should recompute their activations, so that a schedule fits in memory."""

from collections.abc import Iterator, Sequence

from hybridpp.schedule import Program, Programs
from hybridpp.simulate.costs import Costs
from hybridpp.simulate.simulate import peak_bytes


def peaks_with_recomputation(programs: Programs, costs: Costs, recomputed: frozenset[int]) -> tuple[float, ...]:
    """The most bytes that each rank holds if these stages recompute: the largest that is computed again included."""
    return tuple(_peak(program, costs, recomputed) for program in programs)


def reserved_bytes(costs: Costs, stages: Sequence[int], recomputed: frozenset[int]) -> float:
    """The most bytes that a rank of these stages computes again at once."""
    return max((costs.recompute_saves_bytes(stage) for stage in stages if stage in recomputed), default=0.0)


def cheapest_stages(programs: Programs, costs: Costs, caps: Sequence[float]) -> frozenset[int] | None:
    """The stages that should recompute so that each rank holds no more than its cap; None: some rank cannot.

    Those that save the most bytes per millisecond come first, until the rank fits; then those that are not needed are
    left out again, the most expensive first.
    """
    chosen: set[int] = set()
    for program, cap in zip(programs, caps, strict=True):
        stages = _stages_of_rank(program, costs, cap)
        if stages is None:
            return None
        chosen |= stages
    return frozenset(chosen)


def least_bytes(program: Program, costs: Costs) -> float:
    """The fewest bytes with which a rank can run its program, its stages recomputing or not."""
    return min(_peak(program, costs, stages) for stages in _sets(program, costs))


def _sets(program: Program, costs: Costs) -> Iterator[frozenset[int]]:
    """No stage of a rank, then one more each time: those that save the most bytes per millisecond first."""
    own = {action.stage for action in program if costs.recompute_saves_bytes(action.stage) > 0}
    order = sorted(own, key=lambda stage: (costs.recomputing_ms(stage) / costs.recompute_saves_bytes(stage), stage))
    yield from (frozenset(order[:count]) for count in range(len(order) + 1))


def _stages_of_rank(program: Program, costs: Costs, cap: float) -> frozenset[int] | None:
    chosen = next((stages for stages in _sets(program, costs) if _peak(program, costs, stages) <= cap), None)
    for stage in sorted(chosen or (), key=lambda stage: (-costs.recomputing_ms(stage), stage)):
        if chosen is not None and _peak(program, costs, chosen - {stage}) <= cap:
            chosen -= {stage}
    return chosen


def _peak(program: Program, costs: Costs, recomputed: frozenset[int]) -> float:
    stages = sorted({action.stage for action in program})
    held = peak_bytes(program, costs.with_recomputation(recomputed))
    return held + reserved_bytes(costs, stages, recomputed)
