"""Presets train as HybridParallelPlugin with the settings that their keywords are mapped to."""

import inspect
from functools import partial

import pytest
import torch
from hybridpp_plugins import gemini, low_level_zero, torch_ddp, torch_fsdp
from hybridpp_plugins.preset import Preset
from hybridpp_plugins.unsupported import CONVERTED, HINTS, SYNONYMS, UNSUPPORTED
from plugins.zero_models import SAMPLE, TiedModel, batches, cross_entropy, step, two_groups, weights_of
from support import assert_same
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from hybridpp import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError
from hybridpp.plugin import Plugin

# What the plugins of Colossal-AI 0.5.0 take, in their order, with their defaults.
_SCALE = {"min_scale": 1, "growth_factor": 2, "backoff_factor": 0.5, "growth_interval": 1000, "hysteresis": 2}
COLOSSAL = {
    "torch_ddp": {
        "broadcast_buffers": True,
        "bucket_cap_mb": 25,
        **dict.fromkeys(("find_unused_parameters", "check_reduction", "gradient_as_bucket_view"), False),
        **dict.fromkeys(("static_graph", "fp8_communication"), False),
    },
    "low_level_zero": {
        "stage": 1,
        "precision": "fp16",
        "initial_scale": 2**32,
        **_SCALE,
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
    "gemini": {
        "chunk_config_dict": None,
        "chunk_init_device": None,
        "placement_policy": "static",
        "enable_gradient_accumulation": False,
        "max_prefetch": 0,
        "shard_param_frac": 1.0,
        "offload_optim_frac": 0.0,
        "offload_param_frac": 0.0,
        "warmup_non_model_data_ratio": 0.8,
        "steady_cuda_cap_ratio": 0.9,
        "precision": "fp16",
        "master_weights": True,
        **dict.fromkeys(("pin_memory", "force_outputs_fp32", "strict_ddp_mode"), False),
        "search_range_m": 32,
        "hidden_dim": None,
        "min_chunk_size_m": 32,
        "memstats": None,
        "gpu_margin_mem_ratio": 0.0,
        "initial_scale": 2**16,
        **_SCALE,
        "max_scale": 2**32,
        "max_norm": 0.0,
        "norm_type": 2.0,
        "tp_size": 1,
        "extra_dp_size": 1,
        **dict.fromkeys(("enable_all_optimization", "enable_fused_normalization", "enable_flash_attention"), False),
        **dict.fromkeys(("enable_sequence_parallelism", "enable_jit_fused"), False),
        "enable_async_reduce": True,
        **dict.fromkeys(("use_fp8", "verbose", "fp8_communication"), False),
    },
    "torch_fsdp": {
        **dict.fromkeys(("process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy")),
        **dict.fromkeys(("backward_prefetch", "mixed_precision", "ignored_modules", "param_init_fn")),
        "sync_module_states": False,
        "fp8_communication": False,
    },
    "hybrid_parallel": {
        "tp_size": 1,
        "pp_size": 1,
        "sp_size": None,
        "precision": "fp16",
        "zero_stage": 0,
        **dict.fromkeys(("enable_all_optimization", "enable_fused_normalization", "enable_flash_attention"), False),
        **dict.fromkeys(("enable_jit_fused", "enable_sequence_parallelism"), False),
        "sequence_parallelism_mode": None,
        "parallel_output": True,
        "num_microbatches": None,
        "microbatch_size": None,
        "initial_scale": 2**16,
        **_SCALE,
        "max_scale": 2**32,
        "max_norm": 0,
        "broadcast_buffers": True,
        "ddp_bucket_cap_mb": 25,
        **dict.fromkeys(("find_unused_parameters", "check_reduction", "gradient_as_bucket_view"), False),
        "static_graph": False,
        "zero_bucket_size_in_m": 12,
        "cpu_offload": False,
        "communication_dtype": None,
        "overlap_communication": True,
        "custom_policy": None,
        "pp_style": "1f1b",
        "num_model_chunks": 1,
        **dict.fromkeys(("scheduler_nodes", "num_layers_per_stage", "gradient_checkpoint_config")),
        "enable_metadata_cache": True,
        "make_vocab_size_divisible_by": 64,
        "dp_outside": True,
        "overlap_p2p": True,
        **dict.fromkeys(("overlap_allgather", "fp8_communication", "use_fp8"), False),
        "inner_ring_size": None,
    },
}
CLASSES = {
    "torch_ddp": TorchDDPPlugin,
    "low_level_zero": LowLevelZeroPlugin,
    "gemini": GeminiPlugin,
    "torch_fsdp": TorchFSDPPlugin,
    "hybrid_parallel": HybridParallelPlugin,
}
_OWN = [*inspect.signature(HybridParallelPlugin).parameters, *SYNONYMS, *CONVERTED]
TABLES = {
    **{one.__name__.rpartition(".")[2]: one.KEYWORDS for one in (torch_ddp, low_level_zero, gemini, torch_fsdp)},
    "hybrid_parallel": Preset(dict.fromkeys(_OWN, ""), HINTS, UNSUPPORTED),
}
PRESETS = [name for name in COLOSSAL if name != "hybrid_parallel"]


@pytest.mark.parametrize("name", COLOSSAL)
def test_every_keyword_is_taken_a_hint_or_refused(name):
    table, theirs = TABLES[name], set(COLOSSAL[name])
    columns = [set(table.takes), set(table.hints), set(table.refused)]
    assert theirs <= set.union(*columns)
    assert sum(len(column & theirs) for column in columns) == len(theirs)
    if name in PRESETS:
        # The table has no more names than the signature, which may have a precision that theirs lacks.
        own = set(inspect.signature(CLASSES[name]).parameters) - {"more"}
        assert set.union(*columns) | {"precision"} == own | {"precision"} == theirs | {"precision"}


@pytest.mark.parametrize("name", COLOSSAL)
def test_every_keyword_at_its_default_is_taken_in_their_order(name):
    plugin = CLASSES[name](**COLOSSAL[name])
    assert plugin.settings.pipeline.num_microbatches == 1
    if name in PRESETS:
        assert CLASSES[name](*COLOSSAL[name].values()).settings == plugin.settings


@pytest.mark.parametrize("name", COLOSSAL)
def test_hints_have_no_effect(name):
    plain = CLASSES[name]().settings
    switches = {name: default for name, default in COLOSSAL[name].items() if isinstance(default, bool)}
    values = {
        hint: not switches[hint] if hint in switches else object() for hint in TABLES[name].hints & {*COLOSSAL[name]}
    }
    assert values
    assert CLASSES[name](**values).settings == plain


@pytest.mark.parametrize("name", COLOSSAL)
def test_what_asks_for_more_is_refused_with_the_way_out(name):
    for keyword, (values, instead) in TABLES[name].refused.items():
        if keyword in COLOSSAL[name]:
            value = not values[0] if isinstance(values[0], bool) else 7
            with pytest.raises(ConfigError) as refusal:
                CLASSES[name](**{keyword: value})
            text = f"{keyword} is not supported yet: got {keyword}={value!r}. {instead}Leave it out, or pass "
            assert str(refusal.value) == f"{text}{keyword}={values[0]!r}."


def trained(booster):
    model = TiedModel()
    parts = booster.boost(model, two_groups(model.parameters()), criterion=cross_entropy, sample=SAMPLE)
    losses = []
    for batch in batches(5, 8):
        losses.append(step(booster, parts.model, parts.optimizer, batch))
        parts.optimizer.step()
    with booster.unsharded(parts.model):
        return losses, weights_of(parts.model)


HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
IN_HALF = {"precision": "bf16", "communication_dtype": torch.float16}
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
        {"zero_stage": 2, "precision": "bf16", "max_norm": 0.5, "offload_optimizer": 1.0}
        | {"ddp_bucket_cap_mb": 2.0, "hysteresis": 2},
    ),
    (
        "low_level_zero",
        {"initial_scale": 8.0, "growth_interval": 2, "communication_dtype": torch.float16, "extra_dp_size": 2},
        {"zero_stage": 1, "precision": "fp16", "initial_scale": 8.0, "growth_interval": 2, "zero_size": 2}
        | {"communication_dtype": torch.float16, "ddp_bucket_cap_mb": 48.0, "hysteresis": 2},
    ),
    ("gemini", {"max_norm": 0.5}, {"zero_stage": 3, "precision": "fp16", "hysteresis": 2, "max_norm": 0.5}),
    (
        "gemini",
        {"shard_param_frac": 0, "offload_optim_frac": 0.5, "precision": "bf16", "extra_dp_size": 4},
        {"zero_stage": 2, "offload_optimizer": 0.5, "precision": "bf16", "hysteresis": 2, "zero_size": 1},
    ),
    (
        "gemini",
        {"tp_size": 2, "extra_dp_size": 1, "precision": "fp32", "placement_policy": "cuda"},
        {"tp_size": 2, "zero_stage": 3, "hysteresis": 2},
    ),
    ("torch_fsdp", {}, {"zero_stage": 3}),
    (
        "torch_fsdp",
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "mixed_precision": HALF, "zero_size": 2},
        {"zero_stage": 2, **IN_HALF, "zero_size": 2},
    ),
    ("torch_fsdp", {"sharding_strategy": ShardingStrategy.NO_SHARD, "cpu_offload": CPUOffload(False)}, {}),
    ("torch_fsdp", {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, {"zero_stage": 3, "zero_size": 4}),
    ("torch_fsdp", {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2}, {"zero_stage": 2, "zero_size": 4}),
    (
        "hybrid_parallel",
        {"zero_stage": 1, "cpu_offload": True, "zero_bucket_size_in_m": 1, "enable_flash_attention": True},
        {"zero_stage": 1, "offload_optimizer": 1.0, "ddp_bucket_cap_mb": 4.0},
    ),
    ("hybrid_parallel", {"zero_bucket_size_in_m": 1, "pp_style": "1f1b"}, {"schedule": "1f1b"}),
]


