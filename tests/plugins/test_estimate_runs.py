from dataclasses import replace
from functools import partial

import pytest
import torch
from hybridpp_plugins.cut_model import cut_model
from hybridpp_plugins.estimate_batch import BatchSource
from hybridpp_plugins.estimate_runs import EstimateRuns, RunKind
from hybridpp_plugins.layout_estimator import settings_parser
from torch import nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from hybridpp import HybridParallelPlugin
from hybridpp.config import Precision
from hybridpp.estimate import (
    BASES,
    DEVICES,
    NotPeriodicError,
    Ops,
    ScaledRuns,
    repeated_blocks,
    roofline,
    stage_memory,
    with_repeated_blocks,
)
from hybridpp.partition import StagePlan

SIZES = {"vocab_size": 50, "use_cache": False}


def llama(num_blocks=9, intermediate_size=32):
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=num_blocks,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=intermediate_size,
        **SIZES,
    )
    return LlamaForCausalLM(config)


def gpt2(num_blocks=9):
    config = GPT2Config(
        n_embd=16, n_layer=num_blocks, n_head=2, n_positions=16, loss_type="ForCausalLMLoss", bos_token_id=0, **SIZES
    )
    return GPT2LMHeadModel(config)


def gpt_oss(num_blocks=13):
    """Blocks with a window and without take turns, and each adds to a cache that is there until the end."""
    config = GptOssConfig(
        hidden_size=64,
        num_hidden_layers=num_blocks,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        vocab_size=50,
        experts_implementation="grouped_mm",
    )
    return GptOssForCausalLM(config)


def runs_of(make, sequence_length=8):
    with torch.device("meta"):
        model = make()
    batches = BatchSource(sequence_length=sequence_length)
    return model, EstimateRuns(model, precision=Precision.BF16, batches=batches, device="cuda")


@pytest.mark.covering
@pytest.mark.parametrize("make", [llama, gpt2, gpt_oss])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_run_that_leaves_out_equal_blocks_gives_the_same_estimate(make, tp_size):
    model, runs = runs_of(make)
    found = runs.traced(tp_size, False, 1, 2).found
    parsed = settings_parser(HybridParallelPlugin)({"tp_size": tp_size, "num_microbatches": 2, "precision": "bf16"})
    for splits, recomputed in ((False, frozenset()), (True, frozenset()), (True, frozenset(found.blocks))):
        kind = RunKind(tp_size, False, 2, recomputed, splits)
        left_out = repeated_blocks(model, found.units, recomputed)
        assert [len(row.names) for row in left_out] == [4 if make is gpt_oss else 3]
        complete = runs._record(kind, found.units, True)
        short = with_repeated_blocks(runs._record(kind, found.units, True, left_out), left_out)
        last_block = max(index for index, call in enumerate(complete.calls) if call.name in found.blocks)
        times = [roofline(run, DEVICES["h100"], tp_size) for run in (complete, short)]
        for num_stages in (1, 2, 5):
            cut = cut_model(runs, parsed, 1, num_stages, traced_for=2)
            for plan, (first, last) in zip(cut.plans, cut.windows, strict=True):
                expected, memory = (stage_memory(run, plan, last_block, splits, 2) for run in (complete, short))
                assert memory == expected
                for name in ("forward", "backward", "weight_gradients"):
                    whole, part = (getattr(one, name)(first, last) for one in times)
                    # Gradients of small weights are added in one operator, which is for those of the blocks that ran.
                    assert part == pytest.approx(whole, rel=0.002)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_run_is_the_same_whatever_ran_on_its_rank_before(tp_size):
    """One rank serves runs that recompute, split their passes, or do neither; some weights are large."""
    model, runs = runs_of(partial(llama, intermediate_size=8192))
    found = runs.traced(tp_size, False, 1, 2).found
    blocks = frozenset(found.blocks)
    ways = [(recomputed, splits) for recomputed in (frozenset(), blocks) for splits in (False, True)]
    alone = {}
    for way in ways:
        fresh = EstimateRuns(model, precision=Precision.BF16, batches=BatchSource(sequence_length=8), device="cuda")
        alone[way] = fresh.run(RunKind(tp_size, False, 1, *way), found.units, False)
    for way in (*reversed(ways), *ways):
        runs.run.cache_clear()
        run, expected = runs.run(RunKind(tp_size, False, 1, *way, blocks), found.units, False), alone[way]
        assert list(run.ops) == list(expected.ops)
        for name in ("sizes", "born", "died", "savers", "saved"):
            assert (getattr(run.memory, name) == getattr(expected.memory, name)).all()
    assert runs._ready.cache_info().currsize == 1


