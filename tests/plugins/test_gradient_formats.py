"""What the optimizer tells of gradients between backward and step, and in what format they travel."""

import functools
import re

import pytest
import torch
from support import (
    assert_near,
    assert_same,
    boosted,
    image_batch,
    in_half,
    model_loss,
    replica_part,
    sgd,
    small_vit,
    train,
)

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError, NonFiniteGradientError

HALF = ("fp16", "bf16")
adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
BATCH = image_batch(8)


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LOSS_SCALE = 256.0


def whole_gradients(precision="fp32", num_parts=1):
    """Of plain torch in one process: half-precision gradients of each part of the batch, from an fp32 loss."""
    scale = LOSS_SCALE if precision == "fp16" else 1.0
    model = small_vit() if precision == "fp32" else in_half(small_vit(), DTYPES[precision])
    sums = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    for part in (replica_part(BATCH, n, num_parts) for n in range(num_parts)):
        logits = model(part["pixel_values"].to(DTYPES[precision])).logits
        loss = torch.nn.functional.cross_entropy(logits.float(), part["labels"])
        gradients = torch.autograd.grad(loss * scale / num_parts, list(model.parameters()))
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total += gradient.float() / scale
    return sums


@pytest.mark.covering
@pytest.mark.parametrize("precision", ["fp32", *HALF])
@pytest.mark.parametrize(("pp_size", "dp_size"), [(1, 1), (2, 2)])
def test_gradients_are_unscaled_fp32_and_the_whole_batchs(precision, pp_size, dp_size):
    def run():
        booster, model, optimizer = boosted(
            small_vit(), sgd, image_batch(2), pp_size=pp_size, precision=precision, initial_scale=LOSS_SCALE
        )
        mine = replica_part(BATCH, booster.plugin.layout.here.dp, dp_size)
        booster.execute_pipeline(iter([mine]), model, model_loss, optimizer)
        gradients = dict(optimizer.gradients())
        assert set(gradients) == {name for name, _ in model.named_parameters()}
        assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
        optimizer.step()
        assert_same(dict(optimizer.gradients()), gradients)
        return gradients

    found = {}
    for rank in Loopback(pp_size * dp_size).run(run):
        found.update(rank)
    assert_near(found, whole_gradients(precision, num_parts=dp_size), 1e-6)


def test_behind_a_step_gradients_are_what_it_used():
    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2), precision="fp16", max_norm=0.01)
        booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)
        before = dict(optimizer.gradients())
        optimizer.step()
        factor = 0.01 / optimizer.get_grad_norm()
        assert factor < 1
        assert_near(dict(optimizer.gradients()), {name: g * factor for name, g in before.items()}, 1e-5)

    Loopback(1).run(run)


def test_a_parameter_that_nothing_reached_has_no_gradient():
    def run():
        model = small_vit()
        model.never = torch.nn.Parameter(torch.ones(2))
        booster, model, optimizer = boosted(model, sgd, image_batch(2), precision="bf16")
        assert list(optimizer.gradients()) == []
        booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)
        assert {name for name, _ in optimizer.gradients()} == {name for name, _ in model.named_parameters()} - {"never"}
        optimizer.zero_grad()
        assert list(optimizer.gradients()) == []

    Loopback(1).run(run)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_leaves_what_torchs_leaves(set_to_none):
    """Between calls that add up, too: what came before it is forgotten."""

    def run(forgets):
        booster, model, optimizer = boosted(small_vit(), adamw, image_batch(2), pp_size=2)
        if forgets:
            booster.execute_pipeline(iter([image_batch(4, 1)]), model, model_loss, optimizer)
            optimizer.zero_grad(set_to_none=set_to_none)
            left = [parameter.grad for parameter in model.parameters()]
            assert all(gradient is None if set_to_none else not gradient.any() for gradient in left)
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            if set_to_none:
                optimizer.step()
            assert_same(model.state_dict(), before)
        booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)
        optimizer.step()
        return model.state_dict()

    expected = Loopback(2).run(lambda: run(forgets=False))
    for found, wanted in zip(Loopback(2).run(lambda: run(forgets=True)), expected, strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize("precision", ["fp32", *HALF])
def test_a_loop_that_never_calls_zero_grad_trains_like_one_that_does(precision):
    def run(clears):
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2), pp_size=2, precision=precision)
        for seed in range(3):
            if clears:
                optimizer.zero_grad()
            booster.execute_pipeline(iter([image_batch(4, seed)]), model, model_loss, optimizer)
            optimizer.step()
        return model.state_dict()

    cleared = Loopback(2).run(functools.partial(run, True))
    for plain, other in zip(Loopback(2).run(functools.partial(run, False)), cleared, strict=True):
        assert_same(plain, other)


