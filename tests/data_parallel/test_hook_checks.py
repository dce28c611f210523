"""Hooks of scripts on the gradients of parameters: one result in every layout, or an error that names them."""

import pytest
import torch
from support import assert_near, boosted, image_batch, sgd, small_vit, train
from torch import nn

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

DATA = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
LAYOUTS = [
    {"num_microbatches": 2},
    {"dp_size": 2},
    {"dp_size": 2, "zero_stage": 2},
    {"precision": "bf16", "num_microbatches": 2},
]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def mean_square(output, _):
    return output.square().mean()


def halve(parameter):
    parameter.grad.mul_(0.5)


def run_with(register, *, late=False, dp_size=1, **settings):
    """Weights after two steps; ``register(booster, model)`` before boost, or after it."""

    def run():
        model, holder = make_model(), []
        if not late:
            register(holder, model)
        booster, model, optimizer = boosted(model, sgd, (DATA[:1],), **settings)
        holder.append(booster)
        if late:
            register(holder, model)
        replica = booster.plugin.layout.here.dp
        for _ in range(2):
            part = DATA.chunk(dp_size)[replica]
            booster.execute_pipeline(iter([(part, part)]), model, mean_square, optimizer)
            optimizer.step()
        return {name: one.detach().float() for name, one in model.named_parameters()}

    found = {}
    for rank in Loopback(dp_size * settings.get("pp_size", 1)).run(run):
        found |= rank
    return found


def on_all(hook):
    return lambda _, model: [one.register_post_accumulate_grad_hook(hook) for one in model.parameters()]


def in_one_process(register):
    model = make_model()
    register([], model)
    optimizer = sgd(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        mean_square(model(DATA), None).backward()
        optimizer.step()
    return {name: one.detach() for name, one in model.named_parameters()}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_a_hook_behind_accumulation_sees_the_gradient_of_each_pass(settings, late):
    tolerance = 1e-2 if "precision" in settings else 1e-6
    assert_near(run_with(on_all(halve), late=late, **settings), in_one_process(on_all(halve)), tolerance)


def test_grad_is_the_sum_behind_passes_with_hooks():
    booster, model, optimizer = boosted(make_model(), sgd, (DATA[:1],), num_microbatches=2)
    on_all(halve)([], model)
    for _ in range(2):
        booster.execute_pipeline(iter([(DATA, DATA)]), model, mean_square, optimizer)
        plain = make_model()
        plain.load_state_dict(model.state_dict())
        mean_square(plain(DATA), None).backward()
        assert_near({"": model[0].weight.grad}, {"": plain[0].weight.grad * 0.5}, 1e-6)
        with booster.no_sync(model):
            booster.execute_pipeline(iter([(DATA, DATA)]), model, mean_square, optimizer)
        assert_near({"": model[0].weight.grad}, {"": plain[0].weight.grad}, 1e-6)
        optimizer.step()


def decay(weight):
    return lambda gradient: gradient + 0.01 * weight.detach()


NOT_LINEAR = {
    "clamp": lambda weight: lambda gradient: gradient.clamp(-1, 1),
    "normalise": lambda weight: lambda gradient: gradient / gradient.norm(),
    "positive": lambda weight: lambda gradient: gradient.relu(),
    "decay": decay,
    "draw": lambda weight: lambda gradient: gradient + torch.randn_like(gradient),
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, LAYOUTS[0]) for kind in NOT_LINEAR),
        ("clamp", LAYOUTS[1]),
        ("clamp", {**LAYOUTS[0], "precision": "fp16"}),
    ],
    ids=str,
)
def test_a_hook_that_is_not_linear_is_refused_by_name_for_parts_of_a_batch(kind, settings):
    register = lambda _, model: model[0].weight.register_hook(NOT_LINEAR[kind](model[0].weight))  # noqa: E731
    with pytest.raises(ConfigError, match=r"the hook '.*<lambda>' on the gradient of 0\.weight is called for a part"):
        run_with(register, **settings)


def test_a_hook_that_replaces_grad_is_refused_like_one_that_returns_it():
    def clamp(parameter):
        parameter.grad.data.clamp_(-0.01, 0.01)

    with pytest.raises(ConfigError, match=r"the hook '.*clamp' on the gradient of"):
        run_with(on_all(clamp), num_microbatches=2)
    assert_near(run_with(on_all(clamp)), in_one_process(on_all(clamp)), 1e-6)


@pytest.mark.parametrize("settings", [LAYOUTS[0], LAYOUTS[1]], ids=str)
def test_a_term_with_the_scale_of_the_gradient_and_linear_hooks_are_right(settings):
    def register(booster, model):
        weight = model[0].weight
        scale = lambda: booster[0].gradient_scale if booster else 1.0  # noqa: E731
        weight.register_hook(lambda gradient: gradient + 0.1 * scale() * weight.detach())
        model[2].weight.register_hook(lambda gradient: gradient * 0.5)

    assert_near(run_with(register, **settings), in_one_process(register), 1e-6)


def test_a_hook_that_only_looks_is_called_once_for_each_pass():
    seen = []
    run_with(lambda _, model: model[0].weight.register_hook(lambda gradient: seen.append(1)), num_microbatches=2)
    assert len(seen) == 4


def test_a_hook_on_one_stage_is_refused_on_every_rank():
    def run():
        model = make_model()
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        booster, model, optimizer = boosted(model, sgd, (DATA[:1],), pp_size=2, num_microbatches=2)
        with pytest.raises(ConfigError) as refused:
            booster.execute_pipeline(iter([(DATA, DATA)]), model, mean_square, optimizer)
        return str(refused.value)

    first, second = Loopback(2).run(run)
    assert first == second
    assert "on the gradient of 0.weight" in first


SHARDED = {"tensor_parallel_plan": {"*.fc1": "column", "*.fc2": "row"}}


def vit_with(hook):
    def make():
        model = small_vit()
        model.vit.layers[0].mlp.fc1.weight.register_hook(hook)
        return model

    return make


@pytest.mark.parametrize("settings", [{}, {"num_microbatches": 2}, {"dp_size": 2, "zero_stage": 1}], ids=str)
@pytest.mark.parametrize(
    "hook", [lambda gradient: gradient / gradient.norm(), lambda gradient: gradient - 2 * gradient.mean(0)]
)
def test_a_hook_that_needs_all_shards_is_refused_by_name(hook, settings):
    with pytest.raises(
        ConfigError, match=r"the hook .* on the gradient of .*fc1\.weight is called for this rank's shard"
    ):
        train(vit_with(hook), [image_batch(4)], tp_size=2, **SHARDED, **settings)


@pytest.mark.parametrize(
    "hook",
    [
        lambda gradient: gradient.clamp(-0.01, 0.01),
        lambda gradient: 0.1 * gradient / gradient.norm(dim=1, keepdim=True),
        lambda gradient: -gradient,
    ],
)
def test_a_hook_that_changes_rows_of_shards_for_themselves_is_right(hook):
    found = train(vit_with(hook), [image_batch(4)] * 2, tp_size=2, **SHARDED)
    assert_near(found["weights"], train(vit_with(hook), [image_batch(4)] * 2)["weights"], 1e-6)
