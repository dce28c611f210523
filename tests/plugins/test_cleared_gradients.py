"""A script that sets ``parameter.grad`` to None freezes the parameter for a step, as in torch, in every layout."""

import pytest
import torch
from support import assert_near, assert_same, boosted
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError, UnlikeCallsError

NAMES = ("0.bias", "2.weight")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)


def clear(model, step):
    for name, parameter in model.named_parameters():
        if name in NAMES and step:
            parameter.grad = None


def alone(max_norm=1e3):
    model = make_model()
    optimizer = adamw(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        inputs, target = batch(step)
        nn.functional.mse_loss(model(inputs), target).backward()
        clear(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


LAYOUTS = [
    *({}, {"max_norm": 0.05}, {"pp_size": 2}, {"zero_stage": 1, "max_norm": 0.05}, {"zero_stage": 3}),
    *({"zero_stage": zero, "precision": precision} for precision in ("bf16", "fp16") for zero in (0, 1, 2, 3)),
    {"precision": "bf16", "max_norm": 0.05, "zero_stage": 2},
    {"precision": "bf16", "max_norm": 1e3, "pp_size": 2, "zero_stage": 2},
    {"precision": "fp16", "offload_optimizer": 1.0, "zero_stage": 1, "max_norm": 0.05},
]


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_what_has_no_gradient_is_not_updated_with_replicas_either(settings):
    train_and_compare(settings)


def test_what_pipelines_have_clipped_by_cannot_be_dropped():
    with pytest.raises(ConfigError, match=r"^parameter\.grad = None before .*max_norm=0.05 clips"):
        train_and_compare({"precision": "bf16", "max_norm": 0.05, "pp_size": 2})


def train_and_compare(settings):
    def run():
        booster, model, optimizer = boosted(make_model(), adamw, (torch.zeros(1, 4),), **settings)
        replica = booster.plugin.layout.here.dp
        for step in range(3):
            data = iter([tuple(part[2 * replica : 2 * replica + 2] for part in batch(step))])
            booster.execute_pipeline(data, model, nn.MSELoss(), optimizer)
            clear(model, step)
            optimizer.step()
        with booster.unsharded(model):
            return {name: parameter.detach().float() for name, parameter in model.named_parameters()}

    weights = {}
    for rank in Loopback(2 * settings.get("pp_size", 1)).run(run):
        weights |= rank
    tolerance = {"bf16": 4e-3, "fp16": 1e-3}.get(settings.get("precision"), 1e-6)
    assert_near(weights, alone(settings.get("max_norm", 1e3)), tolerance)


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16", "zero_stage": 1}], ids=str)
def test_a_gradient_that_one_replica_lacks_ends_the_run_on_all(settings):
    def run():
        booster, model, optimizer = boosted(make_model(), adamw, (torch.zeros(1, 4),), **settings)
        for step in range(2):
            booster.execute_pipeline(iter([batch(step)]), model, nn.MSELoss(), optimizer)
            if current_world().rank == 1:
                model[0].bias.grad = None
            optimizer.step()

    with pytest.raises(UnlikeCallsError, match=r"set parameter\.grad to None on rank 1, of ranks 0"):
        Loopback(2).run(run)


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"zero_stage": 2}], ids=str)
def test_a_gradient_that_is_dropped_between_two_passes_counts_from_there(settings):
    def run():
        booster, model, optimizer = boosted(make_model(), adamw, (torch.zeros(1, 4),), **settings)
        before = model[2].bias.detach().clone()
        booster.execute_pipeline(iter([batch(0)]), model, nn.MSELoss(), optimizer)
        model[2].bias.grad = None
        model[2].bias.requires_grad_(False)
        booster.execute_pipeline(iter([batch(1)]), model, nn.MSELoss(), optimizer)
        optimizer.step()
        assert torch.equal(model[2].bias, before)

    for size in (1, 2):
        Loopback(size).run(run)


HIDDEN = [{"precision": "bf16"}, {"precision": "fp16", "zero_stage": 3}, {"zero_stage": 1}]


