"""Settings of groups, and modes of models, that differ between ranks are told with a step's message."""

import timeit

import pytest
import torch
from hybridpp_plugins.optimizer_step import GroupSettings, ModelModes, SharedModes
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import UnequalRanksError


def train(change, *, is_manual=False, **settings):
    """Three steps of two replicas, of which the second one changes its settings after the first step."""

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
    text = train(rate, is_manual=True)
    assert "lr of parameter group 0, as the last step has used it, is 0.01 on rank 0, 0.001 on rank 1. Their" in text
    assert "weights no longer fit together: load a checkpoint on all ranks." in text


def test_the_digest_of_two_groups_takes_microseconds_and_reads_no_device():
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.1, device="meta")}]
    settings = GroupSettings(
        torch.optim.AdamW(groups, capturable=True), SharedModes(model, {}, (0,)), current_world().control()
    )
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


class Divided(nn.Module):
    """Two blocks, which are two stages, and dropout between them that belongs to none alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = self.dropout(block(x))
        return x


def on_stages(change, then=None):
    """Two steps on two stages; before and after the first update, ``change(rank, model, group, is_before)`` is called.

    ``then(booster, model, criterion, batch)`` takes the place of the second step.
    """

    def run():
        model, rank = Divided(), current_world().rank
        booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2), device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, 4)
        model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.MSELoss(), sample=(x, x))
        booster.execute_pipeline(iter([(x, x)]), model, criterion, optimizer)
        change(rank, model, optimizer.param_groups, True)
        optimizer.step()
        change(rank, model, optimizer.param_groups, False)
        if then is not None:
            then(booster, model, criterion, (x, x))
        else:
            booster.execute_pipeline(iter([(x, x)]), model, criterion, optimizer)

    return Loopback(2).run(run)


def evaluated(booster, model, criterion, batch):
    with torch.no_grad():
        booster.execute_pipeline(iter([batch]), model, criterion)


def saved(booster, model, criterion, batch):
    booster.save_model(model, "/nonexistent/model.safetensors")


def on_one(change):
    return lambda rank, model, groups, is_before: change(model, groups) if rank == 1 and not is_before else None


def outer_mode(model, groups):
    model.dropout.eval()


def outer_rate(model, groups):
    model.dropout.p = 0.5


@pytest.mark.parametrize(
    ("change", "then", "told"),
    [
        (rate, None, "lr of parameter group 0 is 0.1 on rank 0, 0.001 on rank 1. The step was refused"),
        (outer_mode, None, "training of dropout is True on rank 0, False on rank 1. The step was refused"),
        (outer_rate, None, "p of dropout is 0.1 on rank 0, 0.5 on rank 1. The step was refused"),
        (rate, saved, "lr of parameter group 0 is 0.1 on rank 0, 0.001 on rank 1. Nothing was saved."),
        (mode, evaluated, "training of the model is True on rank 0, False on rank 1. Call model.eval()"),
        (outer_rate, evaluated, "rates of dropout inside of it differ between rank 0, rank 1. Call model.eval()"),
    ],
)
def test_what_one_stage_sets_of_what_all_have_is_told(change, then, told):
    with pytest.raises(UnequalRanksError) as caught:
        on_stages(on_one(change), then)
    assert told in str(caught.value)


@pytest.mark.parametrize("then", [None, saved])
def test_a_rate_that_one_rank_sets_for_one_update_is_told(then):
    def change(rank, model, groups, is_before):
        groups[0]["lr"] = 0.2 if rank == 1 and is_before else 0.1

    with pytest.raises(UnequalRanksError) as caught:
        on_stages(change, then)
    told = "lr of parameter group 0, as the last step has used it, is 0.1 on rank 0, 0.2 on rank 1. Their weights no"
    assert told in str(caught.value)


def test_what_a_stage_sets_by_its_own_parameters_is_no_error():
    def change(rank, model, groups, is_before):
        for module in model.blocks.modules():
            module.train(any(parameter.requires_grad for parameter in module.parameters()))

    on_stages(change)
