"""Settings of groups, and modes of models, that differ between ranks are told with a step's message."""

import timeit

import pytest
import torch
from hybridpp_plugins.optimizer_step import GroupSettings, ModelModes
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import UnequalRanksError


def train(change, *, is_manual=False, **settings):
    """Three steps of two replicas, of which the second one changes its settings after the first step."""
    weights = []

    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.1))
        model.register_buffer("scale", torch.ones(1))
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": torch.tensor(0.02)}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        booster = Booster(plugin=HybridParallelPlugin(**settings), device="cpu")
        model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.MSELoss())
        x = torch.ones(2, 4)
        for step in range(3):
            if is_manual:
                booster.backward(model(x).square().mean(), optimizer)
            else:
                booster.execute_pipeline(iter([(x, x)]), model, criterion, optimizer)
            optimizer.step()
            if step == 0 and current_world().rank == 1:
                change(model, optimizer.param_groups)
                weights.append(model[0].weight.detach().clone())
        return model

    with pytest.raises(UnequalRanksError) as caught:
        Loopback(2).run(run)
    return str(caught.value)


def rate(model, groups):
    groups[0]["lr"] = 0.001


def tensor_rate(model, groups):
    groups[1]["lr"].fill_(0.5)


def betas(model, groups):
    groups[1]["betas"] = (0.8, 0.9)


def mode(model, groups):
    model.eval()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (rate, "lr of parameter group 0 is 0.01 on rank 0, 0.001 on rank 1. The step was refused"),
        (tensor_rate, "on rank 0, tensor 0.5 of torch.float32 on rank 1. The step was refused"),
        (betas, "betas of parameter group 1 is [0.9, 0.999] on rank 0, [0.8, 0.9] on rank 1. The step was refused"),
        (mode, "training of the model is True on rank 0, False on rank 1. The step was refused"),
    ],
)
def test_settings_that_differ_are_told_before_they_are_used(change, told):
    assert told in train(change)


@pytest.mark.parametrize("settings", [{"max_norm": 1.0}, {"zero_stage": 3}, {"precision": "bf16"}])
def test_rates_that_differ_are_told_whatever_else_a_step_sends(settings):
    assert "lr of parameter group 0 is 0.01 on rank 0, 0.001 on rank 1" in train(rate, **settings)


def test_a_loop_of_backward_is_told_with_the_next_backward_pass():
    assert "on rank 1. Steps since the last backward pass may have used them: load" in train(rate, is_manual=True)


def test_the_digest_of_two_groups_takes_microseconds_and_reads_no_device():
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.1, device="meta")}]
    settings = GroupSettings(torch.optim.AdamW(groups, capturable=True), model, current_world().control())
    assert [one.device.type for one in settings.on_device()] == ["meta"]
    assert settings.digest([0.1]) != settings.digest([0.2])
    assert min(timeit.repeat(settings.digest, number=100, repeat=5)) < 100 * 100e-6


def freeze(model, groups):
    model[1].requires_grad_(False)


def child_mode(model, groups):
    model[2].eval()


def dropout_rate(model, groups):
    model[2].p = 0.5


def buffer(model, groups):
    model.scale.mul_(2)


MODES = [
    (freeze, "requires_grad of 1.weight is True on rank 0, False on rank 1; requires_grad of 1.bias is"),
    (child_mode, "training of 2 is True on rank 0, False on rank 1."),
    (dropout_rate, "p of 2 is 0.1 on rank 0, 0.5 on rank 1."),
    (buffer, "a write to scale between two steps is not made on rank 0, made on rank 1."),
]


@pytest.mark.parametrize(("change", "told"), MODES, ids=[change.__name__ for change, _ in MODES])
def test_modes_that_differ_between_replicas_are_told_before_they_are_used(change, told):
    text = train(change)
    assert text.startswith(f"ranks that hold the same parameters must train them in the same way: {told}")
    assert "The step was refused, and no weight was changed with them." in text


@pytest.mark.parametrize("settings", [{"zero_stage": 1, "max_norm": 1.0}, {"zero_stage": 3}, {"precision": "bf16"}])
def test_a_layer_that_one_replica_freezes_is_told_whatever_the_layout(settings):
    assert "requires_grad of 1.weight is True on rank 0, False on rank 1" in train(freeze, **settings)


def test_a_loop_of_backward_tells_of_a_frozen_layer_with_the_next_pass():
    text = train(freeze, is_manual=True)
    assert "requires_grad of 1.weight is True on rank 0, False on rank 1" in text
    assert "Steps since the last backward pass may have used them" in text


def test_modes_that_all_replicas_change_alike_are_no_error():
    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.1))
        model.register_buffer("scale", torch.ones(1))
        booster = Booster(plugin=HybridParallelPlugin(), device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.MSELoss())
        for change in (freeze, child_mode, dropout_rate, buffer):
            change(model, [])
            booster.execute_pipeline(iter([(torch.ones(2, 4), torch.ones(2, 4))]), model, criterion, optimizer)
            optimizer.step()
        return model.scale.item()

    assert Loopback(2).run(run) == [2, 2]


def test_a_look_at_the_modes_of_a_hundred_modules_takes_microseconds():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    control = current_world().control()
    modes = ModelModes(model, dict(model.named_parameters()), control, [[0]])
    model[3].eval()
    assert modes.look() != 0
    assert min(timeit.repeat(modes.look, number=100, repeat=5)) < 100 * 200e-6
