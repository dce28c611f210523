"""Places of random numbers inside units, and which of them are seeded."""

import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from support import assert_same, image_batch, sgd, tiny_vit, train
from torch import nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from hybridpp.cluster import stream_seeder
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.partition import StagedModel, rng
from hybridpp.partition.drawing_parts import DrawingParts
from hybridpp.partition.rng import inner_linear_layers

CPU = torch.device("cpu")


def test_linear_layers_of_any_class_are_places_and_nothing_else_is():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(2, 2))
    block = nn.ModuleDict(
        {
            "linear": nn.Linear(2, 2),
            "conv1d": Conv1D(2, 2),
            "embedding": nn.Embedding(2, 2),
            "norm": nn.LayerNorm(2),
            "scripted": scripted,
            "attention": nn.MultiheadAttention(2, 1),
        }
    )
    model = nn.ModuleDict({"block": block, "head": nn.Linear(2, 2)})
    assert inner_linear_layers(model, ["block", "head"]) == ("block.linear", "block.conv1d", "block.attention.out_proj")


class Block(nn.Module):
    """Two linear layers with dropout between and behind them."""

    def __init__(self, rate=0.0, checkpointed=False):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.rate, self.checkpointed, self.noise = rate, checkpointed, None

    def rest(self, x):
        x = x if self.noise is None else self.noise(x)
        return dropout(self.fc2(dropout(x, self.rate, self.training)), self.rate, self.training)

    def forward(self, x):
        x = self.fc1(x)
        return checkpoint(self.rest, x, use_reentrant=False) if self.checkpointed else self.rest(x)


class Blocks(nn.Module):
    """Blocks with rates of dropout, and container code that draws after some of them."""

    def __init__(self, rates=(0.0,) * 4, after=(), repeated=False, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block(rate, checkpointed) for rate in rates)
        self.after, self.repeated, self.dropout_after = after, repeated, 0.5

    def forward(self, x):
        x = self.first(x)
        for number, layer in enumerate((*self.layers, *self.layers) if self.repeated else self.layers):
            x = layer(x)
            if number in self.after and self.training:
                x = dropout(x, self.dropout_after)
        return x


QUIET, SOME, ALL = (0.0,) * 4, (0.0, 0.5, 0.0, 0.0), (0.5,) * 4
KINDS = {
    "quiet": {},
    "some": {"rates": SOME},
    "all": {"rates": ALL},
    "container code": {"after": (1,)},
    "both": {"rates": SOME, "after": (2,)},
    "twice": {"rates": SOME, "after": (4,), "repeated": True},
    "checkpoints inside": {"rates": SOME, "after": (0,), "repeated": True, "checkpointed": True},
}


class Run:
    """Forwards and backwards of one stage."""

    def __init__(self, model, recompute=False):
        self.model = model
        self.staged = StagedModel(ModuleAdapter(model), 1, [0], device=CPU, samples=[])
        self.recompute = recompute

    def microbatch(self, key):
        """The result, what a criterion draws, and the gradients."""
        plan = self.staged.plans((), {})[0]
        self.model.zero_grad()
        _, result, context = self.staged.forward(plan, (torch.ones(3, 4),), {}, [], key, self.recompute)
        found = {"result": result.detach(), "drawn by the criterion": torch.rand(3)}
        with self.staged.recomputing(context):
            result.sum().backward()
        return found | {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}


@pytest.fixture
def seeds(monkeypatch):
    """The streams that the generators were set for."""
    streams = []

    def counting(key, device):
        seed = stream_seeder(key, device)
        return lambda stream: (streams.append(stream), seed(stream))[1]

    monkeypatch.setattr(rng, "stream_seeder", counting)
    return streams


def seeded_everywhere(model, keys, monkeypatch, change=lambda model, key: None):
    with monkeypatch.context() as patch:
        patch.setattr(DrawingParts, "now", lambda self, stage, is_grad_enabled: None)
        run, found = Run(model), []
        for key in keys:
            change(model, key)
            found.append(run.microbatch(key))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_a_forward_that_is_seeded_everywhere(kind, monkeypatch):
    expected = seeded_everywhere(Blocks(**KINDS[kind]), range(3), monkeypatch)
    run = Run(Blocks(**KINDS[kind]))
    for key in range(3):
        assert_same(run.microbatch(key), expected[key])


def test_units_that_draw_nothing_are_not_seeded(seeds):
    run = Run(Blocks())
    run.microbatch(0)
    assert len(seeds) > 4 * 4
    seeds.clear()
    run.microbatch(1)
    # One for the forward, one for the criterion.
    assert len(seeds) == 2
    run.model.eval()
    run.microbatch(2)
    seeds.clear()
    run.microbatch(3)
    assert len(seeds) == 2


def test_only_what_draws_is_seeded_and_what_follows(seeds):
    run = Run(Blocks(rates=SOME))
    run.microbatch(0)
    seeds.clear()
    run.microbatch(1)
    block, layers, after = 1, 2, 1
    assert len(seeds) == 1 + block + layers + after + 1


def test_llama_is_seeded_once_per_forward_whatever_its_depth(seeds):
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, vocab_size=32, use_cache=False
    )
    staged = StagedModel(ModuleAdapter(LlamaForCausalLM(config).train()), 1, [0], device=CPU, samples=[])
    plan, ids = staged.plans((), {})[0], torch.zeros(1, 4, dtype=torch.long)
    for key in range(2):
        seeds.clear()
        context = staged.forward(plan, (), {"input_ids": ids, "labels": ids}, [], key, False)[2]
        with staged.recomputing(context):
            pass
    assert len(seeds) == 2


def test_recomputation_seeds_what_the_forward_did(seeds):
    run = Run(Blocks(checkpointed=True), recompute=True)
    run.microbatch(0)
    seeds.clear()
    run.microbatch(1)
    assert len(seeds) == 2


