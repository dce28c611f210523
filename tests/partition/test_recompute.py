"""Activation checkpointing: other blocks are recomputed, no bit changes, less is kept."""

import functools
import re
import weakref

import pytest
import torch
from copies import copied
from support import assert_same, boosted, image_batch, model_loss, sgd, tiny_vit, train
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import GPT2Config, GPT2LMHeadModel

from hybridpp import HybridParallelPlugin, PipelineGradientCheckpointConfig
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError, PartitionError

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", "zb-v")
# Of each placement of stages one, with whole and with split backward passes.
OF_EACH_KIND = ("1f1b", "zb-h1", "interleaved-zb", "zb-v")
# With a ragged last micro-batch, and with one micro-batch less.
BATCHES = [image_batch(5), image_batch(2, seed=1)]


def vit():
    return tiny_vit(dropout=0.1)


def assert_same_training(run, expected):
    assert all(losses == expected["losses"][0] for losses in run["losses"])
    assert_same(run["gradients"], expected["gradients"])
    assert_same(run["weights"], expected["weights"])


@pytest.fixture(scope="module")
def one_process():
    return train(vit, BATCHES, num_microbatches=3)


@pytest.mark.parametrize(
    ("schedule", "pp_size"),
    [
        ("1f1b", 1),
        ("zb-v", 1),
        *((name, 2) for name in OF_EACH_KIND),
        *(pytest.param(name, 2, marks=pytest.mark.matrix) for name in sorted({*NAMES} - {*OF_EACH_KIND})),
        ("zb-h1", 4),
    ],
)
def test_recomputing_all_blocks_changes_no_bit(schedule, pp_size, one_process):
    settings = {"num_microbatches": 3, "schedule": schedule, "gradient_checkpoint_config": {}}
    assert_same_training(train(vit, BATCHES, pp_size=pp_size, **settings), one_process)


@pytest.mark.parametrize(
    ("schedule", "config"),
    [
        ("1f1b", {"gradient_checkpointing_ratio": 0.5}),
        ("zb-h1", {"num_ckpt_layers_per_stage": [0, 1]}),
        ("1f1b", {"max_stored_microbatches": 1}),
        ("zb-h1", {"gradient_checkpointing_ratio": 0.5, "max_stored_microbatches": 2}),
    ],
    ids=str,
)
def test_recomputing_some_changes_no_bit(schedule, config, one_process):
    config = PipelineGradientCheckpointConfig(**config)
    settings = {"num_microbatches": 3, "schedule": schedule, "gradient_checkpoint_config": config}
    assert_same_training(train(vit, BATCHES, pp_size=2, **settings), one_process)


@pytest.mark.parametrize(
    ("schedule", "recomputed"),
    # Under all of the other schedules blocks are recomputed by the library, above.
    [("1f1b", None), ("1f1b", {}), ("zb-h1", {}), ("interleaved", None), ("zb-v", None)],
    ids=str,
)
def test_what_the_model_checkpoints_itself_is_left_to_it(schedule, recomputed, one_process):
    def checkpointed():
        model = vit()
        new_name = hasattr(model, "activation_checkpointing_enable")  # since transformers 5.20 or so
        (model.activation_checkpointing_enable if new_name else model.gradient_checkpointing_enable)()
        return model

    settings = {"num_microbatches": 3, "schedule": schedule, "gradient_checkpoint_config": recomputed}
    assert_same_training(train(checkpointed, BATCHES, pp_size=2, **settings), one_process)


