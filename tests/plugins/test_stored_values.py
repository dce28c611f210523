"""Values of a checkpoint that do not fit what takes them are found before anything changes."""

import copy

import pytest
import torch
from hybridpp_plugins.stored_values import check_extra_state, check_schedule, is_like
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from hybridpp.errors import CheckpointError


def test_numbers_stand_for_numbers_and_lists_for_lists_as_long():
    for saved, here in ((1, 2.0), (torch.tensor(0.1), 1e-3), ((0.9, 0.99), [0.9, 0.95]), ("a", None), (None, None)):
        assert is_like(saved, here)
    for saved, here in (
        ("1", 1),
        ([1], 1),
        ((0.9,), (0.9, 0.99)),
        (("a", 1), (1, 1)),
        (1, "sum"),
        (torch.ones(2), 1),
        ([0, None], [0, 0]),
    ):
        assert not is_like(saved, here)


def schedules():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    yield LambdaLR(optimizer, lambda step: 1 / (1 + step))
    yield ReduceLROnPlateau(optimizer)
    yield OneCycleLR(optimizer, 0.5, total_steps=9)
    yield SequentialLR(optimizer, [StepLR(optimizer, 2), StepLR(optimizer, 3)], [5])


@pytest.mark.parametrize("number", range(4))
def test_a_state_of_a_schedule_is_tried_and_nothing_changes(number):
    schedule = list(schedules())[number]
    right = copy.deepcopy(schedule.state_dict())
    before = copy.deepcopy(vars(schedule)["optimizer"].param_groups[0]), copy.deepcopy(schedule.state_dict())
    check_schedule(schedule, copy.deepcopy(right))
    name = next(iter(right))
    for wrong in ({**right, "step": 5}, {**right, name: ["x"] * 7}, {**right, 3: 4}):
        with pytest.raises(CheckpointError, match="which is none of a"):
            check_schedule(schedule, wrong)
    state = schedule.state_dict()
    assert {key: str(value) for key, value in state.items()} == {key: str(value) for key, value in before[1].items()}
    assert vars(schedule)["optimizer"].param_groups[0]["lr"] == before[0]["lr"]


def test_a_schedule_that_lacks_an_entry_is_refused():
    schedule = next(schedules())
    state = schedule.state_dict()
    del state["lr_lambdas"]
    with pytest.raises(CheckpointError, match="is none of a LambdaLR: KeyError: 'lr_lambdas'"):
        check_schedule(schedule, state)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 3

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"] + 0


def test_an_extra_state_is_tried_and_nothing_changes():
    module = Counting()
    check_extra_state(module, "head._extra_state", {"count": 5})
    for wrong in ({}, {"count": "x"}, 3):
        with pytest.raises(CheckpointError, match=r"head\._extra_state is no state that set_extra_state of"):
            check_extra_state(module, "head._extra_state", wrong)
    assert module.count == 3
