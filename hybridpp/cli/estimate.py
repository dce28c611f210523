"""``hybridpp estimate``: memory of every rank and time of a step, for one layout of a model."""

import json
from typing import Any

from hybridpp.cli.argtypes import counts
from hybridpp.cli.commands.estimate import EstimateArguments
from hybridpp.cli.estimate_flags import estimator_of, microbatches_of
from hybridpp.cli.estimate_table import render_estimate
from hybridpp.cli.output import show, working
from hybridpp.cli.schedule_search import check_file, searched
from hybridpp.config import ParallelConfig
from hybridpp.errors import ConfigError
from hybridpp.estimate import JobSizes, plugin_call, values_of
from hybridpp.sizes import parse_bytes


def run(arguments: EstimateArguments) -> None:
    """Print the table, or JSON."""
    limit = None if arguments.memory is None else parse_bytes("--memory", arguments.memory)
    settings = _settings(arguments)
    if arguments.search_schedule:
        check_file(arguments.search_schedule, arguments.pp_size)
    parallel = ParallelConfig(tp_size=arguments.tp_size, pp_size=arguments.pp_size)
    world_size = arguments.world_size or arguments.tp_size * arguments.pp_size
    num_replicas = parallel.dp_size(world_size)
    if arguments.zero_stage and num_replicas == 1:
        raise ConfigError(
            f"zero_stage={arguments.zero_stage} divides over replicas, and there is one. Pass the ranks of the job as "
            f"--world-size: a multiple of {arguments.tp_size * arguments.pp_size}."
        )
    if arguments.global_batch and arguments.num_microbatches:
        raise ConfigError("--global-batch and --num-microbatches say the same. Remove one.")
    if arguments.global_batch:
        num_microbatches = microbatches_of(arguments.global_batch, num_replicas, arguments.microbatch_size)
    else:
        num_microbatches = arguments.num_microbatches or 2 * arguments.pp_size
    sizes = JobSizes(
        world_size=world_size, microbatch_size=arguments.microbatch_size, num_microbatches=num_microbatches
    )
    with working("estimate the layout"):
        estimator = estimator_of(arguments)
        lines: list[str] = []
        if arguments.search_schedule:
            memory = limit or int(estimator.given.device.memory_gib * 2**30)
            estimate, lines = searched(estimator, sizes, settings, memory).saved_as(arguments.search_schedule)
        else:
            estimate = estimator.estimate(sizes, settings)
    if limit is not None and estimate.worst.total > limit:
        raise ConfigError(
            f"a rank at position {estimate.worst.position} of the pipeline needs "
            f"{estimate.worst.total / 2**30:.2f} GiB, {(estimate.worst.total - limit) / 2**30:.2f} GiB more than "
            f"--memory {arguments.memory}. hybridpp plan searches for a layout that fits."
        )
    if arguments.json:
        show(json.dumps({**values_of(estimate), "notes": list(estimator.notes)}, indent=2))
    else:
        show(*render_estimate(estimate, estimator.given.device), *estimator.notes, *lines)
        if arguments.search_schedule:
            show(plugin_call(estimate, arguments.precision))


def _settings(arguments: EstimateArguments) -> dict[str, Any]:
    """Keywords of the plugin, without those that have their defaults."""
    given: dict[str, Any] = {
        "tp_size": arguments.tp_size,
        "pp_size": arguments.pp_size,
        "schedule": arguments.schedule,
        "num_model_chunks": arguments.num_model_chunks,
        "layers_per_stage": counts("--layers-per-stage", arguments.layers_per_stage),
        "zero_stage": arguments.zero_stage,
        "zero_size": arguments.zero_size,
        "offload_optimizer": arguments.offload_optimizer,
        "enable_sequence_parallelism": arguments.enable_sequence_parallelism,
    }
    if arguments.recompute and arguments.recompute_share is not None:
        raise ConfigError("--recompute recomputes all blocks, and --recompute-share a share of them. Remove one.")
    if arguments.recompute:
        given["gradient_checkpoint_config"] = {}
    elif arguments.recompute_share is not None:
        given["gradient_checkpoint_config"] = {"gradient_checkpointing_ratio": arguments.recompute_share}
    kept = {"gradient_checkpoint_config", "tp_size", "pp_size"}
    return {name: value for name, value in given.items() if value or name in kept}
