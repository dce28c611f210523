"""Every schedule by the name people have in their scripts, against the implementation it stands on or stands for."""

import functools
import json
import re

import pytest
import torch
from torch.optim import lr_scheduler

import hybridpp
from hybridpp.errors import ConfigError

TOTAL, WARMUP = 20, 4


def sgd(*lrs):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (0.3, 0.02)]
    return torch.optim.SGD(groups, lr=lrs[0] if lrs else 0.3, momentum=0.9)


def rates(optimizer, scheduler, num_steps):
    rows = []
    for _ in range(num_steps):
        rows.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rows


def halve(step):
    return 0.5**step


def one_cycle(optimizer, **options):
    return lr_scheduler.OneCycleLR(optimizer, [0.3, 0.02], TOTAL, **options)


# Our name and options, and torch's own schedule that has the same rates up to `total_steps`.
SAME_AS_TORCHS = [
    ("CosineAnnealingLR", {"eta_min": 0.01}, functools.partial(lr_scheduler.CosineAnnealingLR, T_max=TOTAL)),
    ("StepLR", {"step_size": 3, "gamma": 0.5}, lr_scheduler.StepLR),
    ("MultiStepLR", {"milestones": [5, 9], "gamma": 0.5}, lr_scheduler.MultiStepLR),
    ("MultiStepWarmupLR", {"milestones": [9, 5], "gamma": 0.5}, lr_scheduler.MultiStepLR),
    ("ExponentialLR", {"gamma": 0.9}, lr_scheduler.ExponentialLR),
    ("ExponentialWarmupLR", {"gamma": 0.9}, lr_scheduler.ExponentialLR),
    ("LambdaLR", {"lr_lambda": halve}, lr_scheduler.LambdaLR),
    ("MultiplicativeLR", {"lr_lambda": halve}, lr_scheduler.MultiplicativeLR),
    ("OneCycleLR", {}, one_cycle),
    ("OneCycleLR", {"pct_start": 0.5, "anneal_strategy": "linear", "div_factor": 5.0}, one_cycle),
    ("PolynomialWarmupLR", {"power": 2.0}, functools.partial(lr_scheduler.PolynomialLR, total_iters=TOTAL)),
    ("PolynomialLR", {"power": 2.0}, functools.partial(lr_scheduler.PolynomialLR, total_iters=TOTAL)),
]


@pytest.mark.parametrize(("name", "options", "reference"), SAME_AS_TORCHS)
def test_has_the_rates_of_torchs_schedule(name, options, reference):
    ours, theirs = sgd(), sgd()
    more = {"end_lr": 0.0} if name.startswith("Polynomial") else {}
    scheduler = getattr(hybridpp, name)(ours, TOTAL, **options, **more)
    expected = rates(theirs, reference(theirs, **options), TOTAL - 1)
    assert rates(ours, scheduler, TOTAL - 1) == [pytest.approx(row) for row in expected]


def test_one_cycle_turns_the_momentum_the_other_way():
    ours, theirs = sgd(), sgd()
    ours_scheduler, theirs_scheduler = hybridpp.OneCycleLR(ours, TOTAL), one_cycle(theirs)
    for _ in range(TOTAL - 1):
        assert [group["momentum"] for group in ours.param_groups] == [g["momentum"] for g in theirs.param_groups]
        for optimizer, scheduler in ((ours, ours_scheduler), (theirs, theirs_scheduler)):
            optimizer.step()
            scheduler.step()


def test_polynomial_decay_is_that_of_transformers_behind_the_warmup():
    from transformers import get_polynomial_decay_schedule_with_warmup

    ours, theirs = sgd(0.3), sgd(0.3)
    scheduler = hybridpp.PolynomialWarmupLR(ours, TOTAL, WARMUP, end_lr=0.01, power=1.5)
    reference = get_polynomial_decay_schedule_with_warmup(theirs, WARMUP, TOTAL, lr_end=0.01, power=1.5)
    expected = rates(theirs, reference, TOTAL + 3)
    assert rates(ours, scheduler, TOTAL + 3)[WARMUP:] == [pytest.approx(row) for row in expected[WARMUP:]]


