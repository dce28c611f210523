"""Settings of other libraries: values without an effect are accepted, others are refused with advice."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from hybridpp.config import ParallelConfig
from hybridpp.errors import ConfigError


class OtherLibrarySettings(TypedDict, total=False):
    """Keywords that only other libraries have, with the values that are accepted.

    The tables below say the same at run time. Some are other names of settings: ``pp_style`` (``schedule``),
    ``num_layers_per_stage`` (``layers_per_stage``), ``cpu_offload`` (``offload_optimizer=1.0``) and, with ZeRO,
    ``zero_bucket_size_in_m`` (a quarter of ``ddp_bucket_cap_mb``). No other has an effect.
    """

    pp_style: str
    num_layers_per_stage: Sequence[int] | None
    check_reduction: bool
    enable_metadata_cache: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    overlap_communication: bool
    overlap_p2p: bool
    parallel_output: bool
    static_graph: bool
    sp_size: int | None
    ep_size: Literal[1]
    inner_ring_size: None
    make_vocab_size_divisible_by: Literal[64] | None
    custom_policy: None
    scheduler_nodes: None
    enable_fused_normalization: bool
    enable_flash_attention: bool
    enable_jit_fused: bool
    zero_bucket_size_in_m: float | None
    cpu_offload: bool
    overlap_allgather: Literal[False]
    fp8_communication: Literal[False]
    use_fp8: Literal[False]
    dp_outside: Literal[True]
    moe_dp_outside: Literal[True]
    parallel_cuda_graphs: Literal[False]


SYNONYMS = {"pp_style": "schedule", "num_layers_per_stage": "layers_per_stage"}
"""Settings by the names that other libraries have for them."""

CONVERTED = {"cpu_offload": "offload_optimizer", "zero_bucket_size_in_m": "ddp_bucket_cap_mb"}
"""The same, with values of another kind."""

HINTS = frozenset(
    {
        "check_reduction",
        "enable_flash_attention",
        "enable_fused_normalization",
        "enable_jit_fused",
        "enable_metadata_cache",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "overlap_communication",
        "overlap_p2p",
        "parallel_output",
        "static_graph",
    }
)
"""Switches of which both values give what they ask for.

The kernels are those of the model: attention and norms are fused where torch's functions are, which models of
transformers use by default; ``compile_blocks`` fuses the rest.
"""


class UnsupportedSetting(NamedTuple):
    """A setting that is accepted only with values that have no effect.

    Attributes:
        values: the accepted values; the first is recommended.
        instead: what to use instead, in a sentence.
    """

    values: tuple[Any, ...]
    instead: str = ""


_REPLICAS = "Tensor-parallel ranks are consecutive; replicas are not. "

UNSUPPORTED: dict[str, UnsupportedSetting] = {
    "sp_size": UnsupportedSetting(
        (None, 1),
        "Sequences are sharded over the tensor-parallel ranks: set tp_size and enable_sequence_parallelism=True. ",
    ),
    "inner_ring_size": UnsupportedSetting((None,)),
    "make_vocab_size_divisible_by": UnsupportedSetting(
        (64, None), "Vocabularies of any size are sharded without padding. "
    ),
    "custom_policy": UnsupportedSetting(
        (None,),
        "Use tensor_parallel_plan to set how layers are sharded, and split_points to set the cuts. ",
    ),
    "scheduler_nodes": UnsupportedSetting((None,), "Pass your own programs as schedule. "),
    "overlap_allgather": UnsupportedSetting(
        (False,), "Weights are there when optimizer.step() returns; with zero_stage=3 they are gathered ahead of use. "
    ),
    "fp8_communication": UnsupportedSetting((False,), "Use precision='bf16'. "),
    "use_fp8": UnsupportedSetting((False,), "Use precision='bf16'. "),
    "dp_outside": UnsupportedSetting((True,), _REPLICAS),
    "moe_dp_outside": UnsupportedSetting((True,), _REPLICAS),
    "parallel_cuda_graphs": UnsupportedSetting((False,)),
    "ep_size": UnsupportedSetting((1,), "Experts are sharded over the tensor-parallel ranks: set tp_size. "),
}
"""By name."""


def is_switch(name: str) -> bool:
    """Whether an unsupported setting is a bool."""
    return name in UNSUPPORTED and isinstance(UNSUPPORTED[name].values[0], bool)


def refuse_unsupported(name: str, value: Any, parallel: ParallelConfig) -> None:
    """Accept ``value`` if it has no effect.

    Raises:
        ConfigError: it requests an unsupported feature.
    """
    values, instead = UNSUPPORTED[name]
    # With sequence parallelism, scripts may pass the number of tensor-parallel ranks.
    if name == "sp_size" and parallel.enable_sequence_parallelism:
        values = (*values, parallel.tp_size)
    refuse_value(name, value, UnsupportedSetting(values, instead))


def refuse_value(name: str, value: Any, setting: UnsupportedSetting) -> None:
    """Accept ``value`` if it is one of the setting's.

    Raises:
        ConfigError: it is another.
    """
    values, instead = setting
    if not any(value is known or (type(value) is type(known) and value == known) for known in values):
        raise ConfigError(
            f"{name} is not supported yet: got {name}={value!r}. {instead}Leave it out, or pass {name}={values[0]!r}."
        )
