"""fp32 and bf16: a gradient that is inf or NaN on one rank is refused or skipped by all, before any weight changes."""

import functools
import logging
import math
import re

import pytest
import torch
from divided_models import VIT
from support import assert_same, boosted, image_batch, model_loss, replica_part, sgd, small_vit

from hybridpp import HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError, NonFiniteGradientError

BATCH = image_batch(4)
REFUSED = (
    "the gradient norm is {kind}, so no weight was changed. The first inf or NaN: {report}. Check the inputs, the loss "
    "and the learning rate, or pass error_if_nonfinite=False to skip such steps."
)
CLIPPING, ALWAYS, SKIPPING = {"max_norm": 1.0}, {"error_if_nonfinite": True}, {"error_if_nonfinite": False}
momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def start(**settings):
    settings = {"pp_size": 2, "num_microbatches": 2, **settings}
    return boosted(small_vit(), momentum, image_batch(2), tensor_parallel_plan=VIT, **settings)


def spoil(model, name, value, on_rank):
    """A hook that makes the gradient of a parameter bad on one rank."""
    if current_world().rank == on_rank:
        return model.get_parameter(name).register_hook(lambda gradient: torch.full_like(gradient, value))
    return None


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def one_step(booster, model, optimizer):
    mine = replica_part(BATCH, booster.plugin.layout.here.dp, booster.plugin.dp_size)
    booster.execute_pipeline(iter([mine]), model, model_loss, optimizer)
    optimizer.step()


@pytest.mark.parametrize(
    ("precision", "tp_size", "bad_rank", "value", "settings"),
    [
        ("fp32", 1, 0, math.inf, CLIPPING),
        ("fp32", 1, 3, math.nan, ALWAYS),
        ("fp32", 2, 2, math.inf, ALWAYS),
        ("bf16", 2, 1, math.nan, CLIPPING),
        ("bf16", 1, 2, math.inf, ALWAYS),
    ],
)
def test_one_bad_gradient_is_refused_by_all_ranks_and_changes_no_weight(precision, bad_rank, tp_size, value, settings):
    def run():
        booster, model, optimizer = start(precision=precision, tp_size=tp_size, **settings)
        name = max(name for name, _ in model.named_parameters() if "layers" in name and "bias" in name)
        handle = spoil(model, name, value, bad_rank)
        before = weights(model)
        with pytest.raises(NonFiniteGradientError) as error:
            one_step(booster, model, optimizer)
        assert_same(weights(model), before)
        assert not optimizer.unwrap().state
        assert optimizer.skipped_steps == optimizer.applied_steps == 0
        if handle is not None:
            handle.remove()
        # The gradients were used up: what follows starts from zero.
        one_step(booster, model, optimizer)
        assert optimizer.applied_steps == 1
        assert all(bool(tensor.isfinite().all()) for tensor in weights(model).values())
        return str(error.value), name

    ranks = Loopback(4).run(run)
    (message,) = {message for message, _ in ranks}
    name = ranks[bad_rank][1]
    kind = "NaN" if math.isnan(value) else "infinite"
    found = f"the gradient of parameter {name!r} holds {'NaN' if math.isnan(value) else 'inf'}"
    # Of replicas, the sum shows it on each; in the second run it stands where it was made.
    report = message.partition("The first inf or NaN: ")[2].partition(". Check")[0]
    assert report.startswith(found)
    assert report.endswith(f"on rank {bad_rank}")
    assert message == REFUSED.format(kind=kind, report=report)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_with_bad_gradients_are_skipped_where_that_is_asked_for(precision, caplog):
    def run():
        booster, model, optimizer = start(precision=precision, **SKIPPING)
        one_step(booster, model, optimizer)
        before = weights(model)
        handle = spoil(model, "vit.layers.0.mlp.fc1.bias", math.nan, on_rank=0)
        for _ in range(2):
            one_step(booster, model, optimizer)
            assert optimizer.last_step_skipped
        assert_same(weights(model), before)
        if handle is not None:
            handle.remove()
        one_step(booster, model, optimizer)
        assert not optimizer.last_step_skipped
        return optimizer.applied_steps, optimizer.skipped_steps, optimizer.loss_scale, optimizer.overflow_report

    with caplog.at_level(logging.WARNING, logger="hybridpp"):
        first, second = Loopback(2).run(run)
    report = (
        "in the gradient of 'vit.layers.0.mlp.fc1.bias' on rank 0; its source was not searched: that is done at the "
        "1st, 10th, 100th, … skipped step"
    )
    assert first == second == (2, 2, 1.0, report)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        "[rank 0] the gradient norm is NaN: step skipped (1 steps so far, see optimizer.skipped_steps). The first inf "
        "or NaN: the gradient of parameter 'vit.layers.0.mlp.fc1.bias' holds NaN (stage 0, micro-batch 0) on rank 0"
    )