def test_units_on_sequence_shards_are_marked_in_both_passes():
    """Their results are tensors that are gathered when they are read."""
    model, runs = runs_of(llama)
    found = runs.traced(2, True, 1, 2).found
    kind = RunKind(2, True, 2)
    run = runs.run(kind, found.units)
    gradients = [call.gradient for call in run.calls if call.name in found.blocks]
    assert None not in gradients
    assert gradients == sorted(gradients, reverse=True)
    assert all(None not in call.results[:1] for call in run.calls if call.name in found.blocks)
    times = roofline(run, replace(DEVICES["h100"], host_us=0.0, op_us=1.0), 2)
    blocks = [index for index, call in enumerate(run.calls) if call.name in found.blocks]
    backward = [times.backward(index, index) for index in blocks[2:-2]]
    assert max(backward) < 1.05 * min(backward)
    left_out = repeated_blocks(model, found.units, frozenset())
    short = with_repeated_blocks(runs._record(kind, found.units, True, left_out), left_out)
    assert [op.message for op in short.ops if op.message] == [op.message for op in run.ops if op.message]


def test_blocks_that_only_seem_equal_are_run():
    model, runs = runs_of(llama)
    found = runs.traced(1, False, 1, 2).found
    kind = RunKind(1, False, 2)
    left_out = repeated_blocks(model, found.units, frozenset())
    run = runs._record(kind, found.units, True, left_out)
    # The fourth block's forward has one operator more.
    begin = next(call.begin for call in run.calls if call.name.endswith(".3"))
    extra = next(op for op in run.ops if op.event > begin + 1)
    with pytest.raises(NotPeriodicError):
        with_repeated_blocks(replace(run, ops=Ops.of([*run.ops, extra])), left_out)


def test_runs_are_scaled_from_the_first_ones_of_a_rank():
    """The very first micro-batch frees some memory at other events than all others."""
    _, runs = runs_of(llama)
    units = runs.traced(2, False, 1, 2).found.units
    runs.run(RunKind(1, False, 2), units, False)  # finds which batch the model takes
    few, more = (runs.run(RunKind(2, False, size), units, False) for size in BASES)
    assert ScaledRuns(few, more).run(16) is not None


def gemma3():
    """A tower of nine small blocks for images, which is never cut, before the blocks of the text."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    text = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 100, **heads}
    images = {"image_size": 56, "patch_size": 14, "vision_use_head": False}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 9, "num_attention_heads": 2, **images}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 99, "boi_token_index": 97, "eoi_token_index": 98}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **tokens))


def test_equal_blocks_inside_of_a_tower_are_left_out():
    _, runs = runs_of(gemma3, sequence_length=32)
    found = runs.traced(1, False, 1, 2).found
    (row,) = runs._repeated(found.units, frozenset())
    assert [name.rpartition(".")[2] for name in row.names] == ["4", "5", "6"]
    assert not set(row.names) & set(found.units)
    for kind in (RunKind(1, False, 2), RunKind(1, False, 2, frozenset(found.blocks), splits=True)):
        complete, short = runs.run(kind, found.units, True), runs.run(kind, found.units, False)
        assert not runs._never_left_out
        assert [call.name for call in short.calls] == [call.name for call in complete.calls]
        memories = [stage_memory(run, StagePlan(), len(run.calls) - 3, kind.splits) for run in (complete, short)]
        assert memories[0] == memories[1]
        ends = [roofline(run, DEVICES["h100"]).end for run in (complete, short)]
        assert ends[1] == pytest.approx(ends[0], rel=0.002)


class TwoStreams(nn.Module):
    """A block that returns what it was given of text and of image, changed."""

    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, text, image):
        return text + self.image(image).tanh(), image + self.text(text).tanh()


class TwoStreamModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Linear(8, 32),
            nn.ModuleList(TwoStreams() for _ in range(9)),
            nn.Linear(32, 8),
        )

    def forward(self, x):
        text, image = self.embed(x), self.embed(x.flip(1))
        for block in self.blocks:
            text, image = block(text, image)
        return self.head(image)


def test_blocks_of_two_streams_are_left_out():
    with torch.device("meta"):
        model = TwoStreamModel()
    batches = BatchSource(sample=torch.randn(2, 16, 8), criterion=lambda outputs, inputs: outputs.square().sum())
    runs = EstimateRuns(model, precision=Precision.FP32, batches=batches)
    found = runs.traced(1, False, 1, 2).found
    kind = RunKind(1, False, 2)
    complete, short = runs.run(kind, found.units, True), runs.run(kind, found.units, False)
    ((row,), dropped) = runs._repeated(found.units, frozenset()), runs._never_left_out
    assert len(row.names) == 3
    assert not dropped
    # Of the last block the text is not used: its gradient is that of the image.
    assert all(call.gradient is not None for call in short.calls if call.name in found.blocks)
    memories = [stage_memory(run, StagePlan(), len(run.calls) - 2) for run in (complete, short)]
    assert memories[0] == memories[1]
    assert short.sizes.tolist() == complete.sizes.tolist()
