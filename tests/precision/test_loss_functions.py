"""Losses that a half-precision model computes itself are computed in fp32, wherever it does so, and nothing else is."""

import copy
import re

import pytest
import torch
from copies import copied
from divided_models import SIZES, token_batch
from support import assert_near, assert_same, boosted, image_batch, in_half, sgd, tiny_vit, train
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM

from hybridpp import HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError
from hybridpp.precision.function_casts import FunctionCasts
from hybridpp.precision.loss_functions import LOSS_FUNCTIONS

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
BATCHES = [image_batch(4, seed) for seed in range(2)]


def from_logits(outputs, inputs):
    return functional.cross_entropy(outputs.logits, inputs["labels"])


@pytest.mark.covering
@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("layout", [{}, {"pp_size": 2}, {"pp_size": 2, "schedule": "zb-v"}, {"dp_size": 2}], ids=str)
def test_a_models_own_loss_is_that_of_its_logits_in_fp32(precision, layout):
    settings = {"precision": precision, "num_microbatches": 2, **layout}
    expected = train(tiny_vit, BATCHES, criterion=from_logits, **settings)
    found = train(tiny_vit, BATCHES, **settings)
    assert found["losses"] == expected["losses"]
    assert_same(found["gradients"], expected["gradients"])
    assert_same(found["weights"], expected["weights"])
    assert train(tiny_vit, BATCHES, fp32_losses=False, **settings)["losses"] != expected["losses"]


def whole(make_model, batch, dtype):
    """Loss in fp32 and gradients of half a model in one process and plain torch."""
    model = in_half(make_model(), dtype)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    loss = functional.cross_entropy(model(**inputs).logits.flatten(0, -2).float(), batch["labels"].flatten())
    loss.backward()
    return loss.item(), {name: parameter.grad.float() for name, parameter in model.named_parameters()}


def test_one_process_gives_plain_torchs_bits():
    loss, gradients = whole(tiny_vit, BATCHES[0], torch.bfloat16)
    found = train(tiny_vit, BATCHES[:1], precision="bf16")
    assert found["losses"] == [[loss]]
    assert_same(found["gradients"], gradients)


@copied
def bert():
    """Its head is tied to the embedding."""
    torch.manual_seed(0)
    dropout = dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0)
    return BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=8, **dropout)).train()


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"tp_size": 2, "pp_size": 2}], ids=str)
def test_logits_divided_by_vocabulary(layout):
    """BERT hands logits to the loss as they are; ranks that share layers round other sums."""
    loss, gradients = whole(bert, token_batch(), torch.bfloat16)
    plan = {"*.intermediate.dense": "column", "*.layer.?.output.dense": "row", "*.word_embeddings": "vocab"}
    found = train(bert, [token_batch()], precision="bf16", tensor_parallel_plan=plan, **layout)
    assert {torch.tensor(value).bfloat16().item() == value for (value,) in found["losses"]} == {False}
    assert [value for (value,) in found["losses"]] == pytest.approx([loss] * len(found["losses"]), rel=2e-3)
    gradients = {name: gradient for name, gradient in gradients.items() if name in found["gradients"]}
    assert_near(found["gradients"], gradients, 2e-2)


class Block(nn.Module):
    """Hands a loss of its own on beside the hidden state."""

    def __init__(self, loss):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.loss = loss

    def forward(self, x, losses):
        y = self.linear(x).tanh()
        own = functional.mse_loss(y, x) if self.loss == "function" else self.loss(y, x) if self.loss else losses * 0
        return y, losses + own