class Block(nn.Module):
    """Keeps statistics, counts its calls, and adds to a list and to a dict."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.num_calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

    def forward(self, x, seen, state):
        self.num_calls += 1
        x = torch.dropout(torch.tanh(self.norm(self.linear(x + sum(seen)))), 0.3, self.training)
        seen.append(x)
        state["sum"] = state["sum"] + x.mean()
        return x


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x):
        seen, state = [], {"sum": 0.0}
        for block in self.blocks:
            x = block(x, seen, state)
        return x + state["sum"] + sum(seen)


def squares(outputs, inputs):
    return outputs.square().mean()


ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_recomputed_block_finds_and_leaves_everything_as_it_was(pp_size):
    def run(**settings):
        def step():
            settings_ = {"num_microbatches": 2, **settings}
            booster, model, optimizer = boosted(Blocks(), sgd, ROWS, **settings_)
            booster.execute_pipeline(iter([ROWS]), model, squares, optimizer)
            optimizer.step()
            calls = {n: block.num_calls for n, block in enumerate(model.blocks) if block.num_calls}
            return dict(model.named_parameters()) | dict(model.named_buffers()), calls

        found = Loopback(settings.get("pp_size", 1)).run(step)
        return {name: t for tensors, _ in found for name, t in tensors.items()}, [calls for _, calls in found]

    expected, _ = run()
    tensors, calls = run(pp_size=pp_size, gradient_checkpoint_config={})
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, atol=1e-7, rtol=1e-6)
    assert set().union(*calls) == set(range(4))
    assert all(count == 2 for counts in calls for count in counts.values())


@copied
def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 16, "n_embd": 8, "n_layer": 4, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False)).train()


@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_key_value_cache_is_not_filled_twice(pp_size):
    ids = torch.arange(24).view(4, 6) % 20
    batch = {"input_ids": ids, "labels": ids, "use_cache": True}
    expected = train(gpt2, [batch], num_microbatches=2)
    settings = {"num_microbatches": 2, "gradient_checkpoint_config": {}}
    assert_same_training(train(gpt2, [batch], pp_size=pp_size, **settings), expected)


class Kept:
    """A tensor that autograd keeps for the backward pass."""

    def __init__(self, tensor):
        self.tensor = tensor


def peaks_kept(config, *num_microbatches):
    """The most elements that autograd keeps on the first of two ranks, at any time of a step of each length.

    Under 1F1B it holds two micro-batches.
    """

    def run():
        live, peak = 0, 0

        def free(size):
            nonlocal live
            live -= size

        def pack(tensor):
            nonlocal live, peak
            if isinstance(tensor, FakeTensor) or tensor.data_ptr() in weights:
                return tensor
            live += tensor.numel()
            peak = max(peak, live)
            kept = Kept(tensor)
            weakref.finalize(kept, free, tensor.numel())
            return kept

        settings = {"pp_size": 2, "microbatch_size": 1, "gradient_checkpoint_config": config}
        booster, model, optimizer = boosted(vit(), sgd, image_batch(1), **settings)
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        peaks = []
        for number in num_microbatches:
            peak = 0
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: getattr(kept, "tensor", kept)):
                booster.execute_pipeline(iter([image_batch(number)]), model, model_loss, optimizer)
            assert live == 0
            peaks.append(peak)
        return peaks

    first, _ = Loopback(2).run(run)
    return first


@pytest.fixture(scope="module")
def all_kept():
    """Where nothing is recomputed."""
    return peaks_kept(None, 4, 9)


def test_less_is_kept_the_more_is_recomputed(all_kept):
    kept = {ratio: peaks_kept({"gradient_checkpointing_ratio": ratio}, 4)[0] for ratio in (0.0, 0.5, 1.0)}
    assert kept[0.0] == all_kept[0]
    assert kept[1.0] < 0.1 * kept[0.0]
    assert kept[0.5] == pytest.approx((kept[0.0] + kept[1.0]) / 2, rel=0.05)


def test_only_so_many_microbatches_are_kept_whole(all_kept):
    """However long the step is: one whole and one recomputed is half way between none and all."""
    none, one, two = (peaks_kept({"max_stored_microbatches": n}, 4, 9) for n in range(3))
    assert two == all_kept
    for least, some, most in zip(none, one, two, strict=True):
        assert some == pytest.approx((least + most) / 2, rel=0.05)


class Writes(nn.Linear):
    """Its input is gone afterwards."""

    def forward(self, x):
        return super().forward(x.tanh_())


class Chain(nn.Module):
    def __init__(self, block):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList([block(4, 4) for _ in range(4)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class ContainerWrites(Chain):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            y = block(x * 2)
            h = x * 3
            y = block(h) + y
            h.mul_(2)
            x = y
        return x


class AddsOne(nn.Linear):
    """Keeps nothing of its input itself, so that autograd does not mind when that changes."""

    def forward(self, x):
        return torch.tanh(x + self.bias)


@pytest.mark.covering
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize(
    "make_model",
    [functools.partial(Chain, Writes), functools.partial(ContainerWrites, AddsOne)],
    ids=["unit", "model"],
)
def test_an_input_that_is_written_to_is_refused_and_not_recomputed_from(make_model, pp_size):
    train(make_model, [ROWS], pp_size=pp_size, num_microbatches=2, criterion=squares)
    with pytest.raises(PartitionError, match=r"^an input of unit 'blocks\.\d' is written to in place, so the unit can"):
        train(
            make_model,
            [ROWS],
            pp_size=pp_size,
            num_microbatches=2,
            criterion=squares,
            gradient_checkpoint_config={},
        )


def test_more_blocks_than_a_stage_has_are_refused():
    text = "num_ckpt_layers_per_stage requests 3 recomputed blocks of stage 1, which has 2. The stages have 2, 2."
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}"):
        train(
            vit,
            BATCHES[:1],
            pp_size=2,
            num_microbatches=2,
            layers_per_stage=[2, 2],
            gradient_checkpoint_config={"num_ckpt_layers_per_stage": [0, 3]},
        )


def test_numbers_for_other_stages_are_refused_when_the_plugin_is_made():
    def run():
        with pytest.raises(
            ConfigError, match=r"^num_ckpt_layers_per_stage needs one number per stage: got \[1\] with 2"
        ):
            HybridParallelPlugin(
                tp_size=1,
                pp_size=2,
                num_microbatches=2,
                gradient_checkpoint_config={"num_ckpt_layers_per_stage": [1]},
            )

    Loopback(2).run(run)


@pytest.mark.parametrize(("use_cache", "settings"), [(True, {}), (False, {"gradient_checkpoint_config": {}})])
def test_a_cache_that_undoes_no_recomputation_is_not_reported(use_cache, settings, caplog):
    model = gpt2()
    model.config.use_cache = use_cache
    boosted(model, sgd, {"input_ids": torch.zeros(1, 2, dtype=torch.long)}, **settings)
    boosted(tiny_vit(), sgd, image_batch(2), gradient_checkpoint_config={})
    # Transformers warns of special tokens outside of the vocabulary, where an earlier test let it.
    assert not [record for record in caplog.records if record.name.startswith("hybridpp")]


def test_a_cache_that_keeps_what_is_recomputed_is_reported_once(caplog):
    ids = torch.zeros(2, 4, dtype=torch.long)
    train(gpt2, [{"input_ids": ids, "labels": ids}] * 2, num_microbatches=2, pp_size=2, gradient_checkpoint_config={})
    (message,) = [record.message for record in caplog.records]
    assert message.endswith(
        "GPT2LMHeadModel caches keys and values, so those of every block are kept for the backward pass, although "
        "gradient_checkpoint_config recomputes the blocks. Set model.config.use_cache = False."
    )
