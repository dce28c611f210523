"""Heads divided by vocabulary: training as in one process, without a tensor of all logits."""

import functools

import pytest
import torch
from copies import copied
from divided_models import GPT2, LLAMA, SIZES, gpt2, llama, token_batch
from processes import run_ranks
from support import assert_near, boosted, model_loss, sgd, train
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from hybridpp.cluster import Loopback
from hybridpp.errors import NonFiniteLossError
from hybridpp.sharded_activations import DeferredGatherTensor, gathered
from hybridpp.sharded_activations import deferred_gather as module

BERT = {
    "*.query": "column",
    "*.key": "column",
    "*.value": "column",
    "*.attention.output.dense": "row",
    "*.intermediate.dense": "column",
    "*.layer.*.output.dense": "row",
    "*.word_embeddings": "vocab",
}


@copied
def bert():
    """Its head is tied to the embedding, and has a bias that is held by two modules."""
    torch.manual_seed(0)
    dropout = dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0)
    model = BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=8, **dropout)).train()
    torch.nn.init.normal_(model.cls.predictions.bias)
    return model


@copied
def t5():
    """Three embeddings and a head of one weight; the head is used in the last stage, the encoder's in the first."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 37,
        "d_model": 32,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 4,
        "d_ff": 48,
        "dropout_rate": 0.0,
    }
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, use_cache=False)).train()


UNTIED = LLAMA | {"lm_head": "gathered_column"}
MODELS = {
    "t5": (t5, {"shared": "vocab"}),
    "llama-tied": (llama, LLAMA),
    "llama": (functools.partial(llama, tied=False), UNTIED),
    "llama of four blocks": (functools.partial(llama, tied=False, num_layers=4), UNTIED),
    "gpt2": (gpt2, GPT2),
    "bert": (bert, BERT),
}
BATCHES = [token_batch(seed=seed) for seed in range(2)]


@pytest.fixture
def gathers(monkeypatch):
    """The shapes of all activations that were put together."""
    shapes = []

    def spy(parts, group, width):
        shapes.append((*parts.shape[:-1], width))
        return gather(parts, group, width)

    gather = module.gather_from_ranks
    monkeypatch.setattr(module, "gather_from_ranks", spy)
    return shapes


@functools.cache
def one_process(name):
    return train(MODELS[name][0], BATCHES, num_microbatches=2)


def check(run, expected, tolerance=1e-5):
    for losses in run["losses"]:
        assert losses == pytest.approx(expected["losses"][0], abs=tolerance)
    assert_near(run["gradients"], expected["gradients"], tolerance)
    assert_near(run["weights"], expected["weights"], tolerance)


TWO, FOUR, STAGES = {"tp_size": 2}, {"tp_size": 4}, {"tp_size": 2, "pp_size": 2}
SPLIT = STAGES | {"schedule": "zb-h1"}


@pytest.mark.covering
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("t5", layout) for layout in (FOUR, STAGES)),
        *(("llama-tied", layout) for layout in (TWO, SPLIT)),
        *(("llama", layout) for layout in (FOUR, SPLIT)),
        ("gpt2", STAGES),
        ("bert", SPLIT),
    ],
    ids=str,
)
def test_no_rank_has_all_logits(name, layout, gathers):
    make_model, plan = MODELS[name]
    check(train(make_model, BATCHES, num_microbatches=2, tensor_parallel_plan=plan, **layout), one_process(name))
    assert gathers == []


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb-v"},
        # Whole backward passes: the test above; two stages on a rank: zb-v.
        pytest.param({"schedule": "gpipe"}, marks=pytest.mark.matrix),
        pytest.param({"schedule": "interleaved", "num_model_chunks": 2}, marks=pytest.mark.matrix),
        {"gradient_checkpoint_config": {"gradient_checkpointing_ratio": 1.0}},
        {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"},
    ],
    ids=str,
)
def test_nor_under_any_schedule(options, gathers):
    # Two chunks of a rank need two blocks.
    name = "llama of four blocks" if options.get("schedule") in {"zb-v", "interleaved"} else "llama"
    make_model, plan = MODELS[name]
    run = train(make_model, BATCHES, tp_size=2, pp_size=2, num_microbatches=2, tensor_parallel_plan=plan, **options)
    check(run, one_process(name))
    assert gathers == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_nor_in_half_precision(precision, gathers):
    make_model, plan = MODELS["llama"]
    expected = train(make_model, BATCHES, num_microbatches=2, precision=precision)
    run = train(make_model, BATCHES, tp_size=2, num_microbatches=2, precision=precision, tensor_parallel_plan=plan)
    assert_near(run["weights"], expected["weights"], 2e-2)
    assert gathers == []


def shifted(outputs, inputs):
    """A criterion of the user's own."""
    logits = outputs.logits[:, :-1]
    return functional.cross_entropy(logits.transpose(1, 2), inputs["labels"][:, 1:], label_smoothing=0.1)


def distilled(outputs, inputs):
    """One that does something else with the logits."""
    wanted = torch.arange(37.0).softmax(0)
    found = outputs.logits.log_softmax(-1)
    return functional.kl_div(found, wanted.expand(found.shape), reduction="batchmean") + 0.1 * outputs.loss


