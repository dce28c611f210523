"""After a backward by the script itself, the first inf or NaN is named as exactly as after `execute_pipeline`."""

import logging
import math
import re

import pytest
import torch
from divided_models import VIT, token_batch
from hybridpp_plugins import manual_forward
from nonfinite_ops import Through, spoilt
from support import assert_same, boosted, image_batch, model_loss, replica_part, sgd, small_vit, tiny_vit
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from hybridpp.cluster import Loopback, current_world

BATCH = image_batch(4)


def spoil_output(module, value):
    def hook(module, args, output):
        spike = torch.zeros_like(output)
        spike.view(-1)[0] = value
        return output + spike

    return module.register_forward_hook(hook)


def spoil_input_gradient(module, value):
    return module.register_forward_pre_hook(
        lambda module, args: (Through.apply(args[0], lambda gradient: spoilt(gradient, value)), *args[1:])
    )


def spoil_parameter(parameter, value):
    return parameter.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), value))


# What is spoilt, how, and what is found.
CASES = [
    ("vit.embeddings.dropout", spoil_output, "the output of 'vit.embeddings.dropout'"),
    ("vit.layers.1.mlp.fc1", spoil_output, "the output of 'vit.layers.1.mlp.fc1'"),
    ("vit.layers.2.attention.q_proj", spoil_output, "the output of 'vit.layers.2.attention.q_proj'"),
    ("classifier", spoil_output, "the output of 'classifier'"),
    ("vit.layers.0.mlp.fc1", spoil_input_gradient, "the gradient of the output of 'vit.layers.0.layernorm_after'"),
    ("vit.layers.3", spoil_input_gradient, "the gradient of the output of 'vit.layers.2'"),
    ("classifier", spoil_input_gradient, "the gradient of the output of 'vit.layernorm'"),
    *(
        (name, spoil_parameter, f"the gradient of parameter '{name}'")
        for name in ("vit.layers.1.layernorm_before.weight", "vit.layers.2.mlp.fc2.bias", "classifier.weight")
    ),
]


def own_loss(model, batch):
    return model(**batch).loss


def loss_of_logits(model, batch):
    logits = model(batch["pixel_values"]).logits
    return nn.functional.cross_entropy(logits.float(), batch["labels"])


@pytest.mark.covering
@pytest.mark.parametrize("make_loss", [own_loss, loss_of_logits])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_every_place_is_named(make_loss, value):
    def run():
        booster, model, optimizer = boosted(tiny_vit(0.1), sgd, image_batch(1), precision="fp16")
        texts = []
        for name, spoil, _ in CASES:
            optimizer.loss_scaler.skipped_steps = 0
            at = model.get_parameter(name) if spoil is spoil_parameter else model.get_submodule(name)
            handle = spoil(at, value)
            booster.backward(make_loss(model, BATCH), optimizer)
            optimizer.step()
            texts.append(optimizer.overflow_report)
            handle.remove()
        return texts

    kind = "NaN" if math.isnan(value) else "inf"
    for text, (_, _, expected) in zip(Loopback(1).run(run)[0], CASES, strict=True):
        assert text == f"{expected} holds {kind} (stage 0, micro-batch 0) on rank 0"


def test_a_gradient_that_overflows_by_the_loss_scale_is_located():
    """The loss is a thousand times the logit, of which fp16 holds no more than 65504 / 1000 / scale."""

    def run():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        booster, model, optimizer = boosted(model, sgd, torch.ones(1, 2), precision="fp16", initial_scale=2.0**10)
        booster.backward(1000 * model(torch.ones(1, 2)).float().sum(), optimizer)
        optimizer.step()
        return optimizer.overflow_report

    assert Loopback(1).run(run) == ["the gradient of the output of '1' holds inf (stage 0, micro-batch 0) on rank 0"]


def test_the_second_run_draws_the_same_random_numbers():
    def run():
        booster, model, optimizer = boosted(small_vit(0.5), sgd, image_batch(1), precision="fp16")
        seen = []

        def overflow(module, args, output):
            seen.append(output.detach().clone())
            return output * math.inf

        handle = model.vit.layers[1].mlp.fc2.register_forward_hook(overflow)
        booster.backward(own_loss(model, BATCH), optimizer)
        torch.rand(3)
        optimizer.step()
        handle.remove()
        return seen

    ((first, again),) = Loopback(1).run(run)
    assert torch.equal(first, again)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_ranks_agree_on_whose_it_was(tp_size, caplog):
    def run():
        booster, model, optimizer = boosted(
            small_vit(), sgd, image_batch(1), tp_size=tp_size, precision="fp16", tensor_parallel_plan=VIT
        )
        value = math.inf if current_world().rank == 1 else 0.0
        handle = spoil_parameter(model.vit.layers[1].mlp.fc1.weight, value)
        mine = replica_part(BATCH, booster.plugin.layout.here.dp, booster.plugin.dp_size)
        booster.backward(own_loss(model, mine), optimizer)
        optimizer.step()
        handle.remove()
        skipped = optimizer.overflow_report
        booster.backward(own_loss(model, mine), optimizer)
        optimizer.step()
        return skipped, optimizer.skipped_steps, optimizer.applied_steps

    with caplog.at_level(logging.WARNING, logger="hybridpp"):
        ranks = Loopback(2).run(run)
    text = "the gradient of parameter 'vit.layers.1.mlp.fc1.weight' holds inf (stage 0, micro-batch 0) on rank 1"
    assert ranks == [(text, 1, 1)] * 2
    assert any(record.getMessage().endswith(text) for record in caplog.records)


