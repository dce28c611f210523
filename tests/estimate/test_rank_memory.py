import pytest

from hybridpp.estimate import Held, ProgramPeak, StageMemory, step_peak
from hybridpp.pipeline import rank_programs
from hybridpp.schedule import make_schedule, placement


def stage(is_last, **more):
    sizes = {"incoming": 3, "outgoing": 0 if is_last else 3, "incoming_gradients": 3}
    return StageMemory(
        held=Held(100),
        forward=Held(130),
        backward=Held(150, 7 if is_last else 0),
        outgoing_gradients=sizes["outgoing"],
        unheld=sizes["outgoing"],
        **{**sizes, **more},
    )


@pytest.mark.parametrize(("rank", "held"), [(0, 3), (1, 2), (2, 1), (3, 0)])
def test_a_rank_of_1f1b_holds_the_micro_batches_that_are_on_their_way(rank, held):
    program = rank_programs(make_schedule("1f1b", 4, 8))[rank]
    memory = {rank: stage(is_last=rank == 3)}
    peak = step_peak(program.actions, program.completed_sends, memory)
    assert peak.activations == held * 100 + 150
    assert peak.logits == (7 if rank == 3 else 0)
    assert 0 <= peak.messages <= 24  # eight messages
    assert peak.total == peak.activations + peak.logits + peak.messages


def test_gpipe_holds_all_of_them():
    program = rank_programs(make_schedule("gpipe", 2, 6))[0]
    assert step_peak(program.actions, program.completed_sends, {0: stage(False)}).activations == 5 * 100 + 150


def test_what_waits_for_w_is_held_until_then():
    program = rank_programs(make_schedule("zb-h1", 2, 4))[0]
    without = step_peak(program.actions, program.completed_sends, {0: stage(False)})
    waiting = step_peak(program.actions, program.completed_sends, {0: stage(False, waiting=400)})
    assert waiting.activations > without.activations


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "v-half"])
def test_the_peak_of_a_program_is_that_of_its_walk(schedule):
    programs = make_schedule(schedule, 4, 12)
    ranks = placement(programs)
    memories = [
        StageMemory(held=Held(100 + 7 * at), forward=Held(130 - at), backward=Held(150 + at, at), waiting=60 + 11 * at)
        for at in range(len(ranks))
    ]
    for rank, program in enumerate(programs):
        own = {stage: memories[stage] for stage, at in enumerate(ranks) if at == rank}
        assert ProgramPeak(program).of(memories) == step_peak(program, [()] * len(program), own)