@pytest.mark.parametrize("precision", ["fp32", *HALF])
def test_clipping_by_value_is_torchs(precision):
    limit = 2e-3
    clipped = {name: gradient.clamp(-limit, limit) for name, gradient in whole_gradients(precision).items()}

    def run():
        booster, model, optimizer = boosted(
            small_vit(), sgd, image_batch(2), pp_size=2, precision=precision, initial_scale=LOSS_SCALE
        )
        booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)
        optimizer.clip_grad_by_value(limit)
        return dict(optimizer.gradients()), optimizer.get_grad_norm()

    (first, norm), (last, same) = Loopback(2).run(run)
    assert norm == same
    assert_near({**first, **last}, clipped, 1e-7)
    assert norm == pytest.approx(torch.nn.utils.get_total_norm(clipped.values()).item(), rel=1e-5)


@pytest.mark.parametrize("given", ["bf16", "fp16", torch.bfloat16])
def test_gradients_may_travel_between_replicas_in_half_precision(given):
    exact = train(small_vit, [BATCH], dp_size=2, pp_size=2)["gradients"]
    rounded = train(small_vit, [BATCH], dp_size=2, pp_size=2, communication_dtype=given)["gradients"]
    assert_near(rounded, exact, 1e-2)
    assert any(not torch.equal(rounded[name], exact[name]) for name in exact)


@pytest.mark.parametrize("given", ["fp32", torch.float32, None])
def test_gradients_travel_in_the_fp32_they_are_added_up_in(given):
    exact = train(small_vit, [BATCH], dp_size=2)["gradients"]
    assert_same(train(small_vit, [BATCH], dp_size=2, communication_dtype=given)["gradients"], exact)


def test_an_unknown_communication_dtype_is_refused():
    message = "communication_dtype must be one of fp32, fp16, bf16, or None: got 'int8'."
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=1, communication_dtype="int8")


def test_gradients_of_backward_by_hand():
    def run():
        model = small_vit()
        optimizer = sgd(model.parameters())
        settings = {"precision": "fp16", "initial_scale": LOSS_SCALE}
        plugin = HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=1, **settings)
        booster = Booster(plugin=plugin, device="cpu")
        model, optimizer, *_ = booster.boost(model, optimizer)
        booster.backward(model(**BATCH).loss, optimizer)
        return dict(optimizer.gradients())

    assert_near(Loopback(1).run(run)[0], whole_gradients("fp16"), 1e-6)


@pytest.mark.parametrize("precision", ["fp32", *HALF])
def test_unscaling_changes_nothing_but_the_scale(precision):
    """Also between calls that add up."""

    def run(unscales):
        settings = {"pp_size": 2, "precision": precision, "initial_scale": LOSS_SCALE, "max_norm": 0.05}
        booster, model, optimizer = boosted(small_vit(), adamw, image_batch(2), **settings)
        for _ in range(2):
            for seed in range(2):
                booster.execute_pipeline(iter([image_batch(4, seed)]), model, model_loss, optimizer)
                before = dict(optimizer.gradients())
                if unscales:
                    optimizer.unscale_grad()
                    optimizer.unscale_grad()
                assert_same(dict(optimizer.gradients()), before)
            norm = optimizer.get_grad_norm()
            optimizer.step()
        return model.state_dict(), norm

    plain, unscaled = Loopback(2).run(lambda: run(False)), Loopback(2).run(lambda: run(True))
    for (expected, norm), (found, same) in zip(plain, unscaled, strict=True):
        assert_same(found, expected)
        assert same == norm


def test_clipping_takes_what_scripts_of_this_kind_pass():
    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(2))
        booster.execute_pipeline(iter([BATCH]), model, model_loss, optimizer)
        norm = optimizer.clip_grad_by_norm(0.01, norm_type=2.0, error_if_nonfinite=True)
        assert norm > 0.01
        assert optimizer.get_grad_norm() == pytest.approx(0.01, rel=1e-3)
        with pytest.raises(
            ConfigError, match=r"^only the 2-norm is supported: got norm_type=1\. Leave norm_type out\.$"
        ):
            optimizer.clip_grad_by_norm(0.01, 1)
        next(model.parameters()).grad.fill_(float("inf"))
        with pytest.raises(NonFiniteGradientError, match="the gradient norm is infinite"):
            optimizer.clip_grad_by_norm(0.01, error_if_nonfinite=True)

    Loopback(1).run(run)
