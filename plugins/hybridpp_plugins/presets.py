"""Other libraries' data-parallel plugins: their keywords, mapped to settings of HybridParallelPlugin."""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

import torch

from hybridpp.config import Precision, require_bools
from hybridpp.errors import ConfigError
from hybridpp_plugins.hybrid_parallel import HybridParallelPlugin
from hybridpp_plugins.signature import line_by_line
from hybridpp_plugins.unsupported import UnsupportedSetting, refuse_value

_FP8 = UnsupportedSetting((False,), "Use precision='bf16'. ")
_DDP_UNSUPPORTED = {"fp8_communication": _FP8}
_ZERO_UNSUPPORTED = {
    "norm_type": UnsupportedSetting((2.0, 2), "Gradients are clipped to their L2 norm. "),
    "overlap_allgather": UnsupportedSetting((False,)),
    "master_weights": UnsupportedSetting((True,), "Half-precision weights are updated in fp32. "),
    "fp8_communication": _FP8,
    "use_fp8": _FP8,
    "extra_dp_size": UnsupportedSetting((1,), "The update is divided over all replicas. "),
}


class TorchDDPPlugin(HybridParallelPlugin):
    """Trains a complete replica on every rank: HybridParallelPlugin with ``zero_stage=0``, by DDP's keywords.

    Collective: every rank of the world must construct it, with the same settings.

    Args:
        broadcast_buffers: as in HybridParallelPlugin.
        bucket_cap_mb: its ``ddp_bucket_cap_mb``.
        find_unused_parameters, check_reduction, gradient_as_bucket_view, static_graph: without effect; parameters that
            a step does not use are always allowed.
        fp8_communication: only False is supported.
        precision: as in HybridParallelPlugin; ``Booster(plugin="torch_ddp", mixed_precision=...)`` sets it.
        more: further settings of HybridParallelPlugin, but for ``tp_size``, ``pp_size`` and ``zero_stage``.

    Raises:
        ConfigError: a setting is unknown, wrong or not supported.

    Example:
        >>> plugin = TorchDDPPlugin(bucket_cap_mb=50, max_norm=1.0)
        >>> plugin.zero_stage, plugin.settings.optimizer.ddp_bucket_cap_mb
        (0, 50)
    """

    @line_by_line
    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        fp8_communication: bool = False,
        *,
        precision: Precision | Literal["fp32", "fp16", "bf16"] = "fp32",
        **more: Any,
    ):
        require_bools(
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            fp8_communication=fp8_communication,
        )
        _refuse(_DDP_UNSUPPORTED, {"fp8_communication": fp8_communication})
        settings = {
            "tp_size": 1,
            "pp_size": 1,
            "zero_stage": 0,
            "broadcast_buffers": broadcast_buffers,
            "ddp_bucket_cap_mb": bucket_cap_mb,
            "precision": precision,
        }
        super().__init__(**_merged(TorchDDPPlugin, settings, more))


class LowLevelZeroPlugin(HybridParallelPlugin):
    """Divides the update over replicas: HybridParallelPlugin with ``zero_stage`` 1 or 2, by Colossal-AI's keywords.

    Collective: every rank of the world must construct it, with the same settings.

    Args:
        stage: 1: optimizer state and fp32 masters are divided; 2: also gradients.
        precision, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale, max_norm,
            communication_dtype: as in HybridParallelPlugin.
        initial_scale: the same; 2**12, not Colossal-AI's 2**32, with which the first 20 steps overflow.
        reduce_bucket_size_in_m: size of the buffers that gradients are reduced in, in units of 2**20 fp32 numbers:
            ``ddp_bucket_cap_mb`` is four times that.
        cpu_offload: whether all of the optimizer's state is in host memory: ``offload_optimizer=1.0``.
        overlap_communication, verbose, cast_inputs: without effect.
        norm_type, overlap_allgather, master_weights, fp8_communication, use_fp8, extra_dp_size: only the defaults are
            supported.
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
        given = {name: value for name, value in locals().items() if name not in ("self", "more", "__class__")}
        switches = inspect.signature(LowLevelZeroPlugin).parameters
        require_bools(**{name: given[name] for name in given if isinstance(switches[name].default, bool)})
        _refuse(_ZERO_UNSUPPORTED, given)
        _check_zero(stage, reduce_bucket_size_in_m)
        same = inspect.signature(HybridParallelPlugin).parameters
        settings = {
            **{name: value for name, value in given.items() if name in same},
            "tp_size": 1,
            "pp_size": 1,
            "zero_stage": stage,
            "ddp_bucket_cap_mb": 4.0 * reduce_bucket_size_in_m,
            "offload_optimizer": 1.0 if cpu_offload else 0.0,
        }
        super().__init__(**_merged(LowLevelZeroPlugin, settings, more))


def _check_zero(stage: Any, bucket_size: Any) -> None:
    if type(stage) is not int or stage not in (1, 2):
        raise ConfigError(
            f"stage must be 1 or 2: got stage={stage!r}. Use HybridParallelPlugin(zero_stage=3) to divide the weights, "
            "too, or TorchDDPPlugin to divide nothing."
        )
    if isinstance(bucket_size, bool) or not isinstance(bucket_size, int | float) or not bucket_size > 0:
        raise ConfigError(
            "reduce_bucket_size_in_m must be a number above 0: got "
            f"reduce_bucket_size_in_m={bucket_size!r}. Leave it out for 12."
        )


def _refuse(table: Mapping[str, UnsupportedSetting], given: Mapping[str, Any]) -> None:
    for name, setting in table.items():
        refuse_value(name, given[name], setting)


def _merged(preset: type[HybridParallelPlugin], settings: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` of the preset and ``more`` of the user, who may not set one of both."""
    own = [name for name in inspect.signature(preset).parameters if name != "more"]
    engine = [name for name in inspect.signature(HybridParallelPlugin).parameters if name != "other"]
    known = sorted({*own, *engine} - (settings.keys() - set(own)))
    for name in more:
        if name in settings:
            raise ConfigError(
                f"{preset.__name__} sets {name}={settings[name]!r} itself: got {name}={more[name]!r}. Leave it out, or "
                "use HybridParallelPlugin."
            )
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(
                f"{preset.__name__} has no setting {name!r}. It takes: {', '.join(known)}."
                + (f" Did you mean {near[0]}?" if near else "")
            )
    return {**settings, **more}
