import re
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from hybridpp import config as settings_module
from hybridpp.config import (
    LossScaleConfig,
    OptimizerConfig,
    ParallelConfig,
    PartitionConfig,
    PipelineConfig,
    PipelineGradientCheckpointConfig,
    Precision,
    require_switches,
)
from hybridpp.errors import ConfigError


def refused(text):
    return pytest.raises(ConfigError, match=f"^{re.escape(text)}$")


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_precision_is_its_name(name):
    assert Precision.parse(name) == name
    assert str(Precision.parse(name)) == name


@pytest.mark.parametrize("name", ["FP16", "float16", "", None])
def test_unknown_precision_lists_the_valid_ones(name):
    with refused(f"precision is one of fp32, fp16, bf16: got {name!r}."):
        Precision.parse(name)


@pytest.mark.parametrize(
    ("cls", "settings", "text"),
    [
        (ParallelConfig, {"pp_size": 0}, "pp_size is a whole number of ranks, at least 1: got pp_size=0."),
        (ParallelConfig, {"pp_size": 2.0}, "pp_size is a whole number of ranks, at least 1: got pp_size=2.0."),
        (ParallelConfig, {"tp_size": -1}, "tp_size is a whole number of ranks, at least 1: got tp_size=-1."),
        (ParallelConfig, {"tp_size": "2"}, "tp_size is a whole number of ranks, at least 1: got tp_size='2'."),
        (
            ParallelConfig,
            {"tensor_parallel_plan": ["*.q_proj"]},
            "tensor_parallel_plan is a dict of patterns of module names and styles, like {'*.q_proj': 'column', "
            "'*.o_proj': 'row'}: got ['*.q_proj'].",
        ),
        (
            ParallelConfig,
            {"zero_stage": 1},
            "sharded optimizer state is not built yet: got zero_stage=1. Use zero_stage=0.",
        ),
        (
            PipelineConfig,
            {},
            "give exactly one of num_microbatches and microbatch_size: got num_microbatches=None, "
            "microbatch_size=None.",
        ),
        (
            PipelineConfig,
            {"num_microbatches": 2, "microbatch_size": 3},
            "give exactly one of num_microbatches and microbatch_size: got num_microbatches=2, microbatch_size=3.",
        ),
        (
            PipelineConfig,
            {"num_microbatches": 0},
            "num_microbatches is a whole number, at least 1: got num_microbatches=0.",
        ),
        (
            PipelineConfig,
            {"microbatch_size": 1.5},
            "microbatch_size is a whole number, at least 1: got microbatch_size=1.5.",
        ),
        (
            PartitionConfig,
            {"layers_per_stage": 4},
            "layers_per_stage gives every stage a whole number, at least 1: got 4.",
        ),
        (LossScaleConfig, {"initial_scale": 0}, "loss scaling needs initial_scale > 0: got initial_scale=0."),
        (LossScaleConfig, {"min_scale": -1.0}, "loss scaling needs min_scale > 0: got min_scale=-1.0."),
        (LossScaleConfig, {"growth_interval": 0}, "loss scaling needs growth_interval > 0: got growth_interval=0."),
        (LossScaleConfig, {"hysteresis": 0}, "loss scaling needs hysteresis > 0: got hysteresis=0."),
        (
            LossScaleConfig,
            {"growth_factor": 1.0},
            "loss scaling needs growth_factor > 1 and 0 < backoff_factor < 1: "
            "got growth_factor=1.0, backoff_factor=0.5.",
        ),
        (
            LossScaleConfig,
            {"backoff_factor": 1.0},
            "loss scaling needs growth_factor > 1 and 0 < backoff_factor < 1: "
            "got growth_factor=2.0, backoff_factor=1.0.",
        ),
        (
            LossScaleConfig,
            {"backoff_factor": 0.0},
            "loss scaling needs growth_factor > 1 and 0 < backoff_factor < 1: "
            "got growth_factor=2.0, backoff_factor=0.0.",
        ),
        (
            LossScaleConfig,
            {"initial_scale": 2.0, "min_scale": 4.0},
            "loss scaling needs min_scale <= initial_scale <= max_scale: got 4.0, 2.0, 4294967296.0.",
        ),
        (
            LossScaleConfig,
            {"initial_scale": 8.0, "max_scale": 4.0},
            "loss scaling needs min_scale <= initial_scale <= max_scale: got 1.0, 8.0, 4.0.",
        ),
        (OptimizerConfig, {"max_norm": -1.0}, "max_norm is a gradient norm, or 0 for no clipping: got max_norm=-1.0."),
        (
            OptimizerConfig,
            {"ddp_bucket_cap_mb": 0},
            "gradient reduction needs ddp_bucket_cap_mb > 0: got ddp_bucket_cap_mb=0.",
        ),
    ],
)
def test_refused_settings(cls, settings, text):
    required = {"tp_size": 1, "pp_size": 1} if cls is ParallelConfig else {}
    with refused(text):
        cls(**{**required, **settings})