def test_logits_divided_by_vocabulary_stay_divided():
    """Looking out for the gradient of logits puts none together."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    plan = {"*.intermediate.dense": "column", "*.layer.?.output.dense": "row", "*.word_embeddings": "vocab"}

    def run():
        torch.manual_seed(0)
        model = BertForMaskedLM(BertConfig(**sizes, vocab_size=37, max_position_embeddings=8))
        settings = {"precision": "fp16", "tp_size": 2, "tensor_parallel_plan": plan, "initial_scale": 2.0**24}
        booster, model, optimizer = boosted(model, sgd, token_batch(1), **settings)
        output = model(**token_batch(2))
        gathered = output.logits._full is not None
        booster.backward(output.loss, optimizer)
        optimizer.step()
        return gathered, optimizer.overflow_report

    for gathered, text in Loopback(2).run(run):
        assert not gathered
        assert text.startswith("the gradient of the output of 'cls.predictions.decoder' holds inf (stage 0, ")


def test_what_cannot_be_found_is_said_and_the_parameter_named():
    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(1), precision="fp16")

        def overflow(make_loss, behind=lambda: None):
            optimizer.loss_scaler.skipped_steps = 0
            handle = spoil_parameter(model.classifier.bias, math.inf)
            booster.backward(make_loss(), optimizer)
            handle.remove()
            behind()
            optimizer.step()
            return optimizer.overflow_report

        batch = {name: value.half() if value.is_floating_point() else value for name, value in BATCH.items()}
        return [
            overflow(lambda: own_loss(model, BATCH)),
            overflow(lambda: own_loss(model, batch), lambda: batch["pixel_values"].add_(1)),
            overflow(lambda: model.classifier(torch.ones(1, 16).half()).sum()),
            overflow_twice(booster, model, optimizer),
        ]

    def overflow_twice(booster, model, optimizer):
        optimizer.loss_scaler.skipped_steps = 1
        handle = spoil_parameter(model.classifier.bias, math.inf)
        booster.backward(own_loss(model, BATCH), optimizer)
        handle.remove()
        optimizer.step()
        return optimizer.overflow_report

    head = "in the gradient of 'classifier.bias' on rank 0; its source "
    assert Loopback(1).run(run)[0] == [
        f"{head}is not known, because a second run of the recorded calls is finite, so it depends on something that is "
        "not reproducible",
        f"{head}is not known, because the batch was written to after the call on rank 0",
        f"{head}is not known, because the loss does not depend on an output of the boosted model on rank 0",
        f"{head}was not searched: that is done at the 1st, 10th, 100th, … skipped step",
    ]


def test_looking_changes_nothing_and_nothing_is_kept_behind_a_step():
    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        booster, model, optimizer = boosted(model, sgd, torch.ones(4, 4), precision="fp16")
        x = torch.randn(4, 4)

        def overflow(searches):
            optimizer.loss_scaler.skipped_steps = 0 if searches else 1
            handle = spoil_parameter(model[3].bias, math.inf)
            torch.manual_seed(1)
            booster.backward(model(x).float().square().mean(), optimizer)
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            random = torch.get_rng_state()
            optimizer.step()
            handle.remove()
            assert_same(model.state_dict(), before)
            assert torch.equal(torch.get_rng_state(), random)
            return dict(optimizer.gradients())

        assert_same(overflow(True), overflow(False))
        assert not optimizer.manual_calls.kept

    Loopback(1).run(run)


class OnlyIn:
    """A hook that spoils one call of several, by what it is given; so that a second run is spoilt as well."""

    def __init__(self, batch, spoil_backward):
        self.mark = batch["pixel_values"].half().double().sum()
        self.spoil_backward = spoil_backward

    def on(self, model):
        self.bad = False
        model.vit.embeddings.register_forward_pre_hook(self.look)
        model.vit.layers[1].mlp.fc1.register_forward_hook(self.spoil)

    def look(self, module, args):
        self.bad = bool(args[0].double().sum() == self.mark)

    def spoil(self, module, args, output):
        if not self.bad:
            return output
        return (
            Through.apply(output, lambda gradient: spoilt(gradient, math.inf))
            if self.spoil_backward
            else output * math.inf
        )


SEVERAL = [image_batch(4, seed=seed) for seed in range(3)]


@pytest.mark.covering("spoil_backward at_once")
@pytest.mark.parametrize("at_once", [False, True], ids=["a backward each", "one of the sum"])
@pytest.mark.parametrize("spoil_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("bad", "tp_size"), [(0, 1), (1, 1), (2, 1), (1, 2)])
def test_of_several_calls_the_one_that_overflowed_is_named(bad, tp_size, spoil_backward, at_once):
    def run():
        settings = {"tp_size": tp_size, "precision": "fp16", "tensor_parallel_plan": VIT}
        booster, model, optimizer = boosted(small_vit(0.1), sgd, image_batch(1), **settings)
        OnlyIn(SEVERAL[bad], spoil_backward).on(model)
        losses = [own_loss(model, batch) for batch in SEVERAL] if at_once else []
        for loss in [sum(losses)] if at_once else (own_loss(model, batch) for batch in SEVERAL):
            booster.backward(loss, optimizer)
        with torch.no_grad():
            model(**BATCH)
        optimizer.step()
        return optimizer.overflow_report

    # A gradient that overflows at a layer's output is seen at what was put in its place by a hook, which is next to it.
    gradient = r"the gradient of (the output of 'vit\.layers\.1\.(mlp\.fc1|layernorm_after)'|parameter \S+)"
    what = gradient if spoil_backward else r"the output of 'vit\.layers\.1\.mlp\.fc1'"
    for text in Loopback(tp_size).run(run):
        assert re.fullmatch(
            rf"{what} holds (inf|NaN) in call {bad + 1} of 3 \(stage 0, micro-batch 0\) on rank 0", text
        )


def test_calls_beyond_what_may_be_kept_are_let_go(monkeypatch):
    def run(bad, room):
        monkeypatch.setattr(manual_forward, "MAX_BYTES", room)
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(1), precision="fp16")
        OnlyIn(SEVERAL[bad], False).on(model)
        for batch in SEVERAL:
            booster.backward(own_loss(model, batch), optimizer)
        sizes = [call.size for call in optimizer.manual_calls.kept]
        optimizer.step()
        return sizes, optimizer.overflow_report

    def runs():
        sizes, _ = run(0, 2**30)
        return sizes, *(run(bad, room) for bad, room in [(2, 2 * sizes[0]), (0, 2 * sizes[0]), (0, 0)])

    sizes, (kept, text), (_, unknown), (alone, _) = Loopback(1).run(runs)[0]
    assert (len(sizes), len(kept), len(alone)) == (3, 2, 1)
    assert sizes[0] > sum(value.nbytes for value in BATCH.values()) // 2
    place = "the output of 'vit.layers.1.mlp.fc1' holds inf in call 3 of 3 (stage 0, micro-batch 0) on rank 0"
    assert text.startswith(f"{place}, as far as it was searched: of 3 calls, one is not recorded beyond a limit of ")
    assert "its source is not known, because of 3 calls, one is not recorded" in unknown


def test_a_call_that_cannot_be_repeated_is_told_beside_what_another_gives():
    def run():
        batches = [{k: v.half() if v.is_floating_point() else v.clone() for k, v in batch.items()} for batch in SEVERAL]
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(1), precision="fp16")
        OnlyIn(SEVERAL[1], False).on(model)
        for batch in batches:
            booster.backward(own_loss(model, batch), optimizer)
        batches[0]["pixel_values"].zero_()
        optimizer.step()
        return optimizer.overflow_report

    (text,) = Loopback(1).run(run)
    assert text.endswith(
        "in call 2 of 3 (stage 0, micro-batch 0) on rank 0, as far as it was searched: the batch of call 1 of 3 "
        "was written to after the call on rank 0"
    )


def test_calls_of_execute_pipeline_beside_those_of_the_script_are_told():
    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(1), precision="fp16")
        OnlyIn(SEVERAL[1], False).on(model)
        booster.execute_pipeline(iter([SEVERAL[0]]), model, model_loss, optimizer)
        booster.backward(own_loss(model, SEVERAL[1]), optimizer)
        optimizer.step()
        return optimizer.overflow_report

    (text,) = Loopback(1).run(run)
    assert text.endswith("(not searched in 1 call of execute_pipeline that add up with these)")


def test_calls_before_zero_grad_count_no_more():
    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(1), precision="fp16")
        OnlyIn(SEVERAL[0], False).on(model)
        booster.backward(own_loss(model, SEVERAL[0]), optimizer)
        optimizer.zero_grad()
        booster.backward(own_loss(model, SEVERAL[1]), optimizer)
        optimizer.step()
        return optimizer.skipped_steps, optimizer.manual_calls.kept

    assert Loopback(1).run(run) == [(0, [])]


def test_calls_before_zero_grad_with_gradients_after_it_count():
    def run():
        booster, model, optimizer = boosted(small_vit(), sgd, image_batch(1), precision="fp16")
        OnlyIn(SEVERAL[1], False).on(model)
        first = own_loss(model, SEVERAL[0])
        optimizer.zero_grad()
        booster.backward(first + own_loss(model, SEVERAL[1]), optimizer)
        optimizer.step()
        return optimizer.overflow_report

    (text,) = Loopback(1).run(run)
    assert text == "the output of 'vit.layers.1.mlp.fc1' holds inf in call 2 of 2 (stage 0, micro-batch 0) on rank 0"
