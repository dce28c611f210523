"""Hybrid sharding: sets of neighbouring replicas divide what ZeRO divides, and train as all together do."""

from functools import partial
from math import prod

import pytest
import torch
from plugins.zero_models import (
    SAMPLE,
    TiedModel,
    batches,
    cross_entropy,
    on_layout,
    step,
    two_groups,
    weights_of,
    without_dropout,
)
from processes import run_ranks
from run_checkpoints import on_layout as on_run_layout
from run_checkpoints import tensors_in
from support import assert_near, assert_same

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.checkpoint.commit import open_step
from hybridpp.errors import ConfigError

EXACT = [{"zero_stage": stage, "zero_reduce": None if stage == 1 else "step"} for stage in (1, 2, 3)]
BY_MICROBATCH = [{"zero_stage": 2}, {"zero_stage": 3}]

# Adam's first steps make the rounding of gradients near zero as large as any other.
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def trained(booster, model, optimizer):
    """Losses, weights and the norm after two steps, the first of which adds up gradients of three calls."""
    losses, (first, second, third), [last] = [], batches(3, 8), batches(1, 9)
    for batch in (first, second):
        losses.append(step(booster, model, optimizer, batch))
    with booster.no_sync(model):
        losses.append(step(booster, model, optimizer, third))
    losses.append(step(booster, model, optimizer, last))  # replicas have different numbers of micro-batches
    optimizer.step()
    losses.append(step(booster, model, optimizer, first))
    optimizer.step()
    with booster.unsharded(model):
        return losses, weights_of(model), optimizer.get_grad_norm()


@pytest.mark.parametrize(
    ("pp_size", "precision"), [(1, "fp32"), (2, "fp32"), (1, "fp16"), pytest.param(2, "fp16", marks=pytest.mark.matrix)]
)
def test_training_is_that_of_replicas_that_divide_nothing(pp_size, precision):
    layout = {"dp_size": 4, "pp_size": pp_size, "precision": precision, "make_optimizer": SGD}
    layout |= {"microbatch_size": 2, "num_microbatches": None}
    plain = on_layout(trained, **layout)
    is_full = precision == "fp32" and pp_size == 1
    modes = EXACT if is_full else [EXACT[0], EXACT[2]]
    exact = [on_layout(trained, zero_size=2, **mode, **layout) for mode in modes]
    near = [on_layout(trained, zero_size=2, **mode, **layout) for mode in BY_MICROBATCH if is_full]
    for results in [*exact, *near]:
        for (losses, weights, norm), expected, first in zip(results, plain, results[:pp_size] * 4, strict=True):
            tolerance = 2e-6 if precision == "fp32" else 1e-3
            assert losses == pytest.approx(expected[0], rel=10 * tolerance)
            assert norm == pytest.approx(expected[2], rel=10 * tolerance)
            assert_near(weights, expected[1], tolerance)
            # Copies have the same bits.
            assert_same(weights, first[1])
    for results in exact[1:]:
        for (losses, weights, norm), expected in zip(results, exact[0], strict=True):
            assert losses == expected[0]
            assert norm == pytest.approx(expected[2], rel=1e-12)
            assert_same(weights, expected[1])


