"""``hybridpp plan``: its arguments."""

from dataclasses import dataclass
from typing import Annotated

from hybridpp.cli.argtypes import count, option
from hybridpp.cli.command import Command
from hybridpp.cli.commands.model_options import ModelOptions


@dataclass(frozen=True, kw_only=True)
class PlanArguments(ModelOptions):
    """Search for the fastest layouts that fit in memory."""

    devices: Annotated[int, count("The number of ranks of the job.")]
    global_batch: Annotated[int, count("The number of samples in a step.")]
    memory: Annotated[str | None, option("The memory of a rank (default: 9/10 of the device's).", "SIZE")] = None
    schedules: Annotated[
        str | None,
        option("The pipeline schedules to try (default: 1f1b, interleaved, zb-h1, zb-v, v-half, v-min).", "NAME,..."),
    ] = None
    tp_sizes: Annotated[
        str | None, option("The values of tp_size to try (default: powers of 2 in a host).", "N,...")
    ] = None
    pp_sizes: Annotated[str | None, option("The values of pp_size to try (default: all that divide).", "N,...")] = None
    microbatch_sizes: Annotated[str | None, option("The micro-batch sizes to try (default: 1,2,4,8,16).", "N,...")] = (
        None
    )
    zero_stages: Annotated[str, option("The ZeRO stages to try.", "N,...")] = "0,1,2,3"
    no_recompute: Annotated[bool, option("Try no layouts that recompute blocks.", name="--no-recompute")] = False
    enable_sequence_parallelism: Annotated[
        bool, option("Also shard sequences over the tp ranks.", name="--enable-sequence-parallelism")
    ] = False
    search_schedule: Annotated[str | None, option("Also search for a schedule, and write it.", "FILE")] = None
    top: Annotated[int, count("The number of layouts to print.")] = 10
    json: Annotated[bool, option("Print JSON, in bytes and milliseconds.", name="--json")] = False


PLAN = Command(
    name="plan",
    arguments=PlanArguments,
    work="hybridpp.cli.plan:run",
    examples=(
        "hybridpp plan --model llama --devices 64 --global-batch 512",
        "hybridpp plan --model llama --devices 8 --global-batch 64 --tp-sizes 1,2",
    ),
)
