"""``hybridpp partition``: how a model would be cut, and its layers sharded, from its configuration alone."""

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.cli.argtypes import positive
from hybridpp.cli.cut_table import RankShare, render_cut
from hybridpp.cli.memory_table import render_memory
from hybridpp.cli.meta_model import build, load_config
from hybridpp.cli.own_model import is_own_model, load_own_model
from hybridpp.cli.sharding_report import preview_sharding, render_sharding
from hybridpp.config import ParallelConfig, PartitionConfig, Precision, ZeroConfig
from hybridpp.errors import ConfigError, HybridppError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.nn.torch_private import pytree
from hybridpp.partition import (
    CallArguments,
    MemoryBudget,
    StageSummary,
    StateBytes,
    TrainingStateSpec,
    describe_cut,
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

# Adam's states per weight.
_ADAMS = 2


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--model",
        required=True,
        help="folder with a config.json, name on the Hugging Face hub, or module:function of your own",
    )
    parser.add_argument("--pp-size", type=positive, required=True, help="number of pipeline stages")
    parser.add_argument("--tp-size", type=positive, default=1, help="tensor-parallel ranks (default: 1)")
    parser.add_argument(
        "--enable-sequence-parallelism", action="store_true", help="shard sequences over the tensor-parallel ranks"
    )
    parser.add_argument("--task", help="CausalLM, ImageClassification, ...; default: the class in config.json")
    parser.add_argument(
        "--balance", choices=("flops", "parameters"), default="flops", help="what is balanced over the stages"
    )
    parser.add_argument("--memory-limit", metavar="SIZE", help="for a rank's parameters in training, as 16GiB")
    parser.add_argument("--layers-per-stage", type=_counts, metavar="N,N,...", help="blocks of each stage")
    parser.add_argument("--split-points", type=_points, metavar="NAME:SIDE,...", help="SIDE is before or after")
    parser.add_argument("--precision", choices=tuple(map(str, Precision)), default="fp16", help="default: fp16")
    parser.add_argument(
        "--zero-stage",
        type=int,
        choices=(0, 1, 2, 3),
        default=0,
        help="what replicas divide: 1: optimizer state and masters; 2: also gradients; 3: also weights",
    )
    parser.add_argument(
        "--zero-size", type=positive, help="neighbouring replicas that divide it among themselves (default: all)"
    )
    parser.add_argument(
        "--offload-optimizer",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of masters and states in host memory",
    )
    parser.add_argument("--world-size", type=positive, help="ranks of the job (default: one replica)")
    parser.add_argument("--batch-size", type=positive, default=1, help="samples of a micro-batch (default: 1)")
    parser.add_argument("--sequence-length", type=positive, help="tokens of a text (default: 128, or what fits)")


def run(arguments: Namespace) -> str:
    """Returns the table."""
    partition = PartitionConfig(
        layers_per_stage=arguments.layers_per_stage,
        split_points=arguments.split_points,
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
    num_replicas = parallel.dp_size(arguments.world_size or arguments.tp_size * arguments.pp_size)
    if arguments.zero_stage and num_replicas == 1:
        raise ConfigError(
            f"zero_stage={arguments.zero_stage} divides over replicas, and there is one. Pass the ranks of the job as "
            f"--world-size: a multiple of {arguments.tp_size * arguments.pp_size}."
        )
    zero = given.among(num_replicas)
    own = load_own_model(arguments.model) if is_own_model(arguments.model) else None
    if own is not None and (arguments.task or arguments.tp_size > 1):
        flag = "--task" if arguments.task else "--tp-size"
        raise ConfigError(f"{flag} is for models of Hugging Face: got --model {arguments.model}. Leave it out.")
    model = build(load_config(arguments.model), arguments.task) if own is None else own.model
    division = preview_sharding(model, parallel) if arguments.tp_size > 1 else None
    casted = _casted(model, Precision(arguments.precision))
    shapes = division.shapes if division else {}
    precision = Precision(arguments.precision)
    num_shards = zero.num_shards(num_replicas)
    spec = TrainingStateSpec(
        _ADAMS,
        precision is not Precision.FP32,
        num_shards,
        num_shards if zero.reduces_each_microbatch else 1,
        zero.offload_optimizer,
        zero.weight_copies(num_shards, arguments.pp_size),
    )
    state_bytes = _state_bytes(model, casted, spec, shapes)
    sizes = {name: parts.total for name, parts in state_bytes.items()}
    held = MemoryBudget(sizes=sizes, ranks=range(arguments.pp_size), limit=partition.limit_bytes)
    stages = _describe(model, arguments, partition, casted, held, own and own.sample)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    first = f"{type(model).__name__}, {_chosen_by(partition)}\n\n"
    shares = _shares(model, casted, shapes) if division else None
    parts = [first + render_cut(stages, num_parameters, own.batch_size if own else arguments.batch_size, shares)]
    if arguments.world_size or arguments.zero_stage or zero.offload_optimizer:
        host_bytes = _host_bytes(model, casted, spec, shapes) if zero.offload_optimizer else None
        parts.append(render_memory(stages, state_bytes, num_replicas, given, host_bytes))
    if division is not None:
        parts.append(render_sharding(model, division, arguments.tp_size))
    return "\n\n".join(parts)


def _casted(model: nn.Module, precision: Precision) -> dict[int, torch.dtype]:
    """Put dtype boundaries on the model's modules; returns the dtypes of the tensors that are cast, by ``id``."""
    module_dtypes = find_module_dtypes(model, (), torch_dtype(precision), norm_modules(model))
    wrap_dtype_boundaries(ModuleAdapter(model), module_dtypes, torch_dtype(precision))
    return dtype_changes(model, working_dtype(model, precision), module_dtypes)


def _shares(
    model: nn.Module, casted: Mapping[int, torch.dtype], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, RankShare]:
    """A rank's share of each parameter."""
    shares = {}
    for name, parameter in model.named_parameters():
        num_elements = math.prod(shapes[name])
        shares[name] = RankShare(num_elements, num_elements * casted.get(id(parameter), parameter.dtype).itemsize)
    return shares


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
    arguments: Namespace,
    partition: PartitionConfig,
    casted: Mapping[int, torch.dtype],
    held: MemoryBudget,
    sample: CallArguments | None,
) -> tuple[StageSummary, ...]:
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
        return described_with(cast[0], cast[1], "the sample that its function returned")
    if not hasattr(model, "config"):
        raise ConfigError(
            f"a sample of the inputs of {type(model).__name__} is needed. Let {arguments.model} return the model and a "
            "batch: a tensor, a tuple or a dict."
        )
    source = "the inputs generated from its configuration"
    *others, last = make_samples(model, arguments.batch_size, arguments.sequence_length, dtype or torch.float32)
    for generated in others:
        with suppress(_DoesNotRun):
            return described_with((), generated, source)
    return described_with((), last, source)


def _chosen_by(partition: PartitionConfig) -> str:
    if partition.layers_per_stage is not None or partition.split_points is not None:
        return "cut as requested"
    return f"balanced by {partition.balance}"


def _counts(text: str) -> list[int]:
    return [positive(count.strip()) for count in text.split(",")]


def _points(text: str) -> dict[str, str]:
    points = {}
    for point in text.split(","):
        name, colon, side = point.strip().rpartition(":")
        if not colon:
            raise ArgumentTypeError(f"{point!r} is not NAME:before or NAME:after")
        points[name] = side
    return points