def wake(model, key):
    """From the third micro-batch on, the last block draws, by what no code that it had at boost names."""
    model.layers[3].noise = dropout if key > 1 else None


def switch(model, key):
    model.layers[3].train(key > 1)


@pytest.mark.parametrize(
    ("change", "rates"), [(switch, (0.0, 0.0, 0.0, 0.5)), (lambda model, key: model.train(key > 1), ALL)]
)
def test_a_switch_to_training_is_noticed_before_anything_is_drawn(change, rates, monkeypatch, caplog):
    expected = seeded_everywhere(Blocks(rates=rates), range(4), monkeypatch, change)
    run = Run(Blocks(rates=rates))
    for key in range(4):
        change(run.model, key)
        assert_same(run.microbatch(key), expected[key])
    assert not caplog.records


def test_a_new_rate_of_dropout_is_noticed_before_anything_is_drawn(monkeypatch):
    class Dropping(Blocks):
        def __init__(self):
            super().__init__()
            self.layers[2].fc1 = nn.Sequential(self.layers[2].fc1, nn.Dropout(0.0))

    def change(model, key):
        model.layers[2].fc1[1].p = model.layers[0].rate = 0.5 * (key > 1)

    expected = seeded_everywhere(Dropping(), range(4), monkeypatch, change)
    run = Run(Dropping())
    for key in range(4):
        change(run.model, key)
        assert_same(run.microbatch(key), expected[key])


class Noisy(Block):
    """Draws by a counter, in a function that a method calls."""

    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def rest(self, x):
        self.num_calls += 1
        return super().rest(self.noisy(x) if self.num_calls > 2 else x)

    def noisy(self, x):
        return with_noise(x)


def with_noise(x):
    return x + torch.randn_like(x)


class LateInContainer(Blocks):
    """Drops by a counter between blocks, at a rate that no module holds."""

    def __init__(self):
        super().__init__()
        del self.dropout_after
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        x = self.layers[0](x)
        return self.layers[1](dropout(x, 0.5) if self.num_calls > 2 else x)


def noisy_blocks():
    model = Blocks()
    model.layers[2] = Noisy()
    return model


@pytest.mark.parametrize("make_model", [noisy_blocks, LateInContainer])
def test_code_that_draws_late_is_seeded_from_the_start(make_model, monkeypatch, caplog):
    torch.manual_seed(0)
    expected = seeded_everywhere(make_model(), range(4), monkeypatch)
    torch.manual_seed(0)
    run = Run(make_model())
    for key in range(4):
        assert_same(run.microbatch(key), expected[key])
    assert not caplog.records


def test_units_beside_one_that_may_draw_late_are_not_seeded(seeds):
    run = Run(noisy_blocks())
    run.microbatch(0)
    seeds.clear()
    run.microbatch(1)
    block, layers, after = 1, 2, 1
    assert len(seeds) == 1 + block + layers + after + 1


@pytest.mark.parametrize("rates", [QUIET, SOME, (0.0, 0.0, 0.5, 0.0)])
def test_unexpected_draws_are_reported_once_and_then_seeded(rates, monkeypatch, caplog):
    expected = seeded_everywhere(Blocks(rates=rates), range(5), monkeypatch, wake)
    run = Run(Blocks(rates=rates))
    for key in range(5):
        wake(run.model, key)
        with caplog.at_level(logging.WARNING, "hybridpp"):
            found = run.microbatch(key)
        assert len(caplog.records) == (key > 1)
        if key != 2:
            assert_same(found, expected[key])
    assert "drawn where no micro-batch before had drawn any: in " in caplog.text
    assert "'layers.3', or in the code after it" in caplog.text


def test_a_failed_forward_teaches_nothing(monkeypatch):
    model = Blocks(rates=ALL)
    expected = seeded_everywhere(Blocks(rates=ALL), range(2), monkeypatch)
    run = Run(model)
    hook = model.layers[1].fc1.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.microbatch(0)
    hook.remove()
    for key in range(2):
        assert_same(run.microbatch(key), expected[key])


def test_divided_layers_draw_as_before(monkeypatch):
    batches, settings = [image_batch(4, seed=seed) for seed in range(2)], {"num_microbatches": 2, "tp_size": 2}
    found = train(lambda: tiny_vit(0.3, num_layers=2), batches, make_optimizer=sgd, **settings)
    monkeypatch.setattr(DrawingParts, "now", lambda self, stage, is_grad_enabled: None)
    expected = train(lambda: tiny_vit(0.3, num_layers=2), batches, make_optimizer=sgd, **settings)
    assert found["losses"] == expected["losses"]
    assert_same(found["weights"], expected["weights"])


def test_divided_layers_that_draw_nothing_fork_no_generator(monkeypatch):
    forks = []
    seeds_of = SimpleNamespace(crc32=lambda *args: forks.append(args) or 1)
    monkeypatch.setattr("hybridpp.tensor_parallel.tp_context.zlib", seeds_of)
    train(lambda: tiny_vit(num_layers=2), [image_batch(4)], num_microbatches=1, tp_size=2)
    once = len(forks)
    assert once
    forks.clear()
    train(lambda: tiny_vit(num_layers=2), [image_batch(4)], num_microbatches=4, tp_size=2)
    assert len(forks) == once


def test_no_stage_seeds_units_that_draw_nothing(seeds):
    def count(num_microbatches):
        seeds.clear()
        train(lambda: tiny_vit(num_layers=2), [image_batch(6)], num_microbatches=num_microbatches, pp_size=2)
        return len(seeds)

    # On the first stage one seed per micro-batch; on the last another one, for the criterion.
    assert count(6) - count(3) == 3 * (1 + 2)