@pytest.mark.parametrize("settings", [{}, CLIPPING, ALWAYS])
def test_a_gradient_that_was_mended_by_hand_is_used(settings):
    def run():
        booster, model, optimizer = start(**settings)
        spoil(model, "vit.layers.0.mlp.fc1.bias", math.nan, on_rank=0)
        booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)
        for parameter in model.parameters():
            parameter.grad.nan_to_num_()
        optimizer.step()
        return optimizer.applied_steps, all(bool(tensor.isfinite().all()) for tensor in weights(model).values())

    assert Loopback(2).run(run) == [(1, True)] * 2


@pytest.mark.parametrize(
    ("call", "precision"),
    [
        ("get_grad_norm", "fp32"),
        ("get_grad_norm", "bf16"),
        ("clip_grad_by_norm", "bf16"),
        ("clip_grad_by_norm", "fp16"),
    ],
)
def test_a_norm_that_the_script_asks_for_guards_the_step(precision, call):
    def run():
        booster, model, optimizer = start(precision=precision)
        before = weights(model)
        spoil(model, "vit.layers.0.mlp.fc1.bias", math.inf, on_rank=0)
        booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)
        norm = optimizer.get_grad_norm() if call == "get_grad_norm" else optimizer.clip_grad_by_norm(1.0)
        assert norm == math.inf
        # Only one gradient is bad, also behind the attempt to clip.
        bad = [name for name, gradient in optimizer.gradients() if not bool(gradient.isfinite().all())]
        assert bad == (["vit.layers.0.mlp.fc1.bias"] if current_world().rank == 0 else [])
        if precision == "fp16":
            optimizer.step()
            assert optimizer.last_step_skipped
        else:
            with pytest.raises(NonFiniteGradientError, match="fc1"):
                optimizer.step()
        assert_same(weights(model), before)

    Loopback(2).run(run)


@pytest.mark.parametrize("settings", [CLIPPING, ALWAYS])
def test_backward_by_hand_says_what_it_knows(settings):
    def run():
        booster, model, optimizer = start(pp_size=1, **settings)
        spoil(model, "vit.layers.0.mlp.fc1.bias", math.nan, on_rank=0)
        booster.backward(model(**BATCH).loss, optimizer)
        with pytest.raises(NonFiniteGradientError) as error:
            optimizer.step()
        return str(error.value)

    report = {
        "max_norm": "in the gradient of 'vit.layers.0.mlp.fc1.bias' on rank 0; its source is not known, because "
        "calls by the script are not recorded: error_if_nonfinite=True records them",
        "error_if_nonfinite": "the gradient of parameter 'vit.layers.0.mlp.fc1.bias' holds NaN (stage 0, micro-batch "
        "0) on rank 0",
    }[next(iter(settings))]
    assert Loopback(1).run(run) == [REFUSED.format(kind="NaN", report=report)]


def test_fp16_always_skips():
    message = (
        "fp16 finds its loss scale by steps that overflow, and skips them: got error_if_nonfinite=True with "
        "precision='fp16'. Leave it out, or use precision='bf16'."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=1, precision="fp16", error_if_nonfinite=True)


def test_the_setting_is_a_switch_or_none():
    with pytest.raises(ConfigError, match="error_if_nonfinite must be True or False: got error_if_nonfinite='skip'"):
        HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=1, precision="fp32", error_if_nonfinite="skip")


@pytest.mark.parametrize("call", ["get_grad_norm", "clip_grad_by_norm", "clip_grad_by_value"])
def test_inside_no_sync_there_is_no_norm_of_all_replicas(call):
    arguments = () if call == "get_grad_norm" else (1.0,)

    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2))
        with booster.no_sync(model, optimizer):
            booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)
            message = f"{call} inside no_sync would use one replica's gradients only. Call it after the block."
            with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
                getattr(optimizer, call)(*arguments)
        getattr(optimizer, call)(*arguments)

    Loopback(2).run(run)
