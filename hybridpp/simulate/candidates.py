"""Schedules of a size that a search compares: every named one, and V-shaped ones of other offsets."""

from collections.abc import Iterator, Sequence
from itertools import product

from hybridpp.schedule import SCHEDULES, Action, ActionKind, Offsets, Programs, looped, v_from_offsets, v_shaped

# Greater ones hold more than ZB-V.
_OFFSETS = (1, 2, 3)


def known_schedules(num_ranks: int, num_chunks: int, num_microbatches: int) -> Iterator[tuple[str, Programs]]:
    """Names and programs of all schedules with this number of stages per rank."""
    for entry in SCHEDULES.values():
        if num_chunks == entry.num_chunks or entry.takes_chunks:
            yield entry.name, entry.make(num_ranks, num_microbatches, num_chunks)
    if num_chunks == 2:
        for down, up, back_down in product(_OFFSETS, repeat=3):
            offsets = Offsets(down, up, back_down, up + back_down - down)
            # Equal sums hold equally many activations on all ranks; V-Min and V-Half are among the named ones.
            if offsets.back_up in _OFFSETS and offsets not in (Offsets(1, 1, 1, 1), Offsets(1, 2, 1, 2)):
                yield f"v-offsets {' '.join(map(str, offsets))}", v_from_offsets(num_ranks, num_microbatches, offsets)


def placements(num_ranks: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """The placements of stages that a search tries: looped, and with two stages per rank a V."""
    both = (looped(num_ranks, num_chunks), v_shaped(num_ranks))
    return both if num_chunks == 2 and num_ranks > 1 else both[:1]


def one_microbatch(rank_of: Sequence[int]) -> Programs:
    """Programs of one micro-batch with unsplit backward passes: no schedule of this placement holds less."""
    stages = range(len(rank_of))
    actions = [Action(stage, ActionKind.FORWARD, 0) for stage in stages]
    actions += [Action(stage, ActionKind.BACKWARD, 0) for stage in reversed(stages)]
    return tuple(
        tuple(action for action in actions if rank_of[action.stage] == rank) for rank in range(max(rank_of) + 1)
    )
