"""The programs that ranks run: a schedule's actions with sends and receives."""

from typing import NamedTuple

from hybridpp.schedule import (
    Action,
    ActionKind,
    Program,
    Programs,
    completed_sends,
    first_microbatches,
    lower,
    placement,
    with_unshards,
)


class RankProgram(NamedTuple):
    """The actions of one rank, in order.

    Attributes:
        actions: compute and communication.
        completed_sends: for each action, the sends whose receive the peer has posted by then.
        placement: the rank of every stage, as an index into the pipeline's group.
        losses_after: number of actions after which this rank has computed all losses; 0: it computes none.
    """

    actions: Program
    completed_sends: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    losses_after: int


def rank_programs(
    programs: Programs,
    *,
    reduces_each: bool = False,
    num_microbatches: int | None = None,
    max_unsharded: int | None = None,
) -> tuple[RankProgram, ...]:
    """The program of every rank, with communication, for checked compute programs.

    Args:
        programs: compute programs.
        reduces_each: whether gradients are reduced after every action that adds to them.
        num_microbatches: of this replica, if other replicas have more, for which ``programs`` are.
        max_unsharded: number of a rank's stages whose weights may be gathered at a time; None: weights are not sharded.
            If there is one stage, passes gather weights by themselves, too.
    """
    where = placement(programs)
    lowered = lower(programs, reduces_each=reduces_each)
    if max_unsharded is not None:
        lowered = tuple(with_unshards(program, max_unsharded) for program in lowered)
    if num_microbatches is not None:
        lowered = first_microbatches(lowered, num_microbatches, gathers=max_unsharded is not None and len(where) == 1)
    return tuple(
        RankProgram(actions, done, where, _losses_after(actions, len(where) - 1))
        for actions, done in zip(lowered, completed_sends(lowered), strict=True)
    )


def _losses_after(actions: Program, last_stage: int) -> int:
    forwards = ((last_stage, ActionKind.FORWARD) == (stage, kind) for stage, kind, _ in actions)
    return max((number for number, is_one in enumerate(forwards, start=1) if is_one), default=0)
