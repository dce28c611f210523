"""FullyShardedDataParallel's keywords, as settings of HybridParallelPlugin."""

from collections.abc import Mapping
from typing import Any, Literal

from hybridpp.config import Precision
from hybridpp.errors import ConfigError
from hybridpp_plugins.hybrid_parallel import HybridParallelPlugin
from hybridpp_plugins.preset import FP8, Preset, given_to, with_more
from hybridpp_plugins.signature import line_by_line
from hybridpp_plugins.unsupported import UnsupportedSetting

# By the names of torch's ShardingStrategy: the stage, and which replicas divide.
_STRATEGIES: dict[str, tuple[int, Literal["host"] | None]] = {
    "FULL_SHARD": (3, None),
    "SHARD_GRAD_OP": (2, None),
    "NO_SHARD": (0, None),
    "HYBRID_SHARD": (3, "host"),
    "_HYBRID_SHARD_ZERO2": (2, "host"),
}
_PRECISIONS = {"None": "fp32", "torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}


def _zero(given: Mapping[str, Any]) -> dict[str, Any]:
    strategy = given["sharding_strategy"]
    name = "FULL_SHARD" if strategy is None else getattr(strategy, "name", strategy)
    if not isinstance(name, str) or name not in _STRATEGIES:
        raise ConfigError(
            f"sharding_strategy must be a member of torch's ShardingStrategy, one of {', '.join(_STRATEGIES)}: got "
            f"{strategy!r}."
        )
    stage, zero_size = _STRATEGIES[name]
    return {"zero_stage": stage} | ({} if zero_size is None else {"zero_size": zero_size})


def _precision(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of torch's MixedPrecision, or of the keyword that other plugins have."""
    mixed, precision = given["mixed_precision"], given["precision"]
    if mixed is None:
        return {"precision": precision}
    name = str(getattr(mixed, "param_dtype", ""))
    if name not in _PRECISIONS:
        raise ConfigError(
            "mixed_precision must be torch's MixedPrecision, with param_dtype float32, float16 or bfloat16: got "
            f"{mixed!r}. Pass precision='bf16' instead."
        )
    if precision not in (None, _PRECISIONS[name]):
        raise ConfigError(
            f"mixed_precision and precision are one setting: got param_dtype={name} and precision={precision!r}. Give "
            "one of them."
        )
    if mixed.keep_low_precision_grads:
        raise ConfigError(
            "gradients are summed in fp32: got keep_low_precision_grads=True. Leave it out of MixedPrecision."
        )
    # Without a reduce_dtype, FSDP reduces in param_dtype; here gradients are accumulated, and reduced, in fp32.
    reduced = {} if mixed.reduce_dtype is None else {"communication_dtype": mixed.reduce_dtype}
    return {"precision": _PRECISIONS[name], **reduced}


def _check_offload(given: Mapping[str, Any]) -> dict[str, Any]:
    offload = given["cpu_offload"]
    if offload is not None and not isinstance(getattr(offload, "offload_params", None), bool):
        raise ConfigError(f"cpu_offload must be torch's CPUOffload: got {offload!r}. Leave it out.")
    if offload is not None and offload.offload_params:
        raise ConfigError(
            "cpu_offload is not supported: got offload_params=True, and weights stay on the device. Pass "
            "offload_optimizer=1.0 to keep fp32 masters and the optimizer's state in host memory."
        )
    return {}


KEYWORDS = Preset(
    takes={
        "sharding_strategy": _zero,
        "mixed_precision": _precision,
        "cpu_offload": _check_offload,
    },
    hints=frozenset({"auto_wrap_policy", "backward_prefetch", "sync_module_states"}),
    refused={
        "process_group": UnsupportedSetting((None,), "Replicas are all ranks; pass zero_size to divide in sets. "),
        "ignored_modules": UnsupportedSetting((None,), "Freeze their parameters, or leave them out of the model. "),
        "param_init_fn": UnsupportedSetting((None,), "Build the model on the meta device, and load its weights. "),
        "fp8_communication": FP8,
    },
)


class TorchFSDPPlugin(HybridParallelPlugin):
    """Divides weights, gradients and the update over replicas: ``zero_stage=3``, by FSDP's keywords.

    Collective: every rank of the world must construct it, with the same settings.

    Args:
        sharding_strategy: torch's ``ShardingStrategy``: ``FULL_SHARD`` (None): ``zero_stage=3``; ``SHARD_GRAD_OP``: 2;
            ``NO_SHARD``: 0; ``HYBRID_SHARD``: 3 with ``zero_size="host"``.
        cpu_offload: torch's ``CPUOffload``; only ``offload_params=False`` is supported. For the optimizer's state, pass
            ``offload_optimizer``.
        mixed_precision: torch's ``MixedPrecision``: ``param_dtype`` is ``precision``, ``reduce_dtype`` is
            ``communication_dtype`` (None: fp32). Its other fields are without effect: inputs are always cast, and
            floating-point buffers keep their dtype.
        auto_wrap_policy, backward_prefetch, sync_module_states: without effect. Weights are gathered by the model's
            units, one ahead; ranks must have equal weights, or a model on the meta device.
        process_group, ignored_modules, param_init_fn, fp8_communication: only the defaults are supported.
        precision: as in HybridParallelPlugin, instead of ``mixed_precision``; if both are None, it is that of
            ``Booster(mixed_precision=...)``, else fp32.
        more: further settings of HybridParallelPlugin, but for those that are set by the above.

    Raises:
        ConfigError: a setting is unknown, wrong or not supported.

    Example:
        >>> import torch
        >>> from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
        >>> half = MixedPrecision(param_dtype=torch.bfloat16)
        >>> plugin = TorchFSDPPlugin(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, mixed_precision=half)
        >>> plugin.zero_stage, plugin.precision
        (2, 'bf16')
    """

    @line_by_line
    def __init__(
        self,
        process_group: None = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        ignored_modules: None = None,
        param_init_fn: None = None,
        sync_module_states: bool = False,
        fp8_communication: bool = False,
        *,
        precision: Precision | Literal["fp32", "fp16", "bf16"] | None = None,
        **more: Any,
    ):
        settings = KEYWORDS.settings(TorchFSDPPlugin, given_to(locals()))
        settings |= {"tp_size": 1, "pp_size": 1}
        super().__init__(**with_more(TorchFSDPPlugin, settings, more))