# One of each plugin.
TRAINED = (1, 3, 5, 8, 13)


def made(name, keywords):
    """By object and by name."""
    return (
        Booster(plugin=CLASSES[name](**keywords), device="cpu"),
        Booster(plugin=name, plugin_kwargs=keywords, device="cpu"),
    )


def test_plugins_have_the_settings_that_they_map_to():
    def run():
        for name, keywords, settings in MAPPED:
            plain = HybridParallelPlugin(**settings)
            for booster in made(name, keywords):
                plugin = booster.plugin
                assert (type(plugin), plugin.settings) == (CLASSES[name], plain.settings), (name, keywords)
                assert (plugin.precision, plugin.zero_stage) == (plain.precision, plain.zero_stage)

    Loopback(4).run(run)


@pytest.mark.parametrize(("name", "keywords", "settings"), [MAPPED[index] for index in TRAINED])
def test_plugins_train_as_the_settings_that_they_map_to(name, keywords, settings):
    def run():
        losses, weights = trained(Booster(plugin=HybridParallelPlugin(**settings), device="cpu"))
        assert len(set(losses)) == 5
        for booster in made(name, keywords):
            its_losses, its_weights = trained(booster)
            assert its_losses == losses
            assert_same(its_weights, weights)

    Loopback(2).run(run)


