"""1F1B with several stages per rank: stages are shorter, so the pipeline fills faster."""

from collections.abc import Iterable
from itertools import pairwise

from hybridpp.schedule.action import Action, ActionKind, Program, Programs
from hybridpp.schedule.counts import check_counts
from hybridpp.schedule.one_f_one_b import one_by_one


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Programs:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473), ``num_chunks`` stages per rank, placed in a loop.

    With 2 ranks, 4 micro-batches and 2 chunks, idle time left out::

        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        rank 1 | 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    Micro-batches run in groups of at least ``p``, the number of ranks: each group passes all chunks of a rank before
    the next group. The paper requires groups of exactly ``p``; here any ``m`` micro-batches are distributed over
    ``max(1, m // p)`` groups as evenly as possible, the larger ones (of ``g``) first. If ``p`` divides ``m``, this is
    the paper's order. One chunk gives 1F1B.

    Rank ``r`` holds at most ``min(m v, (v - 1) g + 2 (p - 1 - r) + 1)`` activations of its ``v`` chunks together. With
    equal costs a rank idles ``1 - m v / (m + p - 1 + (v - 1) max(m, p))`` of the time, which for ``m >= p`` is
    ``(p - 1) / (m v + p - 1)``.

    Raises:
        ScheduleError: a count is below 1.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    groups = microbatch_groups(num_ranks, num_microbatches)
    return tuple(_row(rank, num_ranks, groups, num_chunks) for rank in range(num_ranks))


def microbatch_groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """The micro-batches in groups of at least ``num_ranks``, the larger ones first."""
    num_groups = max(1, num_microbatches // num_ranks)
    size, longer = divmod(num_microbatches, num_groups)
    starts = [group * size + min(group, longer) for group in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _row(rank: int, num_ranks: int, groups: list[range], num_chunks: int) -> Program:
    stages = range(rank, num_ranks * num_chunks, num_ranks)
    # A micro-batch returns to this rank, for the next chunk, after `num_ranks` hops, during which the other ranks
    # alternate between forward and backward: two warmup forwards per rank after this one. With one stage per rank, it
    # waits for its own backward only.
    hop = 1 if num_chunks == 1 else 2
    warmup = (num_chunks - 1) * len(groups[0]) + hop * (num_ranks - 1 - rank)
    return one_by_one(
        _in_groups(stages, ActionKind.FORWARD, groups),
        _in_groups(reversed(stages), ActionKind.BACKWARD, groups),
        warmup,
    )


def _in_groups(stages: Iterable[int], kind: ActionKind, groups: list[range]) -> list[Action]:
    order = list(stages)
    return [Action(stage, kind, microbatch) for group in groups for stage in order for microbatch in group]