def in_steps(booster, model, optimizer):
    losses = []
    for batch in batches(2, 16):
        losses.append(step(booster, model, optimizer, batch))
        optimizer.step()
    with booster.unsharded(model):
        return losses, weights_of(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stages_and_host_memory_have_the_same_bits(precision):
    layout = {"dp_size": 4, "zero_size": 2, "precision": precision}
    modes = [*EXACT, {"zero_stage": 1, "offload_optimizer": 1.0}]
    [first, *others] = (on_layout(in_steps, **layout, **mode) for mode in modes)
    for results in others:
        for (losses, weights), expected in zip(results, first, strict=True):
            assert losses == expected[0]
            assert_same(weights, expected[1])


def test_one_process_gives_the_same_to_rounding():
    settings = {"make_model": without_dropout, "make_optimizer": SGD}
    [(_, alone)] = on_layout(in_steps, dp_size=1, num_microbatches=1, **settings)
    for _, weights in on_layout(in_steps, dp_size=4, num_microbatches=1, zero_stage=3, zero_size=2, **settings):
        assert_near(weights, alone, 1e-6)


@pytest.mark.parametrize(("zero_size", "same"), [(1, {}), (4, {"zero_stage": 2}), (None, {"zero_stage": 2})])
def test_a_set_of_one_divides_nothing_and_a_set_of_all_everything(zero_size, same):
    results = on_layout(in_steps, dp_size=4, zero_stage=2, zero_size=zero_size)
    for (losses, weights), expected in zip(results, on_layout(in_steps, dp_size=4, **same), strict=True):
        assert losses == expected[0]
        assert_same(weights, expected[1])


def test_an_overflow_in_one_set_skips_the_step_on_all():
    def run(booster, model, optimizer):
        step(booster, model, optimizer, batches(1, 16)[0])
        optimizer.step()
        with booster.unsharded(model):
            before = weights_of(model)
        scale, is_last = optimizer.loss_scale, booster.plugin.layout.here.dp == 3

        def criterion(logits, tokens):
            return cross_entropy(logits, tokens) * (1e30 if is_last else 1)

        criterion.reduction = "mean"  # else that replicas make it in unlike ways is refused
        booster.execute_pipeline(iter([batches(1, 4)[0]]), model, criterion, optimizer)
        optimizer.step()
        with booster.unsharded(model):
            assert_same(weights_of(model), before)
        return scale / optimizer.loss_scale

    for mode in (EXACT[0], BY_MICROBATCH[1]):
        assert on_layout(run, dp_size=4, precision="fp16", zero_size=2, **mode) == [2.0] * 4


@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_run_goes_on_in_other_sets_and_each_piece_is_saved_once(pp_size, tmp_path):
    layouts = {
        "sets": {"dp_size": 4, "zero_stage": 3, "zero_size": 2, "pp_size": pp_size},
        "all": {"dp_size": 2, "zero_stage": 1},
        "sets again": {"dp_size": 4, "zero_stage": 2, "zero_size": 2, "pp_size": pp_size},
        "none": {"dp_size": 1},
    }

    def run(make, source, target):
        run = make()
        if source is None:
            run.steps([0, 1])
        else:
            assert run.booster.resume(tmp_path / source).step == 2
        run.booster.save(tmp_path / target, step=2)
        return run.steps([2])

    losses = {}
    for source, target in zip([None, *layouts], layouts, strict=False):
        losses[target] = on_run_layout(partial(run, source=source, target=target), **layouts[target])
    expected = tensors_in(tmp_path / "sets", 2)
    assert sum("/optimizer/" in key for key in expected) > 20
    for name in layouts:
        assert_same(tensors_in(tmp_path / name, 2), expected)
        for key, entry in open_step(tmp_path / name, 2).tensors.items():
            assert sum(prod(chunk.box.shape) for chunk in entry.chunks) == prod(entry.shape), key
    # The step after it, with the same weights and moments.
    numbers = [float.fromhex(loss) for [loss] in losses["sets"]]
    assert numbers == pytest.approx([float.fromhex(loss) for [loss] in losses["sets again"]], rel=1e-6)


def _on_processes(settings):
    booster, model = Booster(plugin=HybridParallelPlugin(num_microbatches=2, max_norm=0.5, **settings)), TiedModel()
    parts = booster.boost(model, two_groups(model.parameters()), criterion=cross_entropy, sample=SAMPLE)
    return in_steps(booster, parts.model, parts.optimizer)


def test_processes_train_as_ranks_of_one_process():
    settings = {"zero_stage": 3, "zero_size": 2, "zero_reduce": "step"}
    there = run_ranks(partial(_on_processes, settings), 4)
    here = on_layout(in_steps, dp_size=4, num_microbatches=2, **settings)
    for (losses, weights), expected in zip(there, here, strict=True):
        assert losses == expected[0]
        assert_same(weights, expected[1])


def test_sizes_that_do_not_divide_the_replicas_are_refused():
    text = "^zero_size must divide the number of replicas: got zero_size=3 with 4 replicas. Use 1, 2 or 4, or leave it"
    with pytest.raises(ConfigError, match=text):
        on_layout(in_steps, dp_size=4, zero_stage=1, zero_size=3)
