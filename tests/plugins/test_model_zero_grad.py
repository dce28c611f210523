"""model.zero_grad() between two calls drops the gradients of the first, also where parameter.grad is None."""

import functools
import itertools
from copy import deepcopy

import pytest
import torch
from plugins.zero_models import batches, on_layout, step, weights_of, without_dropout
from support import assert_near, assert_same, boosted, replica_part
from torch import nn

from hybridpp.cluster import Loopback

HIDDEN = [{"precision": "bf16"}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3, "precision": "fp16"}]


@pytest.mark.parametrize(
    ("settings", "set_to_none"),
    [*((mode, True) for mode in [{}, *HIDDEN[::2]]), *((mode, False) for mode in HIDDEN[1::2])],
)
def test_it_drops_what_has_added_up(settings, set_to_none):
    def run(clears):
        def steps(booster, model, optimizer):
            for batch in batches(2, 16):
                if clears:
                    step(booster, model, optimizer, batch.flip(0))
                    model.zero_grad(set_to_none)
                step(booster, model, optimizer, batch)
                optimizer.step()
            with booster.unsharded(model):
                return weights_of(model)

        return on_layout(steps, dp_size=2, pp_size=2, make_model=without_dropout, **settings)

    for expected, actual in zip(run(clears=False), run(clears=True), strict=True):
        assert_same(actual, expected)


def test_a_copy_has_its_own_and_unboost_gives_the_models_own_back():
    def run(booster, model, optimizer):
        copy = deepcopy(model)
        step(booster, model, optimizer, batches(1, 16)[0])
        before = dict(optimizer.gradients())
        copy.zero_grad()
        assert_same(dict(optimizer.gradients()), before)
        booster.unboost(model)
        assert "zero_grad" not in vars(model)

    on_layout(run, dp_size=2, make_model=without_dropout, precision="bf16")


class Seldom(nn.Module):
    """Uses one of its layers only where it is told to; the other layer never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.seldom, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, uses_all):
        x = self.always(x)
        return x + self.seldom(x) if uses_all else x


def weights_by_step(clears, make, **settings):
    """Those of torch, and those of each rank, after every step, behind which ``clears`` are called."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(4, 4, generator=generator) for _ in clears]

    plain = Seldom()
    expected = []
    optimizer = make(plain.parameters())
    for number, (x, clear) in enumerate(zip(given, clears, strict=True)):
        plain(x, number == 0).square().mean().backward()
        optimizer.step()
        clear(plain, optimizer)
        expected.append(weights_of(plain))

    def run():
        layout = {name: value for name, value in settings.items() if name != "dp_size"}
        sample = {"x": given[0][:1], "uses_all": True}
        booster, model, optimizer = boosted(Seldom(), make, sample, **layout)
        found = []
        for number, (x, clear) in enumerate(zip(given, clears, strict=True)):
            part = replica_part({"x": x}, booster.plugin.layout.here.dp, settings.get("dp_size", 1))
            batch = {"uses_all": number == 0, **part}
            booster.execute_pipeline(iter([batch]), model, lambda y, _: y.square().mean(), optimizer)
            optimizer.step()
            clear(model, optimizer)
            with booster.unsharded(model):
                weights = model.state_dict() if "tp_size" in settings else weights_of(model)
                found.append({name: weight.float().clone() for name, weight in weights.items()})
        return found

    return expected, Loopback(settings.get("dp_size", 1) * settings.get("tp_size", 1)).run(run)


@pytest.mark.parametrize(
    "settings",
    [{}, {"dp_size": 2}, {"precision": "bf16"}, {"zero_stage": 2, "dp_size": 2}, {"zero_stage": 3, "dp_size": 2}],
)
def test_gradients_that_are_set_to_zeros_are_updated_as_in_torch(settings):
    """By momentum and decay, where a step does not use a parameter; until they are set to None."""
    make = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
    clears = [lambda _, optimizer, to=to_none: optimizer.zero_grad(to) for to_none in (False, False, True, False)]
    expected, ranks = weights_by_step(clears, make, **settings)
    for found in ranks:
        for there, here in zip(expected, found, strict=True):
            assert_near(here, there, 2e-2 if "precision" in settings else 1e-6)
        moved = [not torch.equal(one["seldom.weight"], two["seldom.weight"]) for one, two in itertools.pairwise(found)]
        assert moved == [True, True, False]
        assert torch.equal(found[0]["never.weight"], found[-1]["never.weight"])


def drop_all(model, _):
    model.zero_grad()


def zero_model(model, _):
    model.zero_grad(set_to_none=False)


def zero_parts(model, _):
    for part in model.children():
        part.zero_grad(False)


def zero_tensors(model, _):
    for one in model.parameters():
        if one.grad is not None:
            one.grad.zero_()


def set_zeros(model, _):
    model.always.zero_grad()
    for one in model.seldom.parameters():
        one.grad = torch.zeros_like(one)


def zero_some(model, _):
    model.always.zero_grad()
    model.seldom.bias.grad = None
    if model.seldom.weight.grad is not None:
        model.seldom.weight.grad.detach().mul_(0)


def drop_part_after_zeros(model, optimizer):
    optimizer.zero_grad(set_to_none=False)
    model.seldom.zero_grad()


