"""Sort the plugin's keyword arguments into the dataclasses that check them; refuse by name what is not supported."""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NamedTuple

from hybridpp.config import (
    CompileConfig,
    LossScaleConfig,
    OptimizerConfig,
    ParallelConfig,
    PartitionConfig,
    PipelineConfig,
    Precision,
    PrecisionConfig,
    ZeroConfig,
    require_bools,
    require_plain,
)
from hybridpp.errors import ConfigError, shown
from hybridpp.sharding_plan import parse_style
from hybridpp_plugins.unsupported import CONVERTED, HINTS, SYNONYMS, UNSUPPORTED, is_switch, refuse_unsupported


class PluginSettings(NamedTuple):
    """All settings of a :class:`~hybridpp_plugins.HybridParallelPlugin`."""

    parallel: ParallelConfig
    zero: ZeroConfig
    pipeline: PipelineConfig
    partition: PartitionConfig
    precision: Precision
    precision_config: PrecisionConfig
    optimizer: OptimizerConfig
    compile: CompileConfig
    optimize_kernels: bool


def parse_settings(given: Mapping[str, Any], other: Mapping[str, Any]) -> PluginSettings:
    """The settings of a plugin.

    Args:
        given: the arguments of :class:`~hybridpp_plugins.HybridParallelPlugin`, by name.
        other: further keywords, which only other libraries have.

    Raises:
        ConfigError: a value is wrong, or a name is unknown or requests an unsupported feature.
    """
    for name in other:
        if not (name in UNSUPPORTED or name in HINTS or name in SYNONYMS or name in CONVERTED):
            raise _unknown(name, [*given, *SYNONYMS, *CONVERTED])
    require_plain(**given, **other)
    values = dict(given)
    switches = {name: other[name] for name in other if name in HINTS or is_switch(name)}
    require_bools(enable_all_optimization=values["enable_all_optimization"], **switches)
    for name in SYNONYMS:
        _merge_synonym(values, name, other.get(name))
    _convert(values, other)
    if values["pp_size"] == 1 and values["num_microbatches"] is None and values["microbatch_size"] is None:
        values["num_microbatches"] = 1  # no other stage has to be kept busy
    precision_config = _take(PrecisionConfig, values)
    settings = PluginSettings(
        parallel=_take(ParallelConfig, values),
        zero=_take(ZeroConfig, values),
        pipeline=_take(PipelineConfig, values),
        partition=_take(PartitionConfig, values),
        precision=precision_config.precision or Precision.FP32,
        precision_config=precision_config,
        optimizer=_take(OptimizerConfig, values, loss_scale=_take(LossScaleConfig, values)),
        compile=_take(CompileConfig, values),
        optimize_kernels=values["enable_all_optimization"],
    )
    if settings.precision is Precision.FP16 and settings.optimizer.error_if_nonfinite:
        raise ConfigError(
            "fp16 finds its loss scale by steps that overflow, and skips them: got error_if_nonfinite=True with "
            "precision='fp16'. Leave it out, or use precision='bf16'."
        )
    _check_compiling(settings)
    for style in (settings.parallel.tensor_parallel_plan or {}).values():
        parse_style(style)
    for name, value in other.items():
        if name in UNSUPPORTED:
            refuse_unsupported(name, value, settings.parallel)
    return settings


def _check_compiling(settings: PluginSettings) -> None:
    if not settings.compile.is_on or settings.parallel.tp_size == 1:
        return
    if settings.parallel.enable_sequence_parallelism:
        raise ConfigError(
            "compile_blocks leaves out modules that communicate, which under sequence parallelism are nearly all of a "
            "block: got enable_sequence_parallelism=True. Leave out one of the two."
        )
    if settings.compile.asks_for_full_graph:
        raise ConfigError(
            "compile_blocks cannot make one graph of a block whose layers are sharded, as they communicate between "
            f"graphs: got fullgraph=True with tp_size={settings.parallel.tp_size}. Leave fullgraph out."
        )


def _take(cls: type[Any], values: Mapping[str, Any], **more: Any) -> Any:
    return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values}, **more)


def _merge_synonym(values: dict[str, Any], synonym: str, value: Any) -> None:
    name = SYNONYMS[synonym]
    if value is None:
        return
    if values[name] not in (None, value):
        raise ConfigError(
            f"{synonym} and {name} are one setting: got {shown(value)} and {shown(values[name])}. Give one of them."
        )
    values[name] = value


def _convert(values: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Take over settings that other libraries have in another form."""
    is_on_host = other.get("cpu_offload", False)
    require_bools(cpu_offload=is_on_host)
    if is_on_host:
        if values["offload_optimizer"] not in (0, 1):
            raise ConfigError(
                "cpu_offload and offload_optimizer are one setting: got cpu_offload=True and offload_optimizer="
                f"{values['offload_optimizer']!r}. Give one of them."
            )
        values["offload_optimizer"] = 1.0
    size = other.get("zero_bucket_size_in_m")
    if size is not None:
        if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
            raise ConfigError(
                f"zero_bucket_size_in_m must be a number above 0: got zero_bucket_size_in_m={shown(size)}. Leave it "
                "out."
            )
        if values["zero_stage"]:
            values["ddp_bucket_cap_mb"] = 4.0 * size


def _unknown(name: str, known: list[str]) -> ConfigError:
    near = get_close_matches(name, known, n=1)
    return ConfigError(
        f"HybridParallelPlugin has no setting {name!r}. It takes: {', '.join(sorted(known))}."
        + (f" Did you mean {near[0]}?" if near else "")
    )
