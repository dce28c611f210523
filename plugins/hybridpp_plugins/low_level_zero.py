"""The keywords of Colossal-AI's ZeRO plugin, as settings of HybridParallelPlugin."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from hybridpp.config import Precision
from hybridpp.errors import ConfigError
from hybridpp_plugins.hybrid_parallel import HybridParallelPlugin
from hybridpp_plugins.preset import (
    FP8,
    LOSS_SCALE,
    MASTER_WEIGHTS,
    NORM_TYPE,
    Preset,
    given_to,
    same,
    with_more,
    zero_size_of,
)
from hybridpp_plugins.signature import line_by_line
from hybridpp_plugins.unsupported import UNSUPPORTED


def _zero_stage(given: Mapping[str, Any]) -> dict[str, Any]:
    stage = given["stage"]
    if type(stage) is not int or stage not in (1, 2):
        raise ConfigError(
            f"stage must be 1 or 2: got stage={stage!r}. Use GeminiPlugin, or HybridParallelPlugin(zero_stage=3), to "
            "divide the weights, too, or TorchDDPPlugin to divide nothing."
        )
    return {"zero_stage": stage}


def _bucket_size(given: Mapping[str, Any]) -> dict[str, Any]:
    size = given["reduce_bucket_size_in_m"]
    if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
        raise ConfigError(
            f"reduce_bucket_size_in_m must be a number above 0: got reduce_bucket_size_in_m={size!r}. Leave it out for "
            "12."
        )
    return {"ddp_bucket_cap_mb": 4.0 * size}


KEYWORDS = Preset(
    takes={
        **same("precision", *LOSS_SCALE, "max_norm", "communication_dtype"),
        "stage": _zero_stage,
        "reduce_bucket_size_in_m": _bucket_size,
        "cpu_offload": lambda given: {"offload_optimizer": float(given["cpu_offload"])},
        "extra_dp_size": zero_size_of,
    },
    hints=frozenset({"overlap_communication", "verbose", "cast_inputs"}),
    refused={
        "norm_type": NORM_TYPE,
        "overlap_allgather": UNSUPPORTED["overlap_allgather"],
        "master_weights": MASTER_WEIGHTS,
        "fp8_communication": FP8,
        "use_fp8": FP8,
    },
)


class LowLevelZeroPlugin(HybridParallelPlugin):
    """Divides the update over replicas: HybridParallelPlugin with ``zero_stage`` 1 or 2, by Colossal-AI's keywords.

    Collective: every rank of the world must construct it, with the same settings.

    Args:
        stage: 1: optimizer state and fp32 masters are divided; 2: also gradients.
        precision, max_norm, communication_dtype: as in HybridParallelPlugin.
        min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: as in HybridParallelPlugin.
        initial_scale: the same; 2**12, not Colossal-AI's 2**32, with which the first 20 steps overflow.
        reduce_bucket_size_in_m: size of the buffers that gradients are reduced in, in units of 2**20 fp32 numbers:
            ``ddp_bucket_cap_mb`` is four times that.
        cpu_offload: whether all of the optimizer's state is in host memory: ``offload_optimizer=1.0``.
        extra_dp_size: number of sets of replicas, each of which divides the update: ``zero_size`` is that of a set.
        overlap_communication, verbose, cast_inputs: without effect.
        norm_type, overlap_allgather, master_weights, fp8_communication, use_fp8: only the defaults are supported.
        more: further settings of HybridParallelPlugin, but for those that are set by the above.

    Raises:
        ConfigError: a setting is unknown, wrong or not supported.

    Example:
        >>> plugin = LowLevelZeroPlugin(stage=2, precision="bf16", cpu_offload=True)
        >>> plugin.zero_stage, plugin.settings.zero.offload_optimizer
        (2, 1.0)
    """

    @line_by_line
    def __init__(
        self,
        stage: Literal[1, 2] = 1,
        precision: Precision | Literal["fp32", "fp16", "bf16"] = "fp16",
        initial_scale: float = 2.0**12,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        reduce_bucket_size_in_m: float = 12,
        communication_dtype: Literal["fp32", "fp16", "bf16"] | torch.dtype | None = None,
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        cpu_offload: bool = False,
        master_weights: bool = True,
        verbose: bool = False,
        cast_inputs: bool = True,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        extra_dp_size: int = 1,
        **more: Any,
    ):
        settings = KEYWORDS.settings(LowLevelZeroPlugin, given_to(locals()))
        settings |= {"tp_size": 1, "pp_size": 1}
        super().__init__(**with_more(LowLevelZeroPlugin, settings, more))
