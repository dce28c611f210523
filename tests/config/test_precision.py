"""Precision, loss scale and optimizer settings."""

import pytest
from refusals import refused

from hybridpp.config import LossScaleConfig, OptimizerConfig, Precision


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_precision_is_its_name(name):
    assert Precision.parse(name) == name
    assert str(Precision.parse(name)) == name


@pytest.mark.parametrize("name", ["FP16", "float16", "", None])
def test_unknown_precision_lists_the_valid_ones(name):
    with refused(f"precision must be one of fp32, fp16, bf16: got {name!r}."):
        Precision.parse(name)


@pytest.mark.parametrize(
    ("cls", "settings", "text"),
    [
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
        (
            OptimizerConfig,
            {"max_norm": -1.0},
            "max_norm must be at least 0, where 0 means no clipping: got max_norm=-1.0.",
        ),
        (
            OptimizerConfig,
            {"ddp_bucket_cap_mb": 0},
            "gradient reduction needs ddp_bucket_cap_mb > 0: got ddp_bucket_cap_mb=0.",
        ),
    ],
)
def test_refused_loss_scales_and_optimizer_settings(cls, settings, text):
    with refused(text):
        cls(**settings)
