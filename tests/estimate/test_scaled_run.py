import pytest
import torch
from hybridpp_plugins.estimate_batch import BatchSource
from hybridpp_plugins.estimate_runs import EstimateRuns, RunKind
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from hybridpp.config import Precision
from hybridpp.estimate import (
    BASES,
    DEVICES,
    LARGER_BASES,
    ScaledRuns,
    roofline,
    stage_memory,
)
from hybridpp.partition import StagePlan


def gpt2():
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=500, n_positions=32, bos_token_id=0, eos_token_id=0)
    config.use_cache, config.loss_type = False, "ForCausalLMLoss"
    return GPT2LMHeadModel(config).train()


def llama():
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=500,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def vit():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return ViTForImageClassification(ViTConfig(image_size=64, patch_size=16, num_labels=10, **sizes)).train()


def three_runs(make, sizes, device):
    with torch.device("meta"):
        model = make()
    runs = EstimateRuns(model, precision=Precision.BF16, batches=BatchSource(sequence_length=32), device=device)
    units = runs.traced(1, False, 1, 2).found.units
    return (runs.run(RunKind(microbatch_size=size), units) for size in sizes)


def test_a_run_of_many_samples_follows_from_two_that_are_alike():
    few, more, made = three_runs(gpt2, (*LARGER_BASES, 10), "cpu")
    found = ScaledRuns(few, more, LARGER_BASES).run(10)
    assert found is not None
    assert found.sizes.tolist() == made.sizes.tolist()
    assert [(op.flops, op.num_bytes) for op in found.ops] == [(op.flops, op.num_bytes) for op in made.ops]


def test_what_shrinks_with_a_second_sample_does_not_fall_below_nothing():
    """Where one sample's gradient is copied, that of two is a sum, which reads what its neighbour has just made."""
    few, more, _ = three_runs(vit, (*BASES, 1), "cuda")
    low, high = few.ops.rows["joined_bytes"], more.ops.rows["joined_bytes"]
    assert (high[-len(low) :] < low).any()
    found = ScaledRuns(few, more).run(64)
    assert found is not None
    for name in ("flops", "num_bytes", "joined_bytes"):
        assert (found.ops.rows[name] >= 0).all()


def test_a_run_of_many_samples_follows_from_those_of_one_and_two():
    """One sample has no copy of its labels, of which all but the first are contiguous as they are."""
    few, more, made = three_runs(llama, (*BASES, 10), "cuda")
    assert len(more.memory) == len(few.memory) + 1
    found = ScaledRuns(few, more).run(10)
    assert found is not None
    assert found.sizes.tolist() == made.sizes.tolist()
    assert [op.flops for op in found.ops] == [op.flops for op in made.ops]
    assert [op.num_bytes for op in found.ops] == [op.num_bytes for op in made.ops]
    assert (found.born.tolist(), found.died.tolist()) == (made.born.tolist(), made.died.tolist())


def test_runs_of_different_models_are_not_continued():
    with torch.device("meta"):
        small, large = gpt2(), gpt2()
        large.transformer.h.append(large.transformer.h[0])
    made = []
    for model, size in ((small, 2), (large, 4)):
        model.config.n_layer = len(model.transformer.h)
        runs = EstimateRuns(model, precision=Precision.FP32, batches=BatchSource(sequence_length=32))
        made.append(runs.run(RunKind(microbatch_size=size), runs.traced(1, False, 1, 2).found.units))
    assert ScaledRuns(*made).run(8) is None
    assert ScaledRuns(*made, LARGER_BASES).run(8) is None


class Pieces(torch.nn.Module):
    """Goes through samples one by one, but has no product for each."""

    def forward(self, x):
        return torch.stack([one.relu() for one in x])


def test_operators_for_each_sample_are_no_copies_of_all():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), Pieces(), torch.nn.Linear(64, 64))
    batches = BatchSource(sample=torch.randn(2, 128, 64), criterion=lambda outputs, inputs: outputs.square().sum())
    runs = EstimateRuns(model, precision=Precision.FP32, batches=batches)
    found = runs.traced(1, False, 1, 1).found
    scaled = ScaledRuns(*(runs.run(RunKind(microbatch_size=size), found.units) for size in BASES))
    assert not scaled.has_loop
    assert not scaled.are_alike


class Images(torch.nn.Module):
    """Goes through samples one by one."""

    def __init__(self):
        super().__init__()
        self.each = torch.nn.Linear(64, 64)

    def forward(self, x):
        return torch.stack([self.each(one).relu() for one in x])


def test_times_and_memory_are_continued_where_runs_are_not_alike():
    with torch.device("meta"):
        model = torch.nn.Sequential(Images(), torch.nn.Linear(64, 64))
    batches = BatchSource(sample=torch.randn(2, 128, 64), criterion=lambda outputs, inputs: outputs.square().sum())
    runs = EstimateRuns(model, precision=Precision.FP32, batches=batches)
    found = runs.traced(1, False, 1, 1).found
    few, more, made = (runs.run(RunKind(microbatch_size=size), found.units) for size in (*BASES, 16))
    scaled = ScaledRuns(few, more)
    assert scaled.has_loop
    assert scaled.run(16) is None
    cpu = DEVICES["cpu"]
    times = scaled.times(roofline(few, cpu), roofline(more, cpu), 16)
    assert times.end == pytest.approx(roofline(made, cpu).end, rel=0.02)
    memories = [(stage_memory(run, StagePlan(), 0),) for run in (few, more, made)]
    (memory,) = scaled.memories(*memories[:2], 16)
    expected = memories[2][0]
    assert memory.held.total == pytest.approx(expected.held.total, rel=0.02)
    assert memory.backward.total == pytest.approx(expected.backward.total, rel=0.05)