def zero_after_drop_of_part(model, optimizer):
    model.seldom.zero_grad()
    optimizer.zero_grad(set_to_none=False)


def by_optimizer(_, optimizer):
    optimizer.zero_grad(set_to_none=False)


def zero_data(model, _):
    for one in model.parameters():
        if one.grad is not None:
            one.grad.data.zero_()


ZEROS = [zero_data, zero_model, zero_parts, zero_tensors, set_zeros, zero_some]
MIXED = [
    [zero_model, zero_model, drop_all, zero_model],
    [by_optimizer, drop_all, zero_model, by_optimizer],
    [by_optimizer, drop_part_after_zeros, zero_model, by_optimizer],
    [zero_after_drop_of_part, zero_model, by_optimizer, drop_all],
]


def moved(steps):
    """Which weights have changed in each step."""
    return [{name: not torch.equal(one[name], two[name]) for name in one} for one, two in itertools.pairwise(steps)]


LAYOUTS = [{}, {"dp_size": 2}, {"tp_size": 2}, {"num_microbatches": 2}]
DIVIDED = [{"precision": "bf16"}, {"precision": "fp16"}, *({"zero_stage": stage, "dp_size": 2} for stage in (1, 2, 3))]


@pytest.mark.parametrize("settings", [*LAYOUTS, *DIVIDED], ids=str)
@pytest.mark.parametrize("clears", [*([one] * 4 for one in ZEROS), *MIXED], ids=lambda made: made[1].__name__)
def test_gradients_that_the_script_sets_to_zeros_count(clears, settings):
    """By momentum and decay, as in torch, also if the model or a part of it sets them, until they are None."""
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    expected, ranks = weights_by_step(clears, make, **settings)
    for found in ranks:
        for there, here in zip(expected, found, strict=True):
            assert_near(here, there, 2e-2 if "precision" in settings else 1e-6)
        if settings.get("precision") != "bf16":  # which rounds small changes away
            assert moved(found) == moved(expected)


@pytest.mark.parametrize("settings", [*LAYOUTS, *DIVIDED], ids=str)
@pytest.mark.parametrize("of_model", [False, True])
def test_zeros_between_a_pass_and_a_step_are_those_of_the_step(of_model, settings):
    """As a script drops a bad batch: momentum and decay act, as in torch."""
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    given = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(0))

    def steps(model, optimizer, run):
        for number, x in enumerate(given):
            optimizer.zero_grad()
            run(x, number == 0)
            if number == 2:
                (model if of_model else optimizer).zero_grad(set_to_none=False)
            optimizer.step()

    plain = Seldom()
    by_torch = make(plain.parameters())
    steps(plain, by_torch, lambda x, uses_all: plain(x, uses_all).square().mean().backward())
    layout, dp_size = {name: value for name, value in settings.items() if name != "dp_size"}, settings.get("dp_size", 1)

    def run():
        booster, model, optimizer = boosted(Seldom(), make, {"x": given[0][:1], "uses_all": True}, **layout)

        def in_pipeline(x, uses_all):
            part = replica_part({"x": x}, booster.plugin.layout.here.dp, dp_size)
            batch = {"uses_all": uses_all, **part}
            booster.execute_pipeline(iter([batch]), model, lambda y, _: y.square().mean(), optimizer)

        steps(model, optimizer, in_pipeline)
        with booster.unsharded(model):
            return {name: one.float().clone() for name, one in model.state_dict().items()}

    for found in Loopback(dp_size * settings.get("tp_size", 1)).run(run):
        assert_near(found, weights_of(plain), 2e-2 if "precision" in settings else 1e-6)


def decayed(model):
    for one in model.parameters():
        if one.grad is not None:
            one.grad = one.grad + 0.1 * one.detach()


def filled(model):
    for one in model.parameters():
        if one.grad is None:
            one.grad = torch.zeros_like(one)
        one.grad.add_(one.detach(), alpha=0.1)


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
@pytest.mark.parametrize("change", [decayed, filled])
def test_a_gradient_that_no_pass_has_reached_is_none(change, settings):
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    given = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    plain = Seldom()
    optimizer = make(plain.parameters())
    for number, x in enumerate(given):
        optimizer.zero_grad()
        plain(x, number == 0).square().mean().backward()
        change(plain)
        optimizer.step()
    layout, dp_size = {name: value for name, value in settings.items() if name != "dp_size"}, settings.get("dp_size", 1)

    def run():
        booster, model, optimizer = boosted(Seldom(), make, {"x": given[0][:1], "uses_all": True}, **layout)
        for number, x in enumerate(given):
            optimizer.zero_grad()
            part = replica_part({"x": x}, booster.plugin.layout.here.dp, dp_size)
            batch = {"uses_all": number == 0, **part}
            booster.execute_pipeline(iter([batch]), model, lambda y, _: y.square().mean(), optimizer)
            assert model.never.weight.grad is None
            assert (model.seldom.weight.grad is None) == bool(number)
            change(model)
            optimizer.step()
        return {name: one.float().clone() for name, one in model.state_dict().items()}

    for found in Loopback(dp_size * settings.get("tp_size", 1)).run(run):
        assert_near(found, weights_of(plain), 1e-6)
