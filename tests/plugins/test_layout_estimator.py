import functools
import gc
import re

import pytest
import torch
from hybridpp_plugins.estimate_sharding import own_plan
from hybridpp_plugins.find_tp_plan import plan_of_blocks, watch_blocks
from hybridpp_plugins.sample import find_samples
from test_readme import blocks
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hybridpp import Booster, HybridAdam, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.config import Precision
from hybridpp.errors import ConfigError, PartitionError
from hybridpp.estimate import DEVICES, AllocationLog, EstimateInput, JobSizes

CPU = torch.device("cpu")


def llama(num_layers=4):
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def vit(num_layers=4):
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    return ViTForImageClassification(config).train()


def two_of(make):
    """With two layers, which take half of the time; zb-v needs four."""
    return functools.partial(make, 2)


def tokens(num_samples):
    ids = torch.full((num_samples, 32), 3)
    return {"input_ids": ids, "labels": ids}


def images(num_samples):
    return {"pixel_values": torch.zeros(num_samples, 3, 32, 32), "labels": torch.zeros(num_samples, dtype=torch.long)}


def on_meta(make):
    with torch.device("meta"):
        return make()


def estimator(make, precision="fp32", device="cpu", **more):
    given = EstimateInput(precision=Precision(precision), device=DEVICES[device], **{"sequence_length": 32, **more})
    return HybridParallelPlugin.layout_estimator(on_meta(make), given)


def measured(make, batch_of, num_ranks, num_microbatches, make_optimizer=HybridAdam, **settings):
    """Bytes of the tensors of each rank at the peak of a step."""

    batch = batch_of(2 * num_microbatches)

    def rank():
        with AllocationLog() as log:
            model = on_meta(make)
            plugin = HybridParallelPlugin(num_microbatches=num_microbatches, **settings)
            booster = Booster(plugin=plugin, device="cpu")
            optimizer = make_optimizer(model.parameters(), lr=1e-4)
            parts = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=batch_of(2))
            booster.init_model(parts.model)
            # A step of ZeRO leaves buffers for the next.
            num_steps = 3 if "zero_stage" in settings else 2
            for step in range(num_steps):
                if step == num_steps - 1:
                    gc.collect()
                    log.peak = log.now
                booster.execute_pipeline(iter([batch]), parts.model, parts.criterion, parts.optimizer)
                parts.optimizer.step()
        return log.peak

    return Loopback(num_ranks).run(rank)


@pytest.mark.parametrize(
    ("make", "batch_of", "num_ranks", "num_microbatches", "settings"),
    [
        (two_of(vit), images, 2, 4, {"pp_size": 2}),
        (llama, tokens, 2, 4, {"pp_size": 2, "schedule": "zb-v"}),
        (two_of(llama), tokens, 2, 2, {"tp_size": 2, "precision": "bf16", "gradient_checkpoint_config": {}}),
        (two_of(vit), images, 2, 2, {"zero_stage": 1, "precision": "bf16"}),
    ],
)
def test_estimated_bytes_are_those_of_a_run(make, batch_of, num_ranks, num_microbatches, settings):
    precision = settings.get("precision", "fp32")
    layout = {name: value for name, value in settings.items() if name != "precision"}
    sizes = JobSizes(world_size=num_ranks, microbatch_size=2, num_microbatches=num_microbatches)
    found = estimator(make, precision).estimate(sizes, layout)
    peaks = measured(make, batch_of, num_ranks, num_microbatches, **settings)
    for rank in found.ranks:
        peak = peaks[rank.position * settings.get("tp_size", 1)]
        # The bits of small weights in half precision are summed in a block of this size, which is much here only.
        block = 0 if precision == "fp32" else 16 * 1021 * 8
        assert abs(rank.total + block - peak) < 0.05 * peak, (rank, peak)


def wide_ends(num_layers=2):
    """Of two ends that are large beside the activations of a micro-batch."""
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        intermediate_size=2000,
        image_size=32,
        patch_size=16,
        num_labels=4000,
    )
    return ViTForImageClassification(config).train()


@pytest.mark.parametrize(
    ("kernels", "device", "num_ranks", "settings"),
    [
        ("loop", "cpu", 1, {}),
        ("loop", "cpu", 2, {"pp_size": 2, "precision": "bf16"}),
        ("loop", "cpu", 2, {"zero_stage": 1}),
        ("fused", "cpu", 1, {"fused_optimizer": True}),
        # On a GPU torch's choice; here it is asked for.
        ("foreach", "h100", 1, {"fused_optimizer": False}),
        ("foreach", "h100", 2, {"fused_optimizer": False, "zero_stage": 1, "precision": "bf16"}),
    ],
)
def test_the_update_counts_where_it_takes_more_than_activations(kernels, device, num_ranks, settings):
    layout = {name: value for name, value in settings.items() if name != "precision"}
    sizes = JobSizes(world_size=num_ranks, microbatch_size=2, num_microbatches=2)
    own = estimator(wide_ends, settings.get("precision", "fp32"), device)
    found = own.estimate(sizes, layout)
    adam = functools.partial(torch.optim.AdamW, foreach=kernels == "foreach" or None)
    peaks = measured(wide_ends, images, num_ranks, 2, make_optimizer=adam, **settings)
    for rank in found.ranks:
        peak = peaks[rank.position]
        assert abs(rank.total / peak - 1) < 0.05, (rank, peak)
    assert bool(found.worst.update) == (kernels != "fused")
    if set(layout) <= {"pp_size", "zero_stage"}:
        quick = own.quick_estimate(sizes, {"tp_size": 1, "pp_size": 1, **layout}, 2**40)
        assert quick.worst.total == pytest.approx(found.worst.total, rel=0.05)


