"""Attributes of which each stage of a rank has its own value."""

from torch import nn

from hybridpp.partition.stage_states import StageStates

KEY = ("", "count")


def forwards(model, states, *stages):
    found = []
    for stage in stages:
        with states.of_stage(stage, [KEY]):
            found.append(model.count)
            model.count += 1
    return found


def test_a_stage_finds_what_itself_has_left_and_a_script_that_of_the_last():
    model = nn.Module()
    model.count = 0
    states = StageStates(model, [0, 3])
    assert forwards(model, states, 0, 0, 3) == [0, 1, 0]
    assert model.count == 1
    assert forwards(model, states, 3, 0) == [1, 2]
    assert model.count == 2


def test_all_stages_find_what_a_script_has_set():
    model = nn.Module()
    model.count = 0
    states = StageStates(model, [0, 3])
    forwards(model, states, 0, 3)
    model.count = 7
    assert forwards(model, states, 0, 3) == [7, 7]
