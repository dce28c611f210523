"""Masters and moments in host memory: the same bits, with every stage of ZeRO. What lies where: test_on_device.py."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from plugins.zero_models import SAMPLE, TiedModel, batches, cross_entropy, on_layout, step, two_groups, weights_of
from processes import run_ranks
from support import assert_same
from torch import optim

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import current_world
from hybridpp.errors import ConfigError

SMALL = {"ddp_bucket_cap_mb": 0.01, "microbatch_size": 2, "num_microbatches": None}


def trained(booster, model, optimizer, num_steps=3):
    losses = []
    for number, batch in enumerate(batches(num_steps, 12)):
        losses.append(step(booster, model, optimizer, batch[:11] if number == num_steps - 1 else batch))
        gradients = dict(optimizer.gradients())
        optimizer.step()
    return losses, weights_of(model), gradients, optimizer.get_grad_norm()


def on_host(booster, model, optimizer):
    """The parameters whose masters are in host memory, and all that are updated here."""
    engine = booster.plugin._engine(model)
    transfer = engine.masters.transfer
    updated = optimizer.target.tensors
    return {name for name in updated if transfer is not None and name in transfer}, set(updated)


LAYOUTS = {
    "alone": {"dp_size": 1},
    "dp2": {"dp_size": 2},
    "dp2 zero 1": {"dp_size": 2, "zero_stage": 1},
    "dp2 zero 2": {"dp_size": 2, "zero_stage": 2},
    "dp3 pp2 interleaved zero 1": {
        **{"dp_size": 3, "pp_size": 2, "zero_stage": 1, "schedule": "interleaved", "num_model_chunks": 2}
    },
    "dp2 tp2 zero 1": {"dp_size": 2, "tp_size": 2, "zero_stage": 1},
    "pp2 zb-v": {"dp_size": 1, "pp_size": 2, "schedule": "zb-v"},
}


@pytest.mark.covering
@pytest.mark.parametrize(
    ("layout", "precision", "share"),
    [(layout, "fp32", 0.4) for layout in LAYOUTS]
    + [("dp2 zero 1", "bf16", 0.4), ("dp2 zero 1", "fp16", 0.4), ("dp2 zero 2", "bf16", 0.4)]
    + [("dp2 zero 1", "fp32", 1.0), ("dp2", "bf16", 1.0), ("alone", "fp16", 1.0)],
)
def test_results_have_the_bits_of_training_without_it(layout, precision, share):
    settings = {"precision": precision, **SMALL, **LAYOUTS[layout]}
    plain = on_layout(trained, **settings)
    for expected, actual in zip(plain, on_layout(trained, offload_optimizer=share, **settings), strict=True):
        assert actual[0] == expected[0]
        assert_same(actual[1], expected[1])
        assert_same(actual[2], expected[2])
        assert actual[3] == expected[3]


@pytest.mark.parametrize(("share", "least", "most"), [(0, 0, 0), (0.01, 0.01, 0.5), (0.5, 0.5, 0.9), (1, 1, 1)])
def test_whole_buckets_make_up_the_share(share, least, most):
    for hosted, updated in on_layout(on_host, dp_size=2, zero_stage=1, offload_optimizer=share, **SMALL):
        sizes = {name: parameter.numel() for name, parameter in TiedModel().named_parameters()}
        part = sum(sizes[name] for name in hosted) / sum(sizes[name] for name in updated)
        assert least <= part <= most


OPTIMIZERS = {
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9),
    "fused AdamW": partial(optim.AdamW, lr=0.01, fused=True),
    "Adafactor": partial(optim.Adafactor, lr=0.01),
    "Adagrad": partial(optim.Adagrad, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_steps_there(name):
    layout = {"dp_size": 2, "zero_stage": 1, "make_optimizer": OPTIMIZERS[name], **SMALL}
    plain, moved = (on_layout(trained, offload_optimizer=share, **layout) for share in (0, 0.6))
    for expected, actual in zip(plain, moved, strict=True):
        assert_same(actual[1], expected[1])


def test_a_step_with_an_overflow_is_skipped():
    def run(booster, model, optimizer):
        before = weights_of(model)
        step(booster, model, optimizer, batches(1, 12)[0])
        optimizer.step()
        assert optimizer.last_step_skipped
        assert_same(weights_of(model), before)
        optimizer.loss_scaler.state = replace(optimizer.loss_scaler.state, scale=1.0)
        return trained(booster, model, optimizer, 2)[1]

    layout = {"dp_size": 2, "zero_stage": 1, "precision": "fp16", "initial_scale": 2.0**32, **SMALL}
    plain, moved = (on_layout(run, offload_optimizer=share, **layout) for share in (0, 1.0))
    for expected, actual in zip(plain, moved, strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_the_script_writes_are_trained_on(precision):
    def run(booster, model, optimizer):
        for batch in batches(2, 12):
            step(booster, model, optimizer, batch)
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        return trained(booster, model, optimizer, 2)[1]

    plain, moved = (on_layout(run, dp_size=2, precision=precision, offload_optimizer=s, **SMALL) for s in (0, 1.0))
    for expected, actual in zip(plain, moved, strict=True):
        assert_same(actual, expected)


@pytest.mark.covering("saved loaded")
@pytest.mark.parametrize(
    ("precision", "saved", "loaded"),
    [("fp32", 0.5, 0.5), ("fp32", 1.0, 0.0), ("fp32", 0.0, 1.0), ("bf16", 1.0, 0.0), ("bf16", 0.0, 1.0)],
)
def test_a_run_resumes_with_another_share(precision, saved, loaded, tmp_path):
    layout = {"dp_size": 2, "pp_size": 2, "zero_stage": 1, "precision": precision, **SMALL}

    def first(booster, model, optimizer):
        trained(booster, model, optimizer, 2)
        booster.save_model(model, tmp_path / "weights.safetensors")
        torch.save(optimizer.state_dict(), tmp_path / f"{current_world().rank}.pt")
        return trained(booster, model, optimizer, 2)[1]

    def second(booster, model, optimizer):
        booster.load_model(model, tmp_path / "weights.safetensors")
        optimizer.load_state_dict(torch.load(tmp_path / f"{current_world().rank}.pt"))
        return trained(booster, model, optimizer, 2)[1]

    expected = on_layout(first, offload_optimizer=saved, **layout)
    for before, after in zip(expected, on_layout(second, offload_optimizer=loaded, **layout), strict=True):
        assert_same(after, before)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_are_loaded_before_the_state_stay(precision):
    def run(booster, model, optimizer):
        trained(booster, model, optimizer, 1)
        state, weights = deepcopy(optimizer.state_dict()), weights_of(model)
        trained(booster, model, optimizer, 1)
        model.load_state_dict(weights, strict=False)
        optimizer.load_state_dict(state)
        assert_same(weights_of(model), weights)
        return trained(booster, model, optimizer, 1)[1]

    layout = {"dp_size": 1, "precision": precision, "make_optimizer": two_groups, **SMALL}
    [plain], [moved] = (on_layout(run, offload_optimizer=share, **layout) for share in (0, 1.0))
    assert_same(moved, plain)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_from_the_meta_device_trains_to_the_same_bits(precision, tmp_path):
    torch.save(TiedModel().state_dict(), tmp_path / "start.pt")

    def make_meta():
        with torch.device("meta"):
            return TiedModel()

    def run(booster, model, optimizer):
        booster.load_model(model, tmp_path / "start.pt")
        return trained(booster, model, optimizer, 2)[1]

    layout = {"dp_size": 2, "zero_stage": 1, "precision": precision, **SMALL}
    plain = on_layout(run, **layout)
    for expected, actual in zip(
        plain, on_layout(run, offload_optimizer=0.7, make_model=make_meta, **layout), strict=True
    ):
        assert_same(actual, expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_unboost_gives_the_model_and_the_optimizer_back(precision):
    def run(booster, model, optimizer):
        trained(booster, model, optimizer, 2)
        booster.unboost(model)
        plain = optimizer.unwrap()
        plain.zero_grad()
        cross_entropy(model.eval()(SAMPLE), SAMPLE).backward()
        plain.step()
        return weights_of(model)

    [plain], [moved] = (
        on_layout(run, dp_size=1, precision=precision, offload_optimizer=share, **SMALL) for share in (0, 1.0)
    )
    assert_same(moved, plain)


def _on_processes(share):
    plugin = HybridParallelPlugin(num_microbatches=2, zero_stage=1, max_norm=0.5, offload_optimizer=share)
    booster, model = Booster(plugin=plugin), TiedModel()
    parts = booster.boost(model, two_groups(model.parameters()), criterion=cross_entropy, sample=SAMPLE)
    return trained(booster, parts.model, parts.optimizer)[1]


def test_processes_give_the_bits_of_training_without_it():
    plain, moved = (run_ranks(partial(_on_processes, share), 2) for share in (0.0, 0.5))
    for expected, actual in zip(plain, moved, strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("share", [-0.5, 2, "half"])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match="offload_optimizer must be"):
        HybridParallelPlugin(offload_optimizer=share)
