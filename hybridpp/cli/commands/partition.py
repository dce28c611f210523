"""``hybridpp partition``: its arguments."""

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpp.cli.argtypes import count, index, option, real
from hybridpp.cli.command import Command


@dataclass(frozen=True, kw_only=True)
class PartitionArguments:
    """Show how a model would be cut into pipeline stages.

    Without weights: from its config.json, or from a function of yours that returns it and a sample batch. ZeRO stage 1
    divides optimizer state and masters over replicas, 2 also gradients, 3 also weights.
    """

    model: Annotated[str, option("Folder, name on the hub, or module:function.", "NAME")]
    pp_size: Annotated[int, count("Number of pipeline stages.")]
    tp_size: Annotated[int, count("Tensor-parallel ranks.")] = 1
    enable_sequence_parallelism: Annotated[
        bool, option("Shard sequences over these ranks, too.", name="--enable-sequence-parallelism")
    ] = False
    task: Annotated[str | None, option("As CausalLM (default: as config.json says).", "TASK")] = None
    balance: Annotated[Literal["flops", "parameters"], option("What stages share equally.")] = "flops"
    memory_limit: Annotated[str | None, option("Of a rank's parameters in training: 16GiB.", "SIZE")] = None
    layers_per_stage: Annotated[str | None, option("Blocks of each stage.", "N,N,...")] = None
    split_points: Annotated[str | None, option("SIDE: before or after.", "NAME:SIDE,...")] = None
    precision: Annotated[Literal["fp16", "bf16", "fp32"], option("Of training.")] = "fp16"
    zero_stage: Annotated[
        Literal[0, 1, 2, 3],
        option("What replicas divide."),
    ] = 0
    zero_size: Annotated[int | None, count("How many divide it (default: all).")] = None
    offload_optimizer: Annotated[float, real("Of masters and states, in host memory.", "SHARE")] = 0.0
    world_size: Annotated[int | None, count("Ranks of the job (default: one replica).")] = None
    batch_size: Annotated[int, count("Samples of a micro-batch.")] = 1
    sequence_length: Annotated[int | None, count("Tokens (default: 128, or what fits).")] = None
    images: Annotated[int, index("Of each text, if the model takes any.")] = 1


PARTITION = Command(
    name="partition",
    arguments=PartitionArguments,
    work="hybridpp.cli.partition:run",
    examples=(
        "hybridpp partition --model path/to/vit --pp-size 4",
        "hybridpp partition --model path/to/llama --pp-size 4 --memory-limit 16GiB",
        "hybridpp partition --model path/to/llama --pp-size 2 --tp-size 2 --world-size 8",
    ),
)