# Behind a warm-up, each is its schedule without one on the steps that are left.
WITH_WARMUP = [
    ("CosineAnnealingWarmupLR", {"eta_min": 0.01}, ("CosineAnnealingLR", {"eta_min": 0.01})),
    ("FlatAnnealingWarmupLR", {"pct_start": 0.5}, ("FlatAnnealingLR", {"pct_start": 0.5})),
    ("PolynomialWarmupLR", {"end_lr": 0.01, "power": 2.0}, ("PolynomialLR", {"end_lr": 0.01, "power": 2.0})),
    ("MultiStepWarmupLR", {"milestones": [9, 12]}, ("MultiStepLR", {"milestones": [9 - WARMUP, 12 - WARMUP]})),
    ("ExponentialWarmupLR", {"gamma": 0.9}, ("ExponentialLR", {"gamma": 0.9})),
    ("ConstantWarmupLR", {}, ("LambdaLR", {"lr_lambda": lambda step: 1.0})),
]


@pytest.mark.parametrize(("name", "options", "without"), WITH_WARMUP)
def test_a_warmup_rises_to_the_base_rate_and_then_the_schedule_runs(name, options, without):
    ours, theirs = sgd(), sgd()
    scheduler = getattr(hybridpp, name)(ours, TOTAL, WARMUP, **options)
    found = rates(ours, scheduler, TOTAL)
    assert [row[0] for row in found[:WARMUP]] == pytest.approx([0.3 * (s + 1) / (WARMUP + 1) for s in range(WARMUP)])
    other_name, other_options = without
    reference = getattr(hybridpp, other_name)(theirs, TOTAL - WARMUP, **other_options)
    expected = rates(theirs, reference, TOTAL - WARMUP)
    assert found[WARMUP:] == [pytest.approx(row) for row in expected]


def test_flat_annealing_keeps_the_base_rate_and_then_runs_torchs_cosine():
    ours, theirs = sgd(0.3), sgd(0.3)
    scheduler = hybridpp.FlatAnnealingLR(ours, total_steps=10, pct_start=0.6)
    expected = [[0.3]] * 6 + rates(theirs, lr_scheduler.CosineAnnealingLR(theirs, T_max=4), 4) + [[0.0]] * 3
    assert rates(ours, scheduler, 13) == [pytest.approx(row) for row in expected]


EVERY_NAME = sorted({name for name, _, _ in [*SAME_AS_TORCHS, *WITH_WARMUP]} | {"FlatAnnealingLR", "LinearWarmupLR"})
NEEDS = {"LambdaLR": {"lr_lambda": halve}, "MultiplicativeLR": {"lr_lambda": halve}}


@pytest.mark.parametrize("name", EVERY_NAME)
def test_resumes_from_its_state_dict(name):
    make = functools.partial(getattr(hybridpp, name), total_steps=TOTAL, **NEEDS.get(name, {}))
    optimizer = sgd()
    scheduler = make(optimizer)
    rates(optimizer, scheduler, 7)
    saved, saved_optimizer = scheduler.state_dict(), optimizer.state_dict()
    if name not in NEEDS and not name.startswith(("OneCycle", "MultiStepLR")):
        saved = json.loads(json.dumps(saved))
    expected = rates(optimizer, scheduler, 10)
    resumed_optimizer = sgd()
    resumed = make(resumed_optimizer)
    resumed_optimizer.load_state_dict(saved_optimizer)
    resumed.load_state_dict(saved)
    assert rates(resumed_optimizer, resumed, 10) == expected


@pytest.mark.parametrize("name", EVERY_NAME)
def test_refuses_no_steps(name):
    with pytest.raises(ConfigError, match=re.escape("total_steps must be at least 1: got total_steps=0.")):
        getattr(hybridpp, name)(sgd(), total_steps=0, **NEEDS.get(name, {}))


def test_refuses_an_end_above_the_base_rate():
    message = "end_lr must be between 0 and the learning rate of every parameter group: got end_lr=0.0001, lr=1e-05 in"
    with pytest.raises(ConfigError, match=re.escape(message)):
        hybridpp.PolynomialLR(sgd(1e-5), total_steps=3)


def test_refuses_a_plateau_in_percent():
    message = "pct_start must be a fraction of the steps, from 0 to 1: got pct_start=72. Use, for example, 0.72."
    with pytest.raises(ConfigError, match=re.escape(message)):
        hybridpp.FlatAnnealingLR(sgd(), total_steps=3, pct_start=72)