def test_more_recomputation_holds_less_and_computes_longer():
    own = estimator(llama)
    sizes = JobSizes(world_size=2, microbatch_size=4, num_microbatches=4)
    found = [
        own.estimate(sizes, {"pp_size": 2, "gradient_checkpoint_config": {"gradient_checkpointing_ratio": ratio}})
        for ratio in (0.0, 0.5, 1.0)
    ]
    held = [one.ranks[0].step.activations for one in found]
    assert held[0] > held[1] > held[2]
    assert found[0].time.step_ms < found[1].time.step_ms < found[2].time.step_ms


def test_a_model_of_a_large_width_is_estimated_without_weights():
    def large():
        config = LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=8,  # of 80, which takes longer and shows no more
            num_attention_heads=64,
            num_key_value_heads=8,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    own = estimator(large, "bf16", "h100", sequence_length=4096)
    sizes = JobSizes(world_size=16, microbatch_size=1, num_microbatches=4)
    found = own.estimate(sizes, {"tp_size": 8, "pp_size": 2})
    elements = sum(p.numel() for p in on_meta(large).parameters())
    # Norms are replicated, and the rest is divided by 16.
    assert sum(rank.state.moments for rank in found.ranks) == pytest.approx(8 * elements / 8, rel=0.001)
    assert found.ranks[1].step.logits > 2 * 4096 * 128256 / 8


def test_the_own_plan_of_a_large_model_is_what_the_search_finds():
    model = on_meta(llama)
    watched = watch_blocks(model, find_samples(model, None, None, CPU))
    found = plan_of_blocks(model, watched, 2)
    own = own_plan(model, 2, lambda: watched, large=1)
    assert own is not None
    assert own.spec.params == found.spec.params
    assert own.spec.reduce_outputs == found.spec.reduce_outputs


def test_a_user_model_is_estimated_on_a_sample():
    def make():
        return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)])

    own = estimator(make, sample=torch.zeros(3, 32), criterion=lambda outputs, inputs: outputs.mean())
    found = own.estimate(JobSizes(world_size=2, microbatch_size=4, num_microbatches=2), {"pp_size": 2})
    assert [rank.state.weights for rank in found.ranks] == [2 * 4 * (32 * 32 + 32)] * 2
    with pytest.raises(ConfigError, match=r"an estimate of Sequential needs a batch: .* pass EstimateInput"):
        estimator(make).estimate(JobSizes(world_size=1, microbatch_size=1, num_microbatches=1), {})


def test_what_cannot_be_cut_is_refused_as_boost_refuses_it():
    sizes = JobSizes(world_size=8, microbatch_size=1, num_microbatches=8)
    with pytest.raises(PartitionError, match=re.escape("for 8 stages (pp_size x num_model_chunks). Use 4 or fewer.")):
        estimator(vit).estimate(sizes, {"pp_size": 8})
    with pytest.raises(ConfigError, match="world size must be a multiple of tp_size"):
        estimator(vit).estimate(sizes, {"pp_size": 3})


@pytest.mark.parametrize(
    ("settings", "microbatch_size"),
    [
        pytest.param({"tp_size": 1, "pp_size": 2, "schedule": "zb-h1"}, 8, marks=pytest.mark.matrix),
        ({"tp_size": 1, "pp_size": 2, "schedule": "interleaved", "zero_stage": 1}, 2),
        ({"tp_size": 2, "pp_size": 1, "gradient_checkpoint_config": {}}, 4),
    ],
)
def test_quick_estimates_are_near_the_exact_ones(settings, microbatch_size):
    own = estimator(llama, "bf16")
    sizes = JobSizes(world_size=4, microbatch_size=microbatch_size, num_microbatches=8)
    quick, exact = own.quick_estimate(sizes, settings, 2**40), own.estimate(sizes, settings)
    assert quick.worst.total == pytest.approx(exact.worst.total, rel=0.1)
    assert quick.time.step_ms == pytest.approx(exact.time.step_ms, rel=0.02)
    assert own.bound_ms(sizes, settings) <= exact.time.step_ms


def test_the_example_of_the_page_on_planning_runs(capsys):
    example, _ = blocks("docs/planning.md", "python")
    namespace = {"model": on_meta(vit), "batch": images(4), "criterion": lambda outputs, inputs: outputs.loss}
    exec(example, namespace)
    num_bytes, milliseconds = map(float, capsys.readouterr().out.split())
    assert num_bytes > 0
    assert milliseconds > 0


def test_a_model_of_an_encoder_and_a_decoder_is_estimated():
    def t5():
        config = T5Config(
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            vocab_size=100,
            decoder_start_token_id=0,
            use_cache=False,
        )
        return T5ForConditionalGeneration(config).train()

    def pairs(num_samples):
        ids = torch.full((num_samples, 32), 3)
        return {"input_ids": ids, "attention_mask": ids, "decoder_input_ids": ids, "labels": ids}

    sizes = JobSizes(world_size=2, microbatch_size=2, num_microbatches=4)
    found = estimator(t5).estimate(sizes, {"pp_size": 2})
    peaks = measured(t5, pairs, 2, 4, pp_size=2)
    for rank, peak in zip(found.ranks, peaks, strict=True):
        assert abs(rank.total / peak - 1) < 0.05, (rank, peak)
