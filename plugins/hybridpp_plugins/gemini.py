"""The keywords of Colossal-AI's Gemini plugin, as settings of HybridParallelPlugin."""

from collections.abc import Mapping
from typing import Any, Literal

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
from hybridpp_plugins.unsupported import UnsupportedSetting

_INSTEAD = "Use placement_policy='static', with offload_optim_frac for what lies in host memory."
_POLICIES = {
    "auto": "does not move weights and optimizer state by measured memory",
    "cpu": "does not keep weights in host memory",
}


def _check_policy(given: Mapping[str, Any]) -> dict[str, Any]:
    policy = given["placement_policy"]
    if policy in ("static", "cuda"):
        if policy == "cuda" and given["offload_optim_frac"]:
            raise ConfigError(
                "placement_policy='cuda' keeps everything on the device: got offload_optim_frac="
                f"{given['offload_optim_frac']!r}. Use placement_policy='static'."
            )
        return {}
    if isinstance(policy, str) and policy in _POLICIES:
        raise ConfigError(f"placement_policy={policy!r} is not supported: GeminiPlugin {_POLICIES[policy]}. {_INSTEAD}")
    raise ConfigError(f"placement_policy must be 'static' or 'cuda': got placement_policy={policy!r}. {_INSTEAD}")


def _zero_stage(given: Mapping[str, Any]) -> dict[str, Any]:
    share = given["shard_param_frac"]
    if isinstance(share, bool) or share not in (0, 1):
        raise ConfigError(
            f"shard_param_frac must be 1 or 0: got shard_param_frac={share!r}. All weights are divided (1), and "
            "gathered by unit where they are used, or none (0)."
        )
    return {"zero_stage": 3 if share == 1 else 2}


KEYWORDS = Preset(
    takes={
        **same("precision", *LOSS_SCALE, "max_norm", "tp_size"),
        **same("enable_all_optimization", "enable_sequence_parallelism"),
        "placement_policy": _check_policy,
        "shard_param_frac": _zero_stage,
        "offload_optim_frac": "offload_optimizer",
        "extra_dp_size": zero_size_of,
    },
    hints=frozenset(
        {
            *("chunk_config_dict", "chunk_init_device", "search_range_m", "hidden_dim", "min_chunk_size_m", "memstats"),
            *("warmup_non_model_data_ratio", "steady_cuda_cap_ratio", "gpu_margin_mem_ratio", "pin_memory"),
            *("enable_gradient_accumulation", "max_prefetch", "enable_async_reduce", "strict_ddp_mode", "verbose"),
            *("enable_fused_normalization", "enable_flash_attention", "enable_jit_fused", "force_outputs_fp32"),
        }
    ),
    refused={
        "offload_param_frac": UnsupportedSetting(
            (0.0, 0), "Weights that a rank updates stay on its device; offload_optim_frac is for the rest. "
        ),
        "master_weights": MASTER_WEIGHTS,
        "norm_type": NORM_TYPE,
        "use_fp8": FP8,
        "fp8_communication": FP8,
    },
)


class GeminiPlugin(HybridParallelPlugin):
    """Divides weights, gradients and the update over replicas: ``zero_stage=3``, by Colossal-AI's keywords.

    Collective: every rank of the world must construct it, with the same settings.

    Args:
        placement_policy: ``"static"``, or ``"cuda"`` with nothing in host memory. Others are refused.
        shard_param_frac: 1: all weights are divided, and gathered where they are used; 0: ``zero_stage=2``.
        offload_optim_frac: ``offload_optimizer``: the share of the optimizer's state in host memory.
        precision, max_norm, tp_size, enable_all_optimization, enable_sequence_parallelism: as in HybridParallelPlugin.
        min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: as in HybridParallelPlugin.
        initial_scale: the same; 2**12, not Colossal-AI's 2**16, with which the first steps overflow.
        extra_dp_size: number of sets of replicas, each of which divides everything: ``zero_size`` is that of a set.
        chunk_config_dict, chunk_init_device, search_range_m, hidden_dim, min_chunk_size_m, memstats: without effect;
            weights are gathered by the model's units.
        warmup_non_model_data_ratio, steady_cuda_cap_ratio, gpu_margin_mem_ratio: without effect; they are of the policy
            ``"auto"``.
        enable_async_reduce, pin_memory, force_outputs_fp32, strict_ddp_mode, verbose: without effect.
        enable_gradient_accumulation, max_prefetch: without effect. Gradients always add up until ``optimizer.step()``,
            and one unit is gathered ahead.
        enable_fused_normalization, enable_flash_attention, enable_jit_fused: without effect; the kernels are those of
            the model.
        offload_param_frac, master_weights, norm_type, use_fp8, fp8_communication: only the defaults are supported.
        more: further settings of HybridParallelPlugin, but for those that are set by the above.

    Raises:
        ConfigError: a setting is unknown, wrong or not supported.

    Example:
        >>> plugin = GeminiPlugin(precision="bf16", offload_optim_frac=0.5)
        >>> plugin.zero_stage, plugin.settings.zero.offload_optimizer
        (3, 0.5)
    """

    @line_by_line
    def __init__(
        self,
        chunk_config_dict: Mapping[str, Any] | None = None,
        chunk_init_device: Any = None,
        placement_policy: Literal["static", "cuda"] = "static",
        enable_gradient_accumulation: bool = False,
        max_prefetch: int = 0,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        precision: Precision | Literal["fp32", "fp16", "bf16"] = "fp16",
        master_weights: bool = True,
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        search_range_m: int = 32,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        memstats: Any = None,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2.0**12,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        tp_size: int = 1,
        extra_dp_size: int = 1,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_sequence_parallelism: bool = False,
        enable_jit_fused: bool = False,
        enable_async_reduce: bool = True,
        use_fp8: bool = False,
        verbose: bool = False,
        fp8_communication: bool = False,
        **more: Any,
    ):
        settings = KEYWORDS.settings(GeminiPlugin, given_to(locals())) | {"pp_size": 1}
        super().__init__(**with_more(GeminiPlugin, settings, more))