@pytest.mark.covering
@pytest.mark.parametrize(("criterion", "num_gathers"), [(shifted, 0), (distilled, 2)])
@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_criterion_may_do_anything_with_logits(criterion, num_gathers, pp_size, gathers):
    make_model, plan = MODELS["gpt2"]
    expected = train(make_model, BATCHES[:1], criterion=criterion, num_microbatches=2)
    layout = {"tp_size": 2, "pp_size": pp_size, "num_microbatches": 2, "tensor_parallel_plan": plan}
    check(train(make_model, BATCHES[:1], criterion=criterion, **layout), expected)
    assert len(gathers) == 2 * num_gathers


def returned(name, training, **layout):
    def rank():
        booster, model, optimizer = boosted(MODELS[name][0](), sgd, token_batch(2), num_microbatches=2, **layout)
        with torch.set_grad_enabled(training):
            result = booster.execute_pipeline(
                iter([token_batch()]), model, model_loss, optimizer if training else None, return_outputs=True
            )
        return result["outputs"]

    return [outputs for outputs in Loopback(layout.get("tp_size", 1) * layout.get("pp_size", 1)).run(rank) if outputs]


@pytest.mark.parametrize(("pp_size", "training"), [(1, True), (2, False)])
def test_outputs_are_whole_and_plain(pp_size, training):
    (expected,) = returned("bert", training)
    found = returned("bert", training, tp_size=2, pp_size=pp_size, tensor_parallel_plan=BERT)
    assert len(found) == 2
    for outputs in found:
        assert type(outputs.logits) is torch.Tensor
        torch.testing.assert_close(outputs.logits, expected.logits, atol=1e-5, rtol=1e-5)


def test_logits_of_a_call_without_gradients_are_complete_on_every_rank():
    make_model, plan = MODELS["llama"]
    with torch.no_grad():
        expected = make_model()(**token_batch()).logits

    def rank():
        booster, model, _ = boosted(make_model(), sgd, token_batch(), tp_size=2, tensor_parallel_plan=plan)
        with torch.no_grad():
            logits = model(**token_batch()).logits
        # The others do not look at it: were it in parts, this one would wait for them.
        return logits[:, -1].argmax(-1) if booster.plugin.layout.tp.rank == 1 else logits

    logits, tokens = Loopback(2).run(rank)
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(tokens, expected[:, -1].argmax(-1))


def test_logits_of_a_model_that_is_called_with_gradients_stay_in_parts():
    make_model, plan = MODELS["llama"]
    expected = make_model()(**token_batch()).logits

    def rank():
        _, model, _ = boosted(make_model(), sgd, token_batch(), tp_size=2, tensor_parallel_plan=plan)
        logits = model(**token_batch()).logits
        assert isinstance(logits, DeferredGatherTensor)
        return logits[:, -1].argmax(-1), gathered(logits + 0)

    for tokens, logits in Loopback(2).run(rank):
        assert torch.equal(tokens, expected[:, -1].argmax(-1))
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


class Choosing(torch.nn.Module):
    """Reads the logits of a head in the middle, so they must travel to later stages."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        self.head = torch.nn.Linear(8, 5)
        self.back = torch.nn.Linear(5, 8)
        self.second = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x):
        for block in self.first:
            x = x + block(x).relu()
        logits = self.head(x)
        x = x + self.back(logits)
        for block in self.second:
            x = x + block(x).relu()
        return x.square().mean(-1) + logits.square().sum(-1)


def mean(outputs, inputs):
    return outputs.mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_is_read_in_other_stages_travels_whole(schedule):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    expected = train(Choosing, [batch], criterion=mean, num_microbatches=2)
    layout = {"tp_size": 2, "pp_size": 2, "split_points": {"head": "after"}, "schedule": schedule}
    plan = {"head": "gathered_column"}
    run = train(Choosing, [batch], criterion=mean, tensor_parallel_plan=plan, num_microbatches=2, **layout)
    check(run, expected)


def on_processes():
    make_model, plan = MODELS["llama-tied"]
    layout = {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "tensor_parallel_plan": plan}
    booster, model, optimizer = boosted(make_model(), sgd, token_batch(2), **layout)
    losses = []
    for batch in BATCHES:
        losses.append(booster.execute_pipeline(iter([batch]), model, model_loss, optimizer)["loss"].item())
        optimizer.step()
    return losses


def test_processes_that_share_a_head():
    for losses in run_ranks(on_processes, 4):
        assert losses == pytest.approx(one_process("llama-tied")["losses"][0], abs=1e-5)


def test_a_search_for_inf_looks_at_logits_and_their_gradients():
    make_model, plan = MODELS["llama"]
    layout = {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "tensor_parallel_plan": plan}

    def spoil(module, args, output):
        return output.index_fill(0, torch.tensor([0]), float("inf"))

    def activations():
        booster, model, optimizer = boosted(make_model(), sgd, token_batch(2), precision="fp16", **layout)
        if booster.plugin.layout.here.pp == 1:
            model.lm_head.register_forward_hook(spoil)
        with pytest.raises(NonFiniteLossError, match=r"the output of 'lm_head' holds inf .stage 1, micro-batch 0. on"):
            booster.execute_pipeline(iter([token_batch()]), model, model_loss, optimizer)

    def gradients():
        settings = {"precision": "fp16", "initial_scale": 2.0**30, **layout}
        booster, model, optimizer = boosted(make_model(), sgd, token_batch(2), **settings)
        booster.execute_pipeline(iter([token_batch()]), model, model_loss, optimizer)
        optimizer.step()
        return optimizer.overflow_report

    Loopback(4).run(activations)
    for told in Loopback(4).run(gradients):
        assert told.startswith("the gradient of the output of 'lm_head' holds inf (stage 1, micro-batch 0) on rank")
