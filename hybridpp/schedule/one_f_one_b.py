"""One forward, one backward: the schedule that holds the fewest activations."""

from hybridpp.errors import ScheduleError
from hybridpp.schedule.action import Action, Kind, Program, Programs


def one_f_one_b(num_stages: int, num_microbatches: int) -> Programs:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv:2104.04473), one stage per rank.

    With 3 stages and 4 micro-batches::

        rank 0 | 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1 | 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    Stage ``s`` of ``p`` holds the activations of at most ``min(m, p - s)`` of the ``m`` micro-batches. With equal
    costs a rank idles ``(p - 1) / (m + p - 1)`` of the time.

    Raises:
        ScheduleError: a count is below 1.
    """
    _check_counts(num_stages, num_microbatches)
    return tuple(_row(stage, num_stages, num_microbatches) for stage in range(num_stages))


def _row(stage: int, num_stages: int, num_microbatches: int) -> Program:
    warmup = min(num_stages - stage - 1, num_microbatches)
    row = [Action(stage, Kind.FORWARD, microbatch) for microbatch in range(warmup)]
    for microbatch in range(num_microbatches):
        if warmup + microbatch < num_microbatches:
            row.append(Action(stage, Kind.FORWARD, warmup + microbatch))
        row.append(Action(stage, Kind.BACKWARD, microbatch))
    return tuple(row)


def forward_only(num_stages: int, num_microbatches: int) -> Programs:
    """Every micro-batch forward, in order, one stage per rank: what evaluation runs.

    Raises:
        ScheduleError: a count is below 1.
    """
    _check_counts(num_stages, num_microbatches)
    return tuple(
        tuple(Action(stage, Kind.FORWARD, microbatch) for microbatch in range(num_microbatches))
        for stage in range(num_stages)
    )


def _check_counts(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(
            "a schedule needs at least one stage and one micro-batch: "
            f"got num_stages={num_stages}, num_microbatches={num_microbatches}."
        )
