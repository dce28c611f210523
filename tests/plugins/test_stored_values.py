"""Values of a checkpoint that do not fit what takes them are found before anything changes."""

import copy
import functools

import pytest
import torch
from hybridpp_plugins.stored_values import check_extra_state, check_schedule, check_settings, is_count, is_like
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from hybridpp.errors import CheckpointError


def test_numbers_stand_for_numbers_and_lists_for_lists_as_long():
    betas = (0.9, 0.99), [0.9, 0.95]
    for saved, here in ((1, 2.0), (torch.tensor(0.1), 1e-3), betas, ("a", None), (None, None), (1, True)):
        assert is_like(saved, here)
    for saved, here in (
        ("1", 1),
        ([1], 1),
        ((0.9,), (0.9, 0.99)),
        (("a", 1), (1, 1)),
        (1, "sum"),
        (torch.ones(2), 1),
        (2, True),
        ("yes", False),
        (True, 0.5),
        ([0, None], [0, 0]),
    ):
        assert not is_like(saved, here)


class Sharp(torch.optim.Optimizer):
    """An optimizer as scripts have them: with arguments that are no settings, and a rate above 0."""

    def __init__(self, params, rho, lr=0.1, max_norm=1.0):
        if lr <= 0.0 or not rho:
            raise ValueError(f"wrong lr: {lr}")
        super().__init__(params, {"lr": lr, "max_norm": max_norm})


class Positive(Sharp):
    def __init__(self, params, lr=0.1, max_norm=1.0):
        super().__init__(params, 1, lr, max_norm)


SGD = functools.partial(torch.optim.SGD, lr=0.1)


def climbing(parameters):
    """An optimizer whose script sets what no constructor takes."""
    optimizer = SGD(parameters)
    optimizer.param_groups[0]["lr"] = -1.0
    return optimizer


@pytest.mark.parametrize(
    ("make", "saved", "text"),
    [
        (torch.optim.AdamW, {"lr": -5}, "'lr' = -5 there, which AdamW refuses: ValueError: Invalid learning rate: -5."),
        (torch.optim.AdamW, {"lr": None}, "'lr' = None there, which AdamW refuses: TypeError: "),
        (torch.optim.AdamW, {"lr": 1j, "initial_lr": 1.0}, "'lr' = 1j there, which AdamW refuses: TypeError: "),
        (torch.optim.AdamW, {"betas": (0.9, 1.5)}, "'betas' = (0.9, 1.5) there, which AdamW refuses: ValueError: "),
        (torch.optim.AdamW, {"eps": -1, "lr": 0.0}, "'eps' = -1 there, which AdamW refuses: ValueError: Invalid eps"),
        (torch.optim.AdamW, {"weight_decay": 1e300}, "'weight_decay' = 1e+300 there, which no float32 holds."),
        (torch.optim.AdamW, {"betas": (0.9, float("nan"))}, "'betas' = (0.9, nan) there, which no float32 holds."),
        (torch.optim.AdamW, {"amsgrad": "yes"}, "'amsgrad' = 'yes' there, and False here."),
        (torch.optim.AdamW, {"maximize": None}, "'maximize' = None there, and False here."),
        (SGD, {"lr": float("inf")}, "'lr' = inf there, which no float32 holds."),
        (SGD, {"momentum": -1.0}, "'momentum' = -1.0 there, which SGD refuses: ValueError: Invalid momentum value"),
        (SGD, {"lr": -5.0, "momentum": -1.0}, "has settings there that SGD refuses: ValueError: Invalid learning rate"),
        (Positive, {"lr": -0.1}, "'lr' = -0.1 there, which Positive refuses: ValueError: wrong lr: -0.1."),
    ],
)
def test_settings_that_the_class_of_the_optimizer_refuses_are_named(make, saved, text):
    optimizer = make([nn.Parameter(torch.ones(2))])
    before = repr(optimizer.param_groups)
    with pytest.raises(CheckpointError, match=r"group 0 of the optimizer has .*Restore the files") as raised:
        check_settings(optimizer, 0, saved)
    assert text in str(raised.value)
    assert repr(optimizer.param_groups) == before


@pytest.mark.parametrize(
    ("make", "saved"),
    [
        (torch.optim.AdamW, {"lr": 0, "initial_lr": 0.1, "betas": [0, 0.5], "weight_decay": 1}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1), "capturable": True, "fused": None, "name": "head"}),
        (torch.optim.AdamW, {"lr": -1e-19, "initial_lr": 1e-3, "amsgrad": 1}),  # as CosineAnnealingLR may end
        (SGD, {"momentum": 0.9, "nesterov": True}),
        (functools.partial(SGD, momentum=0.9, nesterov=True), {"momentum": 0, "nesterov": False}),
        (climbing, {"lr": -2.0}),
        (functools.partial(Sharp, rho=1), {"lr": -5}),  # which nobody can construct from settings
        (Positive, {"lr": 0, "max_norm": float("inf")}),
        (functools.partial(Positive, lr=0.5), {"lr": 0.0, "initial_lr": 0.5}),
        (torch.optim.Adafactor, {"eps": (None, 1e-3)}),
        (torch.optim.LBFGS, {"line_search_fn": "strong_wolfe"}),
    ],
)
def test_settings_that_scripts_and_schedules_make_are_taken(make, saved):
    check_settings(make([nn.Parameter(torch.ones(2))]), 0, saved)


@pytest.mark.parametrize("wrong", ["x", None, -1, 1j, float("nan"), [1]])
def test_numbers_of_steps_are_counts(wrong):
    assert not is_count(wrong)
    assert all(map(is_count, (0, 3, 3.0, torch.tensor(5.0))))


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
