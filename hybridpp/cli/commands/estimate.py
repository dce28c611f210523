"""``hybridpp estimate``: its arguments."""

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpp.cli.argtypes import count, option, real
from hybridpp.cli.command import Command
from hybridpp.cli.commands.model_options import ModelOptions


@dataclass(frozen=True, kw_only=True)
class EstimateArguments(ModelOptions):
    """Estimate the memory of every rank and the time of a step."""

    tp_size: Annotated[int, count("The number of tensor-parallel ranks.")] = 1
    pp_size: Annotated[int, count("The number of ranks in a pipeline.")] = 1
    world_size: Annotated[int | None, count("The ranks of the job (default: those of one replica).")] = None
    microbatch_size: Annotated[int, count("The number of samples in a micro-batch.")] = 1
    num_microbatches: Annotated[int | None, count("The micro-batches of a replica (default: twice --pp-size).")] = None
    global_batch: Annotated[int | None, count("The samples of a step over all replicas; sets --num-microbatches.")] = (
        None
    )
    schedule: Annotated[str | None, option("The pipeline schedule to estimate (default: 1f1b).", "NAME")] = None
    num_model_chunks: Annotated[int | None, count("The number of stages on each rank.")] = None
    layers_per_stage: Annotated[str | None, option("The number of blocks in each stage.", "N,N,...")] = None
    recompute: Annotated[bool, option("Recompute every block in the backward pass.", name="--recompute")] = False
    recompute_share: Annotated[float | None, real("The share of blocks to recompute, from 0 to 1.", "SHARE")] = None
    enable_sequence_parallelism: Annotated[
        bool, option("Also shard sequences over the tp ranks.", name="--enable-sequence-parallelism")
    ] = False
    zero_stage: Annotated[Literal[0, 1, 2, 3], option("The ZeRO stage, which says what replicas divide.")] = 0
    zero_size: Annotated[int | None, count("The number of replicas that ZeRO divides among (default: all).")] = None
    offload_optimizer: Annotated[
        float, real("The share of masters and states in host memory, from 0 to 1.", "SHARE")
    ] = 0.0
    memory: Annotated[str | None, option("Refuse ranks that need more memory than this, such as 80GiB.", "SIZE")] = None
    search_schedule: Annotated[str | None, option("Search for a schedule that fits, and write it.", "FILE")] = None
    json: Annotated[bool, option("Print JSON, in bytes and milliseconds.", name="--json")] = False


ESTIMATE = Command(
    name="estimate",
    arguments=EstimateArguments,
    work="hybridpp.cli.estimate:run",
    examples=("hybridpp estimate --model llama --tp-size 2 --pp-size 4 --device device.json --memory 72GiB",),
)
