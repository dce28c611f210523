"""``hybridpp partition``: how a model would be cut, and its layers sharded, from its configuration alone."""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.cli.argtypes import counts
from hybridpp.cli.commands.partition import PartitionArguments
from hybridpp.cli.cut_table import render_cut
from hybridpp.cli.memory_table import render_memory
from hybridpp.cli.meta_model import build, load_config
from hybridpp.cli.output import show, working
from hybridpp.cli.own_model import OwnModel, is_own_model, load_own_model
from hybridpp.cli.sharding_report import preview_sharding, render_sharding
from hybridpp.config import ParallelConfig, PartitionConfig, Precision, ZeroConfig
from hybridpp.errors import ConfigError, HybridppError, PartitionError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn.torch_private import pytree
from hybridpp.optim import adam_update_bytes
from hybridpp.partition import (
    CallArguments,
    MemoryBudget,
    StageSummary,
    StateBytes,
    TrainingStateSpec,
    describe_cut,
    describe_sample,
    make_samples,
)
from hybridpp.precision import (
    dtype_changes,
    find_module_dtypes,
    norm_modules,
    torch_dtype,
    working_dtype,
    wrap_dtype_boundaries,
)
from hybridpp.text_table import TextTable

# Adam's states per weight.
_ADAMS = 2


def run(arguments: PartitionArguments) -> None:
    """Print the tables."""
    partition = PartitionConfig(
        layers_per_stage=counts("--layers-per-stage", arguments.layers_per_stage),
        split_points=_points(arguments.split_points),
        balance=arguments.balance,
        memory_limit=arguments.memory_limit,
    )
    given = ZeroConfig(
        zero_stage=arguments.zero_stage, zero_size=arguments.zero_size, offload_optimizer=arguments.offload_optimizer
    )
    parallel = ParallelConfig(
        tp_size=arguments.tp_size,
        pp_size=arguments.pp_size,
        enable_sequence_parallelism=arguments.enable_sequence_parallelism,
    )
    num_replicas = _num_replicas(arguments, parallel)
    zero = given.among(num_replicas)
    with working("build the model on the meta device") as now:
        own = _own_model(arguments)
        model = build(load_config(arguments.model), arguments.task) if own is None else own.model
        if arguments.tp_size > 1:
            now("search how its layers can be sharded")
        division = preview_sharding(model, parallel, Precision(arguments.precision)) if arguments.tp_size > 1 else None
        casted = _casted(model, Precision(arguments.precision))
        shapes = division.shapes if division else {}
        spec = _state_spec(arguments, zero, num_replicas)
        state_bytes = _state_bytes(model, casted, spec, shapes)
        sizes = {name: parts.total for name, parts in state_bytes.items()}
        held = MemoryBudget(sizes=sizes, ranks=range(arguments.pp_size), limit=partition.limit_bytes)
        now("trace the model")
        stages, notes = _describe(model, arguments, partition, casted, held, own and own.sample)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    shares = {name: math.prod(shapes[name]) for name, _ in model.named_parameters()} if division else None
    parts: list[str | TextTable] = [f"{type(model).__name__}, {_chosen_by(partition)}", ""]
    parts += render_cut(stages, num_parameters, own.batch_size if own else arguments.batch_size, shares)
    if arguments.world_size or arguments.zero_stage or zero.offload_optimizer:
        host_bytes = _host_bytes(model, casted, spec, shapes) if zero.offload_optimizer else None
        parts += ["", *render_memory(stages, state_bytes, num_replicas, given, host_bytes)]
        parts += ["", _for_a_while(model, casted, shapes)]
    if division is not None:
        parts += ["", *render_sharding(model, division, arguments.tp_size)]
    parts += ["", *notes] if notes else []
    show(*parts)


def _own_model(arguments: PartitionArguments) -> OwnModel | None:
    """The user's model, if that is what ``--model`` names."""
    if not is_own_model(arguments.model):
        return None
    if arguments.task or arguments.tp_size > 1:
        flag = "--task" if arguments.task else "--tp-size"
        raise ConfigError(f"{flag} is for models of Hugging Face: got --model {arguments.model}. Leave it out.")
    return load_own_model(arguments.model)


def _num_replicas(arguments: PartitionArguments, parallel: ParallelConfig) -> int:
    size = arguments.tp_size * arguments.pp_size
    num_replicas = parallel.dp_size(arguments.world_size or size)
    if arguments.zero_stage and num_replicas == 1:
        raise ConfigError(
            f"zero_stage={arguments.zero_stage} divides over replicas, and there is one. Pass the ranks of the job as "
            f"--world-size: a multiple of {size}."
        )
    return num_replicas


