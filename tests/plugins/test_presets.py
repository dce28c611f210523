"""Presets train as HybridParallelPlugin with the settings that their keywords are mapped to."""

import re

import pytest
import torch
from support import assert_same
from torch import nn

from hybridpp import Booster, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError
from hybridpp.plugin import Plugin

# Everything that Colossal-AI's plugins take, with their defaults.
DEFAULTS = {
    "torch_ddp": {
        "broadcast_buffers": True,
        "bucket_cap_mb": 25,
        "find_unused_parameters": False,
        "check_reduction": False,
        "gradient_as_bucket_view": False,
        "static_graph": False,
        "fp8_communication": False,
    },
    "low_level_zero": {
        "stage": 1,
        "precision": "fp16",
        "initial_scale": 2**32,
        "min_scale": 1,
        "growth_factor": 2,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "hysteresis": 2,
        "max_scale": 2**32,
        "max_norm": 0.0,
        "norm_type": 2.0,
        "reduce_bucket_size_in_m": 12,
        "communication_dtype": None,
        "overlap_communication": True,
        "overlap_allgather": False,
        "cpu_offload": False,
        "master_weights": True,
        "verbose": False,
        "cast_inputs": True,
        "fp8_communication": False,
        "use_fp8": False,
        "extra_dp_size": 1,
    },
}
CLASSES = {"torch_ddp": TorchDDPPlugin, "low_level_zero": LowLevelZeroPlugin}
MAPPED = [
    ("torch_ddp", {}, {}),
    (
        "torch_ddp",
        {"bucket_cap_mb": 1, "broadcast_buffers": False, "static_graph": True, "num_microbatches": 2},
        {"ddp_bucket_cap_mb": 1, "broadcast_buffers": False, "num_microbatches": 2},
    ),
    ("low_level_zero", {"precision": "fp32"}, {"zero_stage": 1, "ddp_bucket_cap_mb": 48.0, "hysteresis": 2}),
    (
        "low_level_zero",
        {"stage": 2, "precision": "bf16", "max_norm": 0.5, "cpu_offload": True, "reduce_bucket_size_in_m": 0.5},
        {
            "zero_stage": 2,
            "precision": "bf16",
            "max_norm": 0.5,
            "offload_optimizer": 1.0,
            "ddp_bucket_cap_mb": 2.0,
            "hysteresis": 2,
        },
    ),
    (
        "low_level_zero",
        {"initial_scale": 8.0, "growth_interval": 2, "communication_dtype": torch.float16, "verbose": True},
        {
            "zero_stage": 1,
            "precision": "fp16",
            "initial_scale": 8.0,
            "growth_interval": 2,
            "communication_dtype": torch.float16,
            "ddp_bucket_cap_mb": 48.0,
            "hysteresis": 2,
        },
    ),
]


def trained(plugin, rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 2))
    booster = Booster(plugin=plugin, device="cpu")
    model, optimizer, criterion, *_ = booster.boost(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), lambda outputs, inputs: outputs.float().square().mean()
    )
    losses = []
    for number in range(3):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * number + rank))
        losses.append(booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("name", "keywords", "settings"), MAPPED)
def test_a_preset_trains_as_the_settings_it_maps_to(name, keywords, settings):
    def run():
        rank = current_world().rank
        plain = HybridParallelPlugin(**settings)
        losses, weights = trained(plain, rank)
        for preset in (CLASSES[name](**keywords), Plugin.from_name(name, **keywords)):
            assert type(preset) is CLASSES[name]
            assert (preset.dp_size, preset.settings) == (2, plain.settings)
            its_losses, its_weights = trained(preset, rank)
            assert torch.equal(its_losses, losses)
            assert_same(its_weights, weights)

    Loopback(2).run(run)


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_keyword_at_its_default_is_taken(name):
    plugin = CLASSES[name](**DEFAULTS[name])
    assert plugin.settings.pipeline.num_microbatches == 1
    assert CLASSES[name](*DEFAULTS[name].values()).settings == plugin.settings  # the order is theirs, too


def test_a_booster_makes_presets_by_name():
    made = Booster(plugin="torch_ddp").plugin
    assert (type(made), made.precision, made.zero_stage) == (TorchDDPPlugin, "fp32", 0)
    made = Booster(plugin="low_level_zero", mixed_precision="bf16").plugin
    assert (type(made), made.precision, made.zero_stage) == (LowLevelZeroPlugin, "bf16", 1)


@pytest.mark.parametrize(
    ("name", "keyword", "value", "instead"),
    [
        (
            "torch_ddp",
            "fp8_communication",
            True,
            "Use precision='bf16'. Leave it out, or pass fp8_communication=False.",
        ),
        ("low_level_zero", "fp8_communication", True, "Use precision='bf16'. Leave it out"),
        ("low_level_zero", "use_fp8", True, "Use precision='bf16'. Leave it out"),
        ("low_level_zero", "norm_type", 1.0, "clipped to their L2 norm. Leave it out, or pass norm_type=2.0."),
        ("low_level_zero", "overlap_allgather", True, "Leave it out, or pass overlap_allgather=False."),
        ("low_level_zero", "master_weights", False, "updated in fp32. Leave it out, or pass master_weights=True."),
        ("low_level_zero", "extra_dp_size", 2, "over all replicas. Leave it out, or pass extra_dp_size=1."),
    ],
)
def test_what_asks_for_more_is_refused_with_the_way_out(name, keyword, value, instead):
    with pytest.raises(ConfigError, match=rf"^{keyword} is not supported yet: got {keyword}=.*{re.escape(instead)}"):
        CLASSES[name](**{keyword: value})


@pytest.mark.parametrize("stage", [0, 3, True, "1"])
def test_another_stage_is_refused_with_advice(stage):
    text = (
        rf"^stage must be 1 or 2: got stage={stage!r}. Use HybridParallelPlugin\(zero_stage=3\) to divide the weights"
    )
    with pytest.raises(ConfigError, match=text):
        LowLevelZeroPlugin(stage=stage)


@pytest.mark.parametrize(
    ("name", "keywords", "text"),
    [
        ("torch_ddp", {"bucket_cap": 1}, "TorchDDPPlugin has no setting 'bucket_cap'."),
        ("low_level_zero", {"max_nrm": 1}, "LowLevelZeroPlugin has no setting 'max_nrm'."),
        ("torch_ddp", {"zero_stage": 1}, "TorchDDPPlugin sets zero_stage=0 itself: got zero_stage=1. Leave it out"),
        ("torch_ddp", {"pp_size": 2}, "TorchDDPPlugin sets pp_size=1 itself"),
        ("low_level_zero", {"zero_stage": 2}, "LowLevelZeroPlugin sets zero_stage=1 itself"),
        ("low_level_zero", {"reduce_bucket_size_in_m": "12"}, "reduce_bucket_size_in_m must be a number above 0"),
        ("low_level_zero", {"reduce_bucket_size_in_m": 0}, "reduce_bucket_size_in_m must be a number above 0"),
        ("low_level_zero", {"verbose": 1}, "verbose"),
        ("torch_ddp", {"static_graph": None}, "static_graph"),
    ],
)
def test_wrong_keywords_are_refused(name, keywords, text):
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        CLASSES[name](**keywords)
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        Plugin.from_name(name, **keywords)


def test_a_misspelt_keyword_has_a_suggestion():
    with pytest.raises(ConfigError, match=r" It takes: .*bucket_cap_mb, .* Did you mean bucket_cap_mb\?$"):
        TorchDDPPlugin(bucket_cap=1)
