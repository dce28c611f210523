"""``hybridpp estimate``: its arguments."""

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpp.cli.argtypes import count, option, real
from hybridpp.cli.command import Command
from hybridpp.cli.commands.model_options import ModelOptions


@dataclass(frozen=True, kw_only=True)
class EstimateArguments(ModelOptions):
    """Estimate the memory of every rank and the time of a step."""

    tp_size: Annotated[int, count("Tensor-parallel ranks.")] = 1
    pp_size: Annotated[int, count("Ranks of a pipeline.")] = 1
    world_size: Annotated[int | None, count("Ranks of the job (default: one replica).")] = None
    microbatch_size: Annotated[int, count("Samples of a micro-batch.")] = 1
    num_microbatches: Annotated[int | None, count("Of a replica (default: twice --pp-size).")] = None
    global_batch: Annotated[int | None, count("Or samples of a step, over all replicas.")] = None
    schedule: Annotated[str | None, option("Of the pipeline (default: 1f1b).", "NAME")] = None
    num_model_chunks: Annotated[int | None, count("Stages per rank.")] = None
    layers_per_stage: Annotated[str | None, option("Blocks of each stage.", "N,N,...")] = None
    recompute: Annotated[bool, option("Recompute all blocks.", name="--recompute")] = False
    recompute_share: Annotated[float | None, real("Or this share of them.", "SHARE")] = None
    enable_sequence_parallelism: Annotated[
        bool, option("Shard sequences over tp ranks.", name="--enable-sequence-parallelism")
    ] = False
    zero_stage: Annotated[Literal[0, 1, 2, 3], option("What replicas divide.")] = 0
    zero_size: Annotated[int | None, count("How many divide it (default: all).")] = None
    offload_optimizer: Annotated[float, real("Of masters and states, in host memory.", "SHARE")] = 0.0
    memory: Annotated[str | None, option("Refuse ranks that need more: 80GiB.", "SIZE")] = None
    search_schedule: Annotated[str | None, option("Search for one that fits; write it.", "FILE")] = None
    json: Annotated[bool, option("Print JSON: bytes and milliseconds.", name="--json")] = False


ESTIMATE = Command(
    name="estimate",
    arguments=EstimateArguments,
    work="hybridpp.cli.estimate:run",
    examples=("hybridpp estimate --model llama --tp-size 2 --pp-size 4 --device device.json --memory 72GiB",),
)
