"""Sort the plugin's keyword arguments into the dataclasses that check them; refuse by name what is not built."""

from dataclasses import fields
from typing import Any, NamedTuple

from hybridpp.config import (
    LossScaleConfig,
    OptimizerConfig,
    ParallelConfig,
    PartitionConfig,
    PipelineConfig,
    Precision,
    PrecisionConfig,
    require_switches,
)
from hybridpp.errors import ConfigError
from hybridpp.tensor_parallel import parse_style

# Switches that scripts of this kind pass as hints; both values give what they ask for.
_HINTS = {"find_unused_parameters", "static_graph", "gradient_as_bucket_view", "overlap_p2p", "overlap_communication"}

# Names that scripts of this kind pass, with the value that asks for nothing.
_NOT_BUILT: dict[str, Any] = {
    "sp_size": None,
    "parallel_output": True,
    "make_vocab_size_divisible_by": None,
    "custom_policy": None,
    "scheduler_nodes": None,
    "enable_fused_normalization": False,
    "enable_flash_attention": False,
    "enable_jit_fused": False,
    "zero_bucket_size_in_m": None,
    "cpu_offload": False,
    "overlap_allgather": False,
    "dp_outside": True,
    "broadcast_buffers": False,
    "parallel_cuda_graphs": False,
    "ep_size": 1,
}


class Settings(NamedTuple):
    """All settings of a :class:`~hybridpp_plugins.HybridParallelPlugin`."""

    parallel: ParallelConfig
    pipeline: PipelineConfig
    partition: PartitionConfig
    precision: Precision
    formats: PrecisionConfig
    optimizer: OptimizerConfig
    optimize_kernels: bool


def _take(cls: type[Any], options: dict[str, Any], **more: Any) -> Any:
    return cls(**{field.name: options.pop(field.name) for field in fields(cls) if field.name in options}, **more)


def sort_settings(precision: str, enable_all_optimization: bool, options: dict[str, Any]) -> Settings:
    """The settings in ``options``.

    Raises:
        ConfigError: a value is wrong, or a name is unknown or asks for something that is not built.
    """
    rest = dict(options)
    switches = {name: rest[name] for name in rest if name in _HINTS or isinstance(_NOT_BUILT.get(name), bool)}
    require_switches(enable_all_optimization=enable_all_optimization, **switches)
    if "num_layers_per_stage" in rest:  # the same setting by the name that scripts have
        rest.setdefault("layers_per_stage", rest.pop("num_layers_per_stage"))
    if "pp_style" in rest:
        _check_style(rest, rest.pop("pp_style"))
    settings = Settings(
        parallel=_take(ParallelConfig, rest),
        pipeline=_take(PipelineConfig, rest),
        partition=_take(PartitionConfig, rest),
        precision=Precision.parse(precision),
        formats=_take(PrecisionConfig, rest),
        optimizer=_take(OptimizerConfig, rest, loss_scale=_take(LossScaleConfig, rest)),
        optimize_kernels=enable_all_optimization,
    )
    for style in (settings.parallel.tensor_parallel_plan or {}).values():
        parse_style(style)
    for name, value in rest.items():
        if name in _HINTS:
            continue
        if name not in _NOT_BUILT:
            known = {field.name for cls in _CONFIGS for field in fields(cls)} - {"loss_scale"}
            raise ConfigError(
                f"HybridParallelPlugin has no setting {name!r}. It takes: "
                f"{', '.join(sorted({*known, 'precision', 'enable_all_optimization', 'pp_style'}))}."
            )
        if value != _NOT_BUILT[name]:
            raise ConfigError(
                f"{name} is not built yet: got {name}={value!r}. Leave it out, or pass {name}={_NOT_BUILT[name]!r}."
            )
    return settings


_CONFIGS: tuple[type[Any], ...] = (
    ParallelConfig,
    PipelineConfig,
    PartitionConfig,
    PrecisionConfig,
    OptimizerConfig,
    LossScaleConfig,
)


def _check_style(options: dict[str, Any], style: Any) -> None:
    schedule = options.setdefault("schedule", style)
    if schedule != style:
        raise ConfigError(f"pp_style and schedule are one setting: got {style!r} and {schedule!r}. Give one of them.")