@pytest.mark.parametrize(
    "config",
    [
        ParallelConfig(tp_size=1, pp_size=1),
        PipelineConfig(microbatch_size=1),
        LossScaleConfig(initial_scale=1.0, min_scale=1.0, max_scale=1.0),
        OptimizerConfig(),
    ],
    ids=lambda config: type(config).__name__,
)
def test_settings_at_the_edge_are_taken_and_then_frozen(config):
    name = next(iter(vars(config)))
    with pytest.raises(FrozenInstanceError):
        setattr(config, name, 2)


@pytest.mark.parametrize(("world_size", "pp_size", "dp_size"), [(1, 1, 1), (4, 1, 4), (8, 2, 4), (6, 6, 1)])
def test_what_the_pipeline_leaves_is_replicas(world_size, pp_size, dp_size):
    assert ParallelConfig(tp_size=1, pp_size=pp_size).dp_size(world_size) == dp_size


@pytest.mark.parametrize(("world_size", "advice"), [(6, "4 or 8"), (1, "4"), (9, "8 or 12")])
def test_a_world_that_does_not_fit_names_the_nearest_sizes(world_size, advice):
    with refused(
        f"world size must be a multiple of tp_size * pp_size: got world_size={world_size}, tp_size=1, pp_size=4. "
        f"Start {advice} processes, or change the sizes."
    ):
        ParallelConfig(tp_size=1, pp_size=4).dp_size(world_size)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"gradient_checkpointing_ratio": 0.5, "num_ckpt_layers_per_stage": [1, 2]},
            "give gradient_checkpointing_ratio or num_ckpt_layers_per_stage, not both: got 0.5 and [1, 2].",
        ),
        (
            {"gradient_checkpointing_ratio": 1.5},
            "gradient_checkpointing_ratio is a share, from 0 to 1: got gradient_checkpointing_ratio=1.5.",
        ),
        (
            {"num_ckpt_layers_per_stage": [1, -1]},
            "num_ckpt_layers_per_stage gives every stage a whole number, at least 0: got [1, -1].",
        ),
        (
            {"num_ckpt_layers_per_stage": 3},
            "num_ckpt_layers_per_stage gives every stage a whole number, at least 0: got 3.",
        ),
        (
            {"max_stored_microbatches": -1},
            "max_stored_microbatches is a whole number, at least 0, or None: got max_stored_microbatches=-1.",
        ),
    ],
)
def test_what_is_recomputed_is_checked_however_it_is_given(settings, text):
    with refused(text):
        PipelineGradientCheckpointConfig(**settings)
    with refused(text):
        PipelineConfig(num_microbatches=1, gradient_checkpoint_config=settings)


@pytest.mark.parametrize("given", [True, {"ratio": 0.5}])
def test_what_says_nothing_about_recomputing_is_refused(given):
    with refused(
        "gradient_checkpoint_config is a PipelineGradientCheckpointConfig, or a dict of gradient_checkpointing_ratio, "
        f"num_ckpt_layers_per_stage, max_stored_microbatches: got {given!r}."
    ):
        PipelineConfig(num_microbatches=1, gradient_checkpoint_config=given)


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({}, [7, 7]),
        ({"gradient_checkpointing_ratio": 0.5}, [3, 3]),
        ({"gradient_checkpointing_ratio": 0}, [0, 0]),
        ({"num_ckpt_layers_per_stage": (2, 0)}, [2, 0]),
        ({"max_stored_microbatches": 0}, [7, 7]),
    ],
)
def test_how_many_blocks_are_recomputed(settings, counts):
    config = PipelineGradientCheckpointConfig(**settings)
    assert [config.num_recomputed(stage, 7) for stage in range(2)] == counts
    assert PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.29).num_recomputed(0, 100) == 29


NEEDED = {ParallelConfig: {"tp_size": 2, "pp_size": 1}, PipelineConfig: {"num_microbatches": 1}}
SWITCHES = [
    (cls, field.name)
    for cls in vars(settings_module).values()
    if is_dataclass(cls)
    for field in fields(cls)
    if isinstance(field.default, bool)
]


def test_there_are_switches():
    assert {name for _, name in SWITCHES} >= {"enable_sequence_parallelism", "fp32_norms", "fp32_losses"}


@pytest.mark.parametrize("value", ["yes", "False", "", 1, 0, None, [True]])
@pytest.mark.parametrize(("cls", "name"), SWITCHES)
def test_a_switch_is_true_or_false(cls, name, value):
    with refused(f"{name} is True or False: got {name}={value!r}. Pass one of these, no word or number."):
        cls(**NEEDED.get(cls, {}), **{name: value})
    for right in (True, False):
        assert getattr(cls(**NEEDED.get(cls, {}), **{name: right}), name) is right


def test_switches_are_checked_in_order():
    require_switches(first=True, second=False)
    with refused("second is True or False: got second='no'. Pass one of these, no word or number."):
        require_switches(first=True, second="no", third="no")
