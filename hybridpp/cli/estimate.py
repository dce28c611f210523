"""``hybridpp estimate``: memory of every rank and time of a step, for one layout of a model."""

import json
from argparse import ArgumentParser, Namespace
from typing import Any

from hybridpp.cli.argtypes import positive
from hybridpp.cli.estimate_flags import add_model_flags, estimator_of, microbatches_of
from hybridpp.cli.estimate_table import render_estimate
from hybridpp.config import ParallelConfig
from hybridpp.errors import ConfigError
from hybridpp.estimate import JobSizes, values_of
from hybridpp.sizes import parse_bytes


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    add_model_flags(parser)
    parser.add_argument("--tp-size", type=positive, default=1, help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--pp-size", type=positive, default=1, help="ranks of a pipeline (default: 1)")
    parser.add_argument("--world-size", type=positive, help="ranks of the job (default: one replica)")
    parser.add_argument("--microbatch-size", type=positive, default=1, help="samples of a micro-batch (default: 1)")
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--num-microbatches", type=positive, help="of a replica in a step (default: twice --pp-size)")
    number.add_argument("--global-batch", type=positive, metavar="N", help="samples of a step, over all replicas")
    parser.add_argument("--schedule", default=None, help="pipeline schedule (default: 1f1b)")
    parser.add_argument("--num-model-chunks", type=positive, help="stages per rank")
    parser.add_argument("--layers-per-stage", type=_counts, metavar="N,N,...", help="blocks of each stage")
    parser.add_argument("--recompute", type=float, nargs="?", const=1.0, metavar="SHARE", help="of blocks (alone: all)")
    parser.add_argument("--enable-sequence-parallelism", action="store_true", help="shard sequences over tp ranks")
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), default=0, help="what replicas divide")
    parser.add_argument("--zero-size", type=positive, help="replicas that divide it among themselves (default: all)")
    parser.add_argument("--offload-optimizer", type=float, default=0.0, metavar="SHARE", help="in host memory")
    parser.add_argument("--memory", metavar="SIZE", help="of a device, as 80GiB: an error if a rank needs more")
    parser.add_argument("--json", action="store_true", help="print JSON: bytes and milliseconds")


def run(arguments: Namespace) -> str:
    """Returns the table, or JSON."""
    limit = None if arguments.memory is None else parse_bytes("--memory", arguments.memory)
    settings = _settings(arguments)
    parallel = ParallelConfig(tp_size=arguments.tp_size, pp_size=arguments.pp_size)
    world_size = arguments.world_size or arguments.tp_size * arguments.pp_size
    num_replicas = parallel.dp_size(world_size)
    if arguments.zero_stage and num_replicas == 1:
        raise ConfigError(
            f"zero_stage={arguments.zero_stage} divides over replicas, and there is one. Pass the ranks of the job as "
            f"--world-size: a multiple of {arguments.tp_size * arguments.pp_size}."
        )
    if arguments.global_batch:
        num_microbatches = microbatches_of(arguments.global_batch, num_replicas, arguments.microbatch_size)
    else:
        num_microbatches = arguments.num_microbatches or 2 * arguments.pp_size
    estimator = estimator_of(arguments)
    sizes = JobSizes(
        world_size=world_size, microbatch_size=arguments.microbatch_size, num_microbatches=num_microbatches
    )
    estimate = estimator.estimate(sizes, settings)
    text = (
        json.dumps(values_of(estimate), indent=2)
        if arguments.json
        else render_estimate(estimate, estimator.given.device)
    )
    if limit is not None and estimate.worst.total > limit:
        raise ConfigError(
            f"a rank at position {estimate.worst.position} of the pipeline needs "
            f"{estimate.worst.total / 2**30:.2f} GiB, {(estimate.worst.total - limit) / 2**30:.2f} GiB more than "
            f"--memory {arguments.memory}. hybridpp plan searches for a layout that fits."
        )
    return text


def _settings(arguments: Namespace) -> dict[str, Any]:
    """Keywords of the plugin, without those that have their defaults."""
    given: dict[str, Any] = {
        "tp_size": arguments.tp_size,
        "pp_size": arguments.pp_size,
        "schedule": arguments.schedule,
        "num_model_chunks": arguments.num_model_chunks,
        "layers_per_stage": arguments.layers_per_stage,
        "zero_stage": arguments.zero_stage,
        "zero_size": arguments.zero_size,
        "offload_optimizer": arguments.offload_optimizer,
        "enable_sequence_parallelism": arguments.enable_sequence_parallelism,
    }
    if arguments.recompute is not None:
        is_all = arguments.recompute == 1.0
        given["gradient_checkpoint_config"] = {} if is_all else {"gradient_checkpointing_ratio": arguments.recompute}
    kept = {"gradient_checkpoint_config", "tp_size", "pp_size"}
    return {name: value for name, value in given.items() if value or name in kept}


def _counts(text: str) -> list[int]:
    return [positive(count.strip()) for count in text.split(",")]