class Odd(nn.Module):
    """Computes losses in blocks, between them, in a checkpoint, and behind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(map(Block, ["function", "function", nn.L1Loss(), None]))
        self.last = nn.SmoothL1Loss()
        self.dtypes = []

    def forward(self, x, labels=None):
        losses = x.new_zeros(())
        for number, block in enumerate(self.blocks):
            x, losses = block(x, losses)
            if number == 1:
                losses = losses + functional.huber_loss(x, torch.zeros_like(x))
        if labels is not None:
            losses = losses + checkpoint(functional.l1_loss, x, labels, use_reentrant=False) + self.last(x, labels)
        self.dtypes.append(losses.dtype)
        return losses


def odd_loss(outputs, _):
    return outputs


def odd_oracle(batch):
    """The same with every loss in fp32: the weights are rounded, and so is what a block returns."""
    model = Odd()
    weights = {name: parameter.bfloat16().requires_grad_() for name, parameter in model.named_parameters()}
    x, labels = (value.bfloat16() for value in batch.values())
    losses = []
    for number in range(4):
        y = functional.linear(x, weights[f"blocks.{number}.linear.weight"], weights[f"blocks.{number}.linear.bias"])
        y = y.tanh()
        own = [functional.mse_loss] * 2 + [functional.l1_loss]
        losses += [kind(y.float(), x.float()) for kind in own[number : number + 1]]
        if number == 1:
            losses.append(functional.huber_loss(y.float(), torch.zeros_like(y.float())))
        x = y
    losses += [loss(x.float(), labels.float()) for loss in (functional.l1_loss, functional.smooth_l1_loss)]
    total = sum(losses)
    gradients = torch.autograd.grad(total, list(weights.values()))
    return total.item(), dict(zip(weights, map(Tensor.float, gradients), strict=True))


@pytest.mark.parametrize("layout", [{}, {"pp_size": 2}, {"pp_size": 4}], ids=str)
def test_losses_in_blocks_between_them_and_in_checkpoints(layout):
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(3, 4, generator=generator) for name in ("x", "labels")}
    loss, gradients = odd_oracle(batch)
    found = train(Odd, [batch], criterion=odd_loss, precision="bf16", **layout)
    # The blocks' sum of losses begins in half precision, with a zero.
    assert found["losses"][0] == pytest.approx([loss], rel=1e-6)
    assert_near(found["gradients"], gradients, 1e-2)
    recomputed = train(Odd, [batch], criterion=odd_loss, precision="bf16", gradient_checkpoint_config={}, **layout)
    assert_same(recomputed["gradients"], found["gradients"])


def start(make_model, sample, **settings):
    return boosted(make_model(), sgd, sample, **{"precision": "bf16", **settings})


def test_a_backward_by_hand_and_a_checkpointed_loss():
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(3, 4, generator=generator) for name in ("x", "labels")}

    def run():
        booster, model, optimizer = start(Odd, batch)
        loss = model(**batch)
        booster.backward(loss, optimizer)
        return loss.item(), dict(optimizer.gradients())

    ((loss, gradients),) = Loopback(1).run(run)
    expected, wanted = odd_oracle(batch)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_near(gradients, wanted, 1e-2)


def test_a_loss_that_comes_with_other_arguments_is_seen():
    batch = {name: torch.ones(3, 4) for name in ("x", "labels")}

    def run():
        class Plain(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

            def forward(self, x, labels=None):
                y = self.blocks(x)
                return y if labels is None else functional.mse_loss(y, labels)

        _, model, _ = start(Plain, batch)
        return [model(batch["x"]).dtype, model(**batch).dtype, model(batch["x"]).dtype, model(**batch).dtype]

    assert Loopback(1).run(run) == [[torch.bfloat16, torch.float32] * 2]


@pytest.mark.parametrize("with_labels", [True, False])
def test_units_and_backward_leave_the_mode_once_known_to_call_no_loss(with_labels, monkeypatch):
    batch = image_batch(2) if with_labels else {"pixel_values": image_batch(2)["pixel_values"]}
    calls = []

    def run():
        booster, model, optimizer = start(tiny_vit, batch)
        counts = []
        seen = type(losses_of(model)._mode).__torch_function__

        def counted(self, func, *rest):
            calls.append(func)
            return seen(self, func, *rest)

        monkeypatch.setattr(type(losses_of(model)._mode), "__torch_function__", counted)
        for _ in range(2):
            calls.clear()
            output = model(**batch)
            if with_labels:
                booster.backward(output.loss, optimizer)
            counts.append(len(calls))
        return counts

    ((first, second),) = Loopback(1).run(run)
    assert first > 100
    assert second == 0 if not with_labels else 0 < second < 15


def losses_of(model):
    """The keeper of a boosted model's losses, from one of its units."""
    forward = model.classifier.forward
    while not isinstance(getattr(forward.func, "__self__", None), FunctionCasts):
        forward = forward.args[-1]
    return forward.func.__self__


def test_in_fp32_and_where_told_otherwise_nothing_is_done():
    def run():
        found = []
        for settings in ({"precision": "fp32"}, {"fp32_losses": False}):
            booster, model, _ = start(tiny_vit, image_batch(2), **settings)
            found.append(
                (model(**image_batch(2)).loss.dtype, booster.plugin.describe_precision(model).splitlines()[-2])
            )
        return found

    ((full, full_row), (half, half_row)) = Loopback(1).run(run)[0]
    assert (full, half) == (torch.float32, torch.bfloat16)
    assert re.fullmatch(r"loss functions in the model +\| +\| float32 or wider", full_row)
    assert re.fullmatch(r"loss functions in the model +\| +\| dtype of the arguments", half_row)


def test_every_loss_function_of_torch_is_known():
    """A new one of torch's is to be looked at: all but those that hold a layer, too (torch 2.11 has none)."""
    named = {name for name in dir(functional) if name.endswith("loss") or "cross_entropy" in name or name == "kl_div"}
    assert {name for name in named if getattr(functional, name) not in LOSS_FUNCTIONS} == named & {
        "linear_cross_entropy"
    }


def test_a_copy_of_a_boosted_model_computes_its_losses_in_fp32_too():
    def run():
        _, model, _ = start(tiny_vit, image_batch(2))
        return copy.deepcopy(model)(**image_batch(2)).loss.dtype

    assert Loopback(1).run(run) == [torch.float32]


def test_a_word_is_no_switch():
    with pytest.raises(ConfigError, match=r"^fp32_losses must be True or False: got fp32_losses='no'\."):
        HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=2, precision="fp16", fp32_losses="no")
