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


@pytest.mark.parametrize(
    "settings",
    [{}, {"dp_size": 2}, {"precision": "bf16"}, {"zero_stage": 2, "dp_size": 2}, {"zero_stage": 3, "dp_size": 2}],
)
def test_gradients_that_are_set_to_zeros_are_updated_as_in_torch(settings):
    """By momentum and decay, where a step does not use a parameter; until they are set to None."""
    clears = [False, False, True, False]
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(4, 4, generator=generator) for _ in clears]

    plain = Seldom()
    expected = []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.5)
    for number, (x, set_to_none) in enumerate(zip(given, clears, strict=True)):
        plain(x, number == 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        expected.append(weights_of(plain))

    def run():
        layout = {name: value for name, value in settings.items() if name != "dp_size"}
        make = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
        sample = {"x": given[0][:1], "uses_all": True}
        booster, model, optimizer = boosted(Seldom(), make, sample, **layout)
        found = []
        for number, (x, set_to_none) in enumerate(zip(given, clears, strict=True)):
            part = replica_part({"x": x}, booster.plugin.layout.here.dp, settings.get("dp_size", 1))
            batch = {"uses_all": number == 0, **part}
            booster.execute_pipeline(iter([batch]), model, lambda y, _: y.square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            with booster.unsharded(model):
                found.append({name: weight.float() for name, weight in weights_of(model).items()})
        return found

    for found in Loopback(settings.get("dp_size", 1)).run(run):
        for there, here in zip(expected, found, strict=True):
            assert_near(here, there, 2e-2 if "precision" in settings else 1e-6)
        moved = [not torch.equal(one["seldom.weight"], two["seldom.weight"]) for one, two in itertools.pairwise(found)]
        assert moved == [True, True, False]
        assert torch.equal(found[0]["never.weight"], found[-1]["never.weight"])
