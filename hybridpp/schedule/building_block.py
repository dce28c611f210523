"""Schedules that repeat a building block: two stages per rank in a V, with a third or half of ZB-V's activations."""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from hybridpp.schedule.action import Action, ActionKind, Program, Programs
from hybridpp.schedule.counts import check_counts
from hybridpp.schedule.memory import peak_activations
from hybridpp.schedule.split_backward import fill_weight_gradients

# Slots in which a rank computes one micro-batch: F, I and W of two stages.
_PERIOD = 6


class Offsets(NamedTuple):
    """Slots from one rank to the next on each of a micro-batch's four ways through the ranks of a V.

    With ``down + back_up == up + back_down`` all ranks hold equally many activations: about ``sum / 12`` of a
    micro-batch's, times the number of ranks.
    """

    down: int
    up: int
    back_down: int
    back_up: int


def v_min(num_ranks: int, num_microbatches: int) -> Programs:
    """V-Min (Qi et al. 2024, arXiv:2405.15362): two stages per rank in a V, with the fewest activations.

    With 2 ranks and 3 micro-batches::

        rank 0 | 0F0 .   .   3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 3W2 .   0I2 0W2
        rank 1 | .   1F0 2F0 .   .   2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    A micro-batch goes through all ranks without a pause, so that its activations are soon free. A rank of ``p`` holds
    at most ``2 ceil((p + 2) / 3)`` activations of half a rank's layers, about a third of 1F1B's. With equal costs it
    idles at most ``4 p - 3`` slots in a step of ``6 m`` and more; 1F1B idles ``6 (p - 1)`` of these. Where F, I and W
    take unequal times, its ranks wait for each other in every micro-batch.

    Raises:
        ScheduleError: a count is below 1.
    """
    return v_from_offsets(num_ranks, num_microbatches, Offsets(down=1, up=1, back_down=1, back_up=1))


def v_half(num_ranks: int, num_microbatches: int) -> Programs:
    """V-Half (Qi et al. 2024, arXiv:2405.15362): two stages per rank in a V, with half of 1F1B's activations.

    With 2 ranks and 3 micro-batches::

        rank 0 | 0F0 .   .   3F0 3I0 0F1 3W0 .   3F1 3I1 0F2 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
        rank 1 | .   1F0 2F0 .   .   2I0 1F1 2F1 1I0 2W0 2I1 1F2 1W0 2F2 1I1 2W1 2I2 1I2 1W1 2W2 1W2

    A rank of ``p`` holds at most ``p + 3`` activations of half a rank's layers. With equal costs and ``m >= p`` it
    idles at most ``3 p - 3`` slots in a step of ``6 m`` and more; 1F1B idles ``6 (p - 1)`` of these.

    Raises:
        ScheduleError: a count is below 1.
    """
    return v_from_offsets(num_ranks, num_microbatches, Offsets(down=1, up=2, back_down=1, back_up=2))


def v_from_offsets(num_ranks: int, num_microbatches: int, offsets: Offsets) -> Programs:
    """The schedule that repeats one micro-batch's building block every 6 slots (Qi et al. 2024, section 3).

    The block places a micro-batch's F and I of the stages ``r`` and ``2 p - 1 - r`` of each rank ``r``, one hop after
    another, each at least its offset after the one before. A slot that the rank uses for another micro-batch, in the
    repetition, is passed over. So a rank computes all the time in the steady state. Weight gradients go where the rank
    would idle, without more activations than the block holds.

    Args:
        num_ranks: ranks of the pipeline.
        num_microbatches: micro-batches per batch.
        offsets: the least slots between two hops, at least 1 each.

    Raises:
        ScheduleError: a count or an offset is below 1.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches, **offsets._asdict())
    block = _block(num_ranks, offsets)
    programs = tuple(_repeat(row, num_microbatches) for row in block)
    return fill_weight_gradients(programs, [max(peak_activations(programs))] * num_ranks)


class _Hop(NamedTuple):
    rank: int
    stage: int
    kind: ActionKind


def _hops(num_ranks: int, offsets: Offsets) -> Iterator[tuple[_Hop, int]]:
    """One micro-batch's F and I in order, each with the least slots until the next."""
    down, last = range(num_ranks), 2 * num_ranks - 1
    ways = (
        [_Hop(rank, rank, ActionKind.FORWARD) for rank in down],
        [_Hop(rank, last - rank, ActionKind.FORWARD) for rank in reversed(down)],
        [_Hop(rank, last - rank, ActionKind.INPUT_GRADIENT) for rank in down],
        [_Hop(rank, rank, ActionKind.INPUT_GRADIENT) for rank in reversed(down)],
    )
    steps = [[offset] * (num_ranks - 1) + [1] for offset in offsets]
    yield from zip(chain(*ways), chain(*steps), strict=True)


def _block(num_ranks: int, offsets: Offsets) -> list[list[tuple[int, Action]]]:
    """Slots and actions of micro-batch 0 on each rank; no two of a rank are at the same slot modulo the period."""
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(num_ranks)]

    def add_action(rank: int, earliest: int, action: Action) -> int:
        used = {slot % _PERIOD for slot, _ in rows[rank]}
        slot = next(slot for slot in range(earliest, earliest + _PERIOD) if slot % _PERIOD not in used)
        rows[rank].append((slot, action))
        return slot

    earliest = 0
    for (rank, stage, kind), offset in _hops(num_ranks, offsets):
        earliest = add_action(rank, earliest, Action(stage, kind, 0)) + offset
    for rank, row in enumerate(rows):
        gradients = [(slot, action) for slot, action in row if action.kind is ActionKind.INPUT_GRADIENT]
        for slot, action in gradients:
            add_action(rank, slot + 1, action._replace(kind=ActionKind.WEIGHT_GRADIENT))
    return rows


def _repeat(row: list[tuple[int, Action]], num_microbatches: int) -> Program:
    """The actions of all micro-batches, each a period after the one before, in the order of their slots."""
    slots = {
        slot + _PERIOD * microbatch: action._replace(microbatch=microbatch)
        for slot, action in row
        for microbatch in range(num_microbatches)
    }
    return tuple(slots[slot] for slot in sorted(slots))