@pytest.mark.parametrize("settings", HIDDEN, ids=str)
def test_gradients_that_are_elsewhere_are_there_and_refuse_to_be_read(settings):
    def run():
        booster, model, optimizer = boosted(make_model(), adamw, (torch.zeros(1, 4),), **settings)
        booster.execute_pipeline(iter([batch(0)]), model, nn.MSELoss(), optimizer)
        weight = model[0].weight
        assert weight.grad is not None
        assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)
        assert "HiddenGradient('0.weight', shape=(4, 4)" in repr(weight.grad)
        model.to("cpu")
        refused = r"^\d\.\w+\.grad was read or written between .* optimizer\.clip_grad_by_norm"
        clips = lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
        for reads in (clips, lambda: weight.grad.data.mul_(2), lambda: (weight.float() * 2).sum().backward()):
            with pytest.raises(ConfigError, match=refused):
                reads()
        optimizer.step()
        model.to("cpu")
        refused = (
            r"^\d\.\w+\.grad was read or written after optimizer\.step\(\) .* booster\.backward\(loss, optimizer\)"
        )
        for reads in (
            clips,
            lambda: weight.grad.data.mul_(2),
            lambda: weight.grad.norm(),
            lambda: weight.grad.fill_(1),
            lambda: (weight.float() * 2).sum().backward(),
        ):
            with pytest.raises(ConfigError, match=refused):
                reads()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())

    Loopback(2).run(run)


@pytest.mark.parametrize("settings", HIDDEN, ids=str)
def test_a_gradient_that_the_script_sets_is_refused_where_it_is_hidden(settings):
    def run():
        booster, model, optimizer = boosted(make_model(), adamw, (torch.zeros(1, 4),), **settings)
        booster.execute_pipeline(iter([batch(0)]), model, nn.MSELoss(), optimizer)
        model[0].bias.grad = torch.zeros_like(model[0].bias)
        with pytest.raises(ConfigError, match=r"^0\.bias\.grad was set between the backward pass and optimizer\.step"):
            optimizer.step()

    Loopback(2).run(run)


def test_what_the_optimizer_updates_can_be_left_out_unless_it_is_a_part():
    def run(settings):
        booster, model, optimizer = boosted(make_model(), adamw, (torch.zeros(1, 4),), **settings)
        before = model[2].bias.detach().clone()
        booster.execute_pipeline(iter([batch(0)]), model, nn.MSELoss(), optimizer)
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.grad = None
        optimizer.step()
        assert torch.equal(model[2].bias, before)

    Loopback(2).run(lambda: run({"precision": "bf16"}))
    with pytest.raises(ConfigError, match=r"^the gradient of .* was set to None in optimizer\.param_groups"):
        Loopback(2).run(lambda: run({"precision": "bf16", "zero_stage": 1}))


def test_dropping_inside_no_sync_what_is_reduced_in_part_is_refused():
    def run():
        booster, model, optimizer = boosted(make_model(), adamw, (torch.zeros(1, 4),), precision="bf16")
        booster.execute_pipeline(iter([batch(0)]), model, nn.MSELoss(), optimizer)
        with booster.no_sync(model, optimizer):
            booster.execute_pipeline(iter([batch(1)]), model, nn.MSELoss(), optimizer)
        model[0].bias.grad = None
        with pytest.raises(ConfigError, match=r"^0\.bias\.grad was set to None inside no_sync"):
            optimizer.step()

    Loopback(2).run(run)


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"zero_stage": 1}, {"pp_size": 2}], ids=str)
def test_gradients_of_before_boost_are_dropped_by_the_script_or_refused(settings):
    def run(with_gradients):
        model = make_model()
        if with_gradients:
            model(torch.ones(1, 4)).sum().backward()
        booster, model, optimizer = boosted(model, adamw, (torch.zeros(1, 4),), **settings)
        if with_gradients:
            call = lambda: booster.execute_pipeline(iter([batch(0)]), model, nn.MSELoss(), optimizer)  # noqa: E731
            for use in (call, optimizer.step):
                with pytest.raises(ConfigError, match="had a gradient when the model was boosted"):
                    use()
            model.zero_grad() if with_gradients == "model" else optimizer.zero_grad()
        booster.execute_pipeline(iter([batch(0)]), model, nn.MSELoss(), optimizer)
        optimizer.step()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    size = 1 if settings.get("precision") or not settings else 2
    clean = Loopback(size).run(lambda: run(""))
    for dropped_by in ("model", "optimizer"):
        for found, wanted in zip(Loopback(size).run(lambda by=dropped_by: run(by)), clean, strict=True):
            assert_same(found, wanted)
