import json
import math
import re
from itertools import pairwise

import pytest
import torch

from hybridpp.errors import ConfigError
from hybridpp.optim import CosineAnnealingWarmupLR, LinearWarmupLR

SCHEDULES = [CosineAnnealingWarmupLR, LinearWarmupLR]


def sgd(*lrs):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs])


def step(optimizer, scheduler, num_steps):
    """The learning rates each of the next steps runs with, one list per group."""
    rows = []
    for _ in range(num_steps):
        rows.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return [list(column) for column in zip(*rows, strict=True)]


def test_linear_with_three_warmup_steps():
    optimizer = sgd(1.0)
    scheduler = LinearWarmupLR(optimizer, total_steps=7, warmup_steps=3)
    assert step(optimizer, scheduler, 10) == [[0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]]


def test_cosine_with_three_warmup_steps():
    optimizer = sgd(1.0)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=7, warmup_steps=3, eta_min=0.5)
    high, low = 0.75 + math.sqrt(0.5) / 4, 0.75 - math.sqrt(0.5) / 4
    expected = [0.25, 0.5, 0.75, 1.0, high, 0.75, low, 0.5, 0.5, 0.5]
    assert step(optimizer, scheduler, 10) == [pytest.approx(expected)]


@pytest.mark.parametrize("total_steps", [1, 2, 9])
def test_cosine_without_warmup_is_the_one_of_torch(total_steps):
    ours, theirs = sgd(0.3), sgd(0.3)
    scheduler = CosineAnnealingWarmupLR(ours, total_steps, eta_min=0.01)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, total_steps, eta_min=0.01)
    (expected,) = step(theirs, reference, total_steps + 1)
    assert step(ours, scheduler, total_steps + 1) == [pytest.approx(expected)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("total_steps", "warmup_steps"), [(1, 0), (1, 1), (5, 0), (5, 4), (5, 5), (40, 7)])
def test_rises_to_the_base_rate_then_falls_to_the_end(schedule, total_steps, warmup_steps):
    optimizer = sgd(2.0)
    (lrs,) = step(optimizer, schedule(optimizer, total_steps, warmup_steps), total_steps + 3)
    warmup, decay, after = lrs[:warmup_steps], lrs[warmup_steps:total_steps], lrs[total_steps:]
    assert warmup == pytest.approx([2.0 * (s + 1) / (warmup_steps + 1) for s in range(warmup_steps)])
    assert decay[:1] in ([], [2.0])
    assert all(earlier > later > 0.0 for earlier, later in pairwise(decay))
    assert after == [0.0, 0.0, 0.0]


def test_every_group_starts_at_its_own_rate_and_ends_at_eta_min():
    optimizer = sgd(1.0, 0.1, 0.01)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=6, warmup_steps=2, eta_min=0.01)
    groups = step(optimizer, scheduler, 7)
    assert [lrs[2] for lrs in groups] == [1.0, 0.1, 0.01]
    assert [lrs[6] for lrs in groups] == pytest.approx([0.01, 0.01, 0.01])
    assert groups[0][4] == pytest.approx((1.0 + 0.01) / 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_group_with_rate_zero_stays_at_zero(schedule):
    optimizer = sgd(0.0)
    assert step(optimizer, schedule(optimizer, total_steps=4, warmup_steps=1), 6) == [[0.0] * 6]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_done", [1, 3, 7])
def test_resumes_from_its_state_dict(schedule, num_done):
    optimizer = sgd(1.0, 0.1)
    scheduler = schedule(optimizer, total_steps=8, warmup_steps=3)
    step(optimizer, scheduler, num_done)
    saved = json.loads(json.dumps(scheduler.state_dict()))
    saved_optimizer = optimizer.state_dict()
    expected = step(optimizer, scheduler, 10)

    resumed_optimizer = sgd(1.0, 0.1)
    resumed = schedule(resumed_optimizer, total_steps=99)
    resumed_optimizer.load_state_dict(saved_optimizer)
    resumed.load_state_dict(saved)
    assert resumed.last_epoch == num_done
    assert step(resumed_optimizer, resumed, 10) == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_resumes_from_last_epoch(schedule):
    optimizer = sgd(1.0)
    scheduler = schedule(optimizer, total_steps=8, warmup_steps=3)
    step(optimizer, scheduler, 5)
    resumed_optimizer = sgd(1.0)
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed = schedule(resumed_optimizer, total_steps=8, warmup_steps=3, last_epoch=4)
    assert step(resumed_optimizer, resumed, 5) == step(optimizer, scheduler, 5)


def test_eta_min_is_checked_against_the_base_rate_when_resuming():
    optimizer = sgd(1.0)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=8, warmup_steps=3, eta_min=0.5)
    assert optimizer.param_groups[0]["lr"] < 0.5
    CosineAnnealingWarmupLR(optimizer, total_steps=8, warmup_steps=3, eta_min=0.5, last_epoch=scheduler.last_epoch)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("total_steps", "warmup_steps", "message"),
    [
        (
            0,
            0,
            "total_steps must be at least 1: got total_steps=0. "
            "Use the number of optimizer steps of the run: num_epochs * len(dataloader).",
        ),
        (
            5,
            6,
            "warmup_steps must be between 0 and total_steps: got warmup_steps=6, total_steps=5. "
            "Count both in optimizer steps, not in epochs, and warm up for at most 5 of them.",
        ),
        (5, -1, "warmup_steps must be between 0 and total_steps: got warmup_steps=-1, total_steps=5. Count both"),
    ],
)
def test_refuses_impossible_steps(schedule, total_steps, warmup_steps, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        schedule(sgd(1.0), total_steps, warmup_steps)


@pytest.mark.parametrize("eta_min", [-0.1, 0.2, math.nan])
def test_refuses_eta_min_outside_a_groups_range(eta_min):
    message = (
        f"eta_min must be between 0 and the learning rate of every parameter group: got eta_min={eta_min}, lr=0.1 in "
        f"group 1. Lower eta_min (0.0 always works) or raise that learning rate."
    )
    if eta_min != 0.2:
        message = message.replace("lr=0.1 in group 1", "lr=1.0 in group 0")
    with pytest.raises(ConfigError, match=re.escape(message)):
        CosineAnnealingWarmupLR(sgd(1.0, 0.1), total_steps=5, eta_min=eta_min)
