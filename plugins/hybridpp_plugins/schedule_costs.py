"""Costs of a layout's stages for a search among schedules: with and without recomputation."""

from collections.abc import Sequence
from dataclasses import replace

from hybridpp.estimate import ScheduleCosts, StageMemory
from hybridpp.simulate import Costs

# Messages of each kind that are received ahead, and sent and not freed yet.
_MESSAGES = 2


def schedule_costs(
    costs: Sequence[Costs],
    memories: Sequence[Sequence[StageMemory]],
    ranks: Sequence[int],
    left: Sequence[int],
    num_blocks: Sequence[int],
) -> ScheduleCosts:
    """The costs of stages, and the room for micro-batches.

    Args:
        costs, memories: of three ways to run each stage: as they are, with backward passes that are split, and with all
            blocks recomputed.
        ranks: of each stage.
        left: bytes of each rank that weights, gradients and states leave.
        num_blocks: of each stage.
    """
    plain, split, recomputing = costs
    held, split_held, recomputed = memories
    backward = zip(_each(recomputing.backward_ms), _each(plain.backward_ms), strict=True)
    joined = replace(
        plain,
        input_gradient_ms=split.input_gradient_ms,
        weight_gradient_ms=split.weight_gradient_ms,
        activation_bytes=tuple(max(a.held.total, b.held.total) for a, b in zip(held, split_held, strict=True)),
        weight_gradient_bytes=tuple(one.waiting for one in split_held),
        recompute_ms=tuple(max(0.0, longer - own) for longer, own in backward),
        recomputed_bytes=tuple(one.held.total for one in recomputed),
    )
    room = []
    for rank, free in enumerate(left):
        own = [stage for stage, at in enumerate(ranks) if at == rank]
        beside = max(_beside(memories, stage) for stage in own)
        room.append(max(0, free - beside - sum(_messages(held[stage]) for stage in own)))
    return ScheduleCosts(joined, tuple(room), tuple(num_blocks))


def _each(values: object) -> tuple[float, ...]:
    assert isinstance(values, tuple)
    return values


def _beside(memories: Sequence[Sequence[StageMemory]], stage: int) -> int:
    """What an action of a stage takes beside what micro-batches hold. What is recomputed, the search counts itself."""
    plain, split, _ = (one[stage] for one in memories)
    return max(
        most.total - memory.held.total for memory in (plain, split) for most in (memory.forward, memory.backward)
    )


def _messages(memory: StageMemory) -> int:
    return _MESSAGES * (memory.incoming + memory.outgoing_gradients + memory.incoming_gradients + memory.unheld)
