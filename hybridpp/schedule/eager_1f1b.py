"""1F1B that runs further ahead, so that slow messages delay it less."""

from hybridpp.schedule.action import Programs
from hybridpp.schedule.counts import check_counts
from hybridpp.schedule.one_f_one_b import row
from hybridpp.schedule.split_backward import fill_weight_gradients


def eager_1f1b(num_ranks: int, num_microbatches: int) -> Programs:
    """Eager-1F1B (Zhuang et al. 2022, arXiv:2211.05322): twice as many warmup forwards as 1F1B; the end is split.

    With 3 ranks and 6 micro-batches, where an unsplit backward takes two slots::

        rank 0 | 0F0 0F1 0F2 0F3 0F4 .   .   0B0 --- 0F5 0B1 --- 0B2 --- 0B3 --- 0B4 --- 0B5 ---
        rank 1 | .   1F0 1F1 1F2 .   1B0 --- 1F3 1B1 --- 1F4 1I2 1F5 1I3 1I4 1W2 1I5 1W3 1W4 1W5
        rank 2 | .   .   2F0 2B0 --- 2F1 2B1 --- 2F2 2I2 2F3 2I3 2F4 2I4 2F5 2I5 2W2 2W3 2W4 2W5

    A rank of ``p`` holds at most ``min(m, 2 p - 1)`` activations of the ``m`` micro-batches. With equal costs and
    messages that take no time it idles like ZB-H1; with slow messages, or micro-batches of uneven duration, it idles
    less. While the pipeline is full, the warmup is deep enough that no rank waits for the full backward of another.
    Only at the end ranks do, so the backwards of the last ``2 (p - 1)`` micro-batches are split (none on the first
    rank, for which no rank waits), because a split backward costs more than an unsplit one.

    Raises:
        ScheduleError: a count is below 1.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    programs = tuple(row(rank, num_microbatches, warmup=2 * (num_ranks - 1 - rank)) for rank in range(num_ranks))
    num_unsplit = [num_microbatches] + [num_microbatches - 2 * (num_ranks - 1)] * (num_ranks - 1)
    return fill_weight_gradients(programs, [2 * num_ranks - 1] * num_ranks, num_unsplit)