@pytest.mark.parametrize("name", COLOSSAL)
def test_a_booster_makes_them_by_name(name):
    made = Booster(plugin=name, mixed_precision="bf16").plugin
    assert (type(made), made.precision) == (CLASSES[name], "bf16")


@pytest.mark.parametrize("make", [TorchDDPPlugin, TorchFSDPPlugin, partial(HybridParallelPlugin, precision=None)])
def test_a_plugin_without_a_precision_takes_that_of_the_booster(make):
    plugin = make()
    assert (plugin.precision, plugin.control_precision()) == ("fp32", False)
    booster = Booster(plugin=plugin, mixed_precision="fp16", device="cpu")
    zero = plugin.settings.zero
    assert (plugin.precision, str(plugin.settings.precision), plugin.settings.zero) == ("fp16", "fp16", zero)
    model = booster.boost(torch.nn.Linear(2, 2)).model
    assert model.weight.dtype == torch.float16
    Booster(plugin=plugin, mixed_precision="fp16")
    Booster(plugin=plugin)
    assert plugin.precision == "fp16"
    text = "^this plugin has boosted a model in fp16: got mixed_precision='bf16'. Make another "
    with pytest.raises(ConfigError, match=f"{text}{type(plugin).__name__} for it.$"):
        Booster(plugin=plugin, mixed_precision="bf16")
    with pytest.raises(ConfigError, match=r"^precision must be one of fp32, fp16, bf16: got 'fp8'\."):
        Booster(plugin=make(), mixed_precision="fp8")


def test_a_plugin_with_a_precision_keeps_it():
    for plugin in (GeminiPlugin(), TorchDDPPlugin(precision="bf16"), TorchFSDPPlugin(mixed_precision=HALF)):
        assert plugin.control_precision()
        before = plugin.settings
        with pytest.raises(
            ConfigError, match=r"^precision is a setting of the plugin: got mixed_precision='fp32' and a \w+\."
        ):
            Booster(plugin=plugin, mixed_precision="fp32")
        assert plugin.settings == before


@pytest.mark.parametrize(
    ("name", "keywords", "text"),
    [
        ("torch_ddp", {"bucket_cap": 1}, "TorchDDPPlugin has no setting 'bucket_cap'."),
        ("low_level_zero", {"max_nrm": 1}, "LowLevelZeroPlugin has no setting 'max_nrm'."),
        ("torch_ddp", {"zero_stage": 1}, "TorchDDPPlugin sets zero_stage=0 itself: got zero_stage=1. Leave it out"),
        ("torch_ddp", {"pp_size": 2}, "TorchDDPPlugin sets pp_size=1 itself"),
        ("low_level_zero", {"zero_stage": 2}, "LowLevelZeroPlugin sets zero_stage=1 itself"),
        ("gemini", {"pp_size": 2}, "GeminiPlugin sets pp_size=1 itself"),
        ("torch_fsdp", {"zero_stage": 2}, "TorchFSDPPlugin sets zero_stage=3 itself"),
        (
            "low_level_zero",
            {"extra_dp_size": 3},
            "extra_dp_size must divide the number of replicas: got extra_dp_size=3",
        ),
        ("gemini", {"extra_dp_size": 0}, "extra_dp_size must be an integer of at least 1: got extra_dp_size=0."),
        ("low_level_zero", {"verbose": 1}, "verbose must be True or False: got verbose=1."),
        ("torch_ddp", {"static_graph": None}, "static_graph must be True or False: got static_graph=None."),
    ],
)
def test_wrong_keywords_are_refused(name, keywords, text):
    for make in (CLASSES[name], partial(Plugin.from_name, name)):
        with pytest.raises(ConfigError) as refusal:
            make(**keywords)
        assert str(refusal.value).startswith(text)


def test_a_misspelt_keyword_has_a_suggestion():
    with pytest.raises(ConfigError, match=r" It takes: .*bucket_cap_mb, .* Did you mean bucket_cap_mb\?$"):
        TorchDDPPlugin(bucket_cap=1)
