"""Weights are there where a stage uses them, and few are gathered twice."""

from itertools import product

import pytest
from covering import one_test_for

from hybridpp.schedule import Action, ActionKind, find_schedule, lower, make_schedule, with_unshards

USES = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)


def run(program, max_stages):
    """The number of gathers, and the largest number of stages that are there at a time."""
    there, gathers, most = set(), 0, 0
    for action in with_unshards(program, max_stages):
        if action.kind is ActionKind.UNSHARD:
            assert action.stage not in there
            there.add(action.stage)
            gathers += 1
        elif action.kind is ActionKind.RESHARD:
            there.remove(action.stage)
        elif action.kind in USES:
            assert action.stage in there
        most = max(most, len(there))
    assert not there
    return gathers, most


SCHEDULES = ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "interleaved-zb"]


@one_test_for(("name", "num_ranks", "num_microbatches"), [*product(SCHEDULES, [1, 2, 4], [1, 4, 9])])
def test_weights_are_there_where_they_are_used(name, num_ranks, num_microbatches):
    num_chunks = 3 if find_schedule(name).takes_chunks else None
    for program in lower(make_schedule(name, num_ranks, num_microbatches, num_chunks)):
        for max_stages in (1, 2, 3):
            _, most = run(program, max_stages)
            assert most <= max_stages + 1


@pytest.mark.parametrize(
    ("num_chunks", "max_stages", "gathers_per_stage"),
    [(2, 2, 1), (4, 2, 4.5), (4, 3, 2.8), (4, 4, 1), (8, 2, 6.2), (8, 4, 4.5)],
)
def test_how_often_weights_are_gathered(num_chunks, max_stages, gathers_per_stage):
    """As counted for interleaved 1F1B on 4 ranks with 16 micro-batches; the mean over the ranks."""
    programs = lower(make_schedule("interleaved", 4, 16, num_chunks))
    gathers = [run(program, max_stages)[0] / num_chunks for program in programs]
    assert sum(gathers) / len(gathers) == pytest.approx(gathers_per_stage, rel=0.25)


def test_one_stage_at_a_time_is_gathered_for_almost_every_use():
    programs = lower(make_schedule("interleaved", 4, 16, 2))
    assert max(run(program, 1)[0] for program in programs) > 20


def test_a_gather_runs_during_the_action_before():
    program = tuple(Action(stage, ActionKind.FORWARD, 0) for stage in (0, 1, 2))
    assert " ".join(map(str, with_unshards(program, 2))) == (
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 1RESHARD 2F0 2RESHARD"
    )