def _state_spec(arguments: PartitionArguments, zero: ZeroConfig, num_replicas: int) -> TrainingStateSpec:
    num_shards = zero.num_shards(num_replicas)
    return TrainingStateSpec(
        _ADAMS,
        Precision(arguments.precision) is not Precision.FP32,
        num_shards,
        num_shards if zero.reduces_each_microbatch else 1,
        zero.offload_optimizer,
        zero.weight_copies(num_shards, arguments.pp_size),
    )


def _casted(model: nn.Module, precision: Precision) -> dict[int, torch.dtype]:
    """Put dtype boundaries on the model's modules; returns the dtypes of the tensors that are cast, by ``id``."""
    module_dtypes = find_module_dtypes(model, (), torch_dtype(precision), norm_modules(model))
    wrap_dtype_boundaries(ModuleAdapter(model), module_dtypes, torch_dtype(precision))
    return dtype_changes(model, working_dtype(model, precision), module_dtypes)


def _state_bytes(
    model: nn.Module,
    casted: Mapping[int, torch.dtype],
    state_spec: TrainingStateSpec,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, StateBytes]:
    """Memory that a rank needs for each parameter that it holds, trained with Adam."""
    return {
        name: state_spec.parts_of(
            parameter,
            casted.get(id(parameter), parameter.dtype),
            math.prod(shapes.get(name, parameter.shape)),
        )
        for name, parameter in model.named_parameters()
    }


def _for_a_while(model: nn.Module, casted: Mapping[int, torch.dtype], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What a step takes for a while beside what is held, for the largest weight; a replica's piece may be smaller."""
    sizes = [
        (math.prod(shapes.get(name, parameter.shape)), casted.get(id(parameter), parameter.dtype).itemsize)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    gradient = max((n * itemsize for n, itemsize in sizes), default=0)
    update = adam_update_bytes((4 * n for n, _ in sizes), "loop")
    return (
        f"and for a while, beside activations: up to {gradient / 2**20:,.1f} for a gradient before it is added, or "
        f"{update / 2**20:,.1f} in the update by torch's Adam without fused=True"
    )


def _host_bytes(
    model: nn.Module, casted: Mapping[int, torch.dtype], spec: TrainingStateSpec, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Host memory that a rank needs for each parameter that it holds, trained with Adam."""
    return {
        name: spec.host_bytes_of(
            parameter, casted.get(id(parameter), parameter.dtype), math.prod(shapes.get(name, parameter.shape))
        )
        for name, parameter in model.named_parameters()
    }


class _DoesNotRun(ConfigError):
    """The model's forward raises on the generated inputs."""


def _describe(
    model: nn.Module,
    arguments: PartitionArguments,
    partition: PartitionConfig,
    casted: Mapping[int, torch.dtype],
    held: MemoryBudget,
    sample: CallArguments | None,
) -> tuple[tuple[StageSummary, ...], list[str]]:
    """The stages, and what the sample has and lacks."""
    dtype = working_dtype(model, Precision(arguments.precision))

    def described_with(args: tuple[Any, ...], kwargs: dict[str, Any], source: str) -> tuple[StageSummary, ...]:
        try:
            return describe_cut(model, arguments.pp_size, (args, kwargs), partition, casted, held)
        except HybridppError:
            raise
        except Exception as error:  # whatever a model's forward raises
            named = [*((str(number), one) for number, one in enumerate(args)), *kwargs.items()]
            shapes = ", ".join(f"{name} {list(one.shape)}" for name, one in named if isinstance(one, Tensor))
            raise _DoesNotRun(
                f"{type(model).__name__} does not run on {source}, {shapes}: {type(error).__name__}: {error}"
            ) from error

    if sample is not None:
        cast = pytree.tree_map_only(
            Tensor, lambda one: one.to(dtype) if dtype and one.is_floating_point() else one, sample
        )
        return described_with(cast[0], cast[1], "the sample that its function returned"), []
    if not hasattr(model, "config"):
        raise ConfigError(
            f"a sample of the inputs of {type(model).__name__} is needed. Let {arguments.model} return the model and a "
            "batch: a tensor, a tuple or a dict."
        )
    source = "the inputs generated from its configuration"
    length, number = arguments.sequence_length, arguments.images
    first, *others = make_samples(model, arguments.batch_size, length, dtype or torch.float32, number)
    for generated in reversed(others):
        # Without any images, a text may have a length that others have not.
        with suppress(_DoesNotRun, PartitionError):
            return described_with((), generated, source), describe_sample(model, generated)
    return described_with((), first, source), describe_sample(model, first, number, length)


def _chosen_by(partition: PartitionConfig) -> str:
    if partition.layers_per_stage is not None or partition.split_points is not None:
        return "cut as requested"
    return f"balanced by {partition.balance}"


def _points(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    points = {}
    for point in text.split(","):
        name, colon, side = point.strip().rpartition(":")
        if not colon:
            raise ConfigError(
                f"--split-points takes NAME:before or NAME:after, separated by commas: got {point!r}. Pass the names "
                "of blocks, as model.layers.4:before."
            )
        points[name] = side
    return points
