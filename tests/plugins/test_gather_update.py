"""unboost where replicas divide the model and its optimizer: each gets back all of both."""

import re
from functools import cache, partial

import pytest
import torch
from plugins.test_unboost import MODELS, differences, everything
from plugins.zero_models import TiedModel, Torn, batches, cross_entropy, on_layout, step, two_groups, weights_of
from processes import run_ranks
from support import assert_same, boosted, sgd
from torch import optim

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

MODES = [
    {"zero_stage": 1},
    {"zero_stage": 2, "precision": "bf16"},
    {"zero_stage": 3, "zero_reduce": "step"},
    {"zero_stage": 3, "zero_reduce": "step", "precision": "bf16", "offload_optimizer": 0.5},
    {"zero_stage": 3, "zero_reduce": "step", "zero_size": 2, "dp_size": 4},
]


def by_name(optimizer, model):
    """The optimizer's groups, and the tensors of its state, by the parameter's name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    state = {
        f"{names[id(parameter)]} {key}": torch.as_tensor(value).clone()
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }
    return groups, state


def train_and_unboost(booster, model, optimizer, num_steps=2):
    for batch in batches(num_steps, 24):
        step(booster, model, optimizer, batch)
        optimizer.step()
    assert booster.unboost(model) is model
    return weights_of(model), *by_name(optimizer.unwrap(), model)


without_zero = cache(on_layout)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_weights_groups_and_state_are_those_of_training_without_it(mode):
    layout = {
        "make_model": Torn,
        "dp_size": 3,
        **{key: value for key, value in mode.items() if key in ("dp_size", "precision")},
    }
    # A size of sets, and reductions by micro-batch, add in other orders.
    is_exact = mode["zero_stage"] != 2 and "zero_size" not in mode
    plain = without_zero(train_and_unboost, **layout)
    for (weights, groups, state), expected in zip(
        on_layout(train_and_unboost, **layout, **{key: mode[key] for key in mode if key not in layout}),
        plain,
        strict=True,
    ):
        assert groups == expected[1]
        assert list(state) == list(expected[2])
        if is_exact:
            assert_same(weights, expected[0])
            assert_same(state, expected[2])
        else:
            assert max((weights[name] - expected[0][name]).abs().max() for name in weights) < 0.02


def matrices(make, parameters):
    return make([parameter for parameter in parameters if parameter.dim() == 2 and parameter.requires_grad])


def only_matrices():
    model = TiedModel()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return model


class Blocked(optim.SGD):
    """Keeps the largest gradient of every four elements, as optimizers with quantised states do, after a warm-up."""

    warmup = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and self.num_steps > self.warmup:
                    most = torch.nn.functional.pad(p.grad.flatten().abs(), (0, -p.numel() % 4)).view(-1, 4).amax(1)
                    self.state[p]["most"] = most
        return super().step()


OPTIMIZERS = {
    "Adafactor": (partial(optim.Adafactor, lr=0.01), TiedModel),
    "Muon": (partial(matrices, partial(optim.Muon, lr=0.01)), only_matrices),
    "ASGD": (partial(optim.ASGD, lr=0.01), TiedModel),
    "of blocks": (partial(Blocked, lr=0.01), Torn),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_is_not_of_the_parameters_shape_comes_along(name):
    make_optimizer, make_model = OPTIMIZERS[name]
    parts = {"make_optimizer": make_optimizer, "make_model": make_model, "dp_size": 3}
    plain = on_layout(train_and_unboost, **parts)
    for (weights, groups, state), expected in zip(
        on_layout(train_and_unboost, zero_stage=1, **parts), plain, strict=True
    ):
        assert_same(weights, expected[0])
        assert groups == expected[1]
        assert_same(state, expected[2])


@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=str)
def test_training_goes_on_in_plain_torch_or_boosted_again(mode):
    def run(again, booster, model, optimizer):
        train_and_unboost(booster, model, optimizer)
        plain = optimizer.unwrap()
        batch = batches(3, 16)[2]
        if again:
            _, optimizer, *_ = booster.boost(model, plain, criterion=cross_entropy, sample=batch[:2])
            step(booster, model, optimizer, batch)
            optimizer.step()
            with booster.unsharded(model):
                return weights_of(model)
        plain.zero_grad()
        cross_entropy(model.eval()(batch), batch).backward()
        plain.step()
        return weights_of(model)

    layout = {"dp_size": 2, "precision": mode.get("precision", "fp32")}
    zero = {key: mode[key] for key in mode if key != "precision"}
    for again in (False, True):
        plain = on_layout(partial(run, again), **layout)
        for actual, expected in zip(on_layout(partial(run, again), **layout, **zero), plain, strict=True):
            assert_same(actual, expected)


@pytest.mark.parametrize(("name", "stage"), [("lstm", 1), ("lstm", 3), ("tied", 2), ("llama", 3), ("convolutions", 1)])
def test_a_model_is_as_before_boost_but_for_its_weights(name, stage):
    make, batch, criterion = MODELS[name]

    def run():
        torch.manual_seed(0)
        model = make().train()
        before = everything(model)
        booster, _, optimizer = boosted(model, sgd, batch, precision="bf16", zero_stage=stage)
        booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        optimizer.step()
        booster.unboost(model)
        assert differences(before, everything(model)) == []
        return dict(model.state_dict())

    first, second = Loopback(2).run(run)
    assert_same(first, second)


class LateBlocked(Blocked):
    """Begins after the steps in which optimizers are tried at boost."""

    warmup = 25


def test_state_of_torn_parameters_that_cannot_be_joined_is_refused():
    def run(booster, model, optimizer):
        for _ in range(LateBlocked.warmup + 1):
            step(booster, model, optimizer, batches(1, 12)[0])
            optimizer.step()
        with pytest.raises(ConfigError) as refused:
            booster.unboost(model)
        step(booster, model, optimizer, batches(1, 12)[0])
        optimizer.step()
        return str(refused.value)

    text = (
        r"LateBlocked keeps 'most' of shape \(\d+,\) for a part of [\w.]+, from which that of the complete parameter "
        r"cannot be put together. Call booster.save_model, and load the folder into a new model."
    )
    for message in on_layout(
        run, dp_size=3, zero_stage=1, make_model=Torn, make_optimizer=partial(LateBlocked, lr=0.01)
    ):
        assert re.search(text, message)


def test_a_replica_whose_forward_the_script_has_set_is_named():
    def run(booster, model, optimizer):
        put = model.blocks[0].forward
        if booster.plugin.layout.here.dp == 1:
            model.blocks[0].forward = lambda *args: put(*args)
        with pytest.raises(ConfigError) as refused:
            booster.unboost(model)
        return str(refused.value)

    first, second = on_layout(run, dp_size=2, zero_stage=1)
    assert second.startswith("'forward' of module 'blocks.0' was set after boost")
    assert first == f"booster.unboost failed on rank 1: {second}"


def _on_processes(settings):
    booster, model = Booster(plugin=HybridParallelPlugin(num_microbatches=4, max_norm=0.5, **settings)), TiedModel()
    optimizer = two_groups(model.parameters())
    parts = booster.boost(model, optimizer, criterion=cross_entropy, sample=batches(1, 2)[0])
    return train_and_unboost(booster, parts.model, parts.optimizer)


def test_processes_get_the_bits_of_training_without_it():
    plain, zero = (run_ranks(partial(_on_processes, settings), 2) for settings in ({}, MODES[2]))
    for actual, expected in zip(zero, plain, strict=True):
        assert_same(actual[0], expected[0])
        assert_same(actual[2], expected[2])
