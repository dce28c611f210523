"""model.zero_grad() between two calls drops the gradients of the first, also where parameter.grad is None."""

from copy import deepcopy

import pytest
from plugins.zero_models import batches, on_layout, step, weights_of, without_dropout
from support import assert_same

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
