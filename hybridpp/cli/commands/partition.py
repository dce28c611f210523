"""``hybridpp partition``: its arguments."""

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpp.cli.argtypes import count, index, option, real
from hybridpp.cli.command import Command


@dataclass(frozen=True, kw_only=True)
class PartitionArguments:
    """Show how a model would be cut into pipeline stages.

    No weights are read: the model is made from its config.json, or by a function of yours that returns it and a sample
    batch. ZeRO stage 1 divides optimizer state and masters over replicas, 2 also gradients, 3 also weights.
    """

    model: Annotated[str, option("The model: a folder, a name on the hub, or module:function.", "NAME")]
    pp_size: Annotated[int, count("The number of pipeline stages.")]
    tp_size: Annotated[int, count("The number of tensor-parallel ranks.")] = 1
    enable_sequence_parallelism: Annotated[
        bool, option("Also shard sequences over the tp ranks.", name="--enable-sequence-parallelism")
    ] = False
    task: Annotated[str | None, option("The task, such as CausalLM (default: that of config.json).", "TASK")] = None
    balance: Annotated[Literal["flops", "parameters"], option("The quantity that stages share equally.")] = "flops"
    memory_limit: Annotated[
        str | None, option("Limit what a rank's parameters take in training, such as 16GiB.", "SIZE")
    ] = None
    layers_per_stage: Annotated[str | None, option("The number of blocks in each stage.", "N,N,...")] = None
    split_points: Annotated[str | None, option("Cut at these modules; SIDE is before or after.", "NAME:SIDE,...")] = (
        None
    )
    precision: Annotated[Literal["fp16", "bf16", "fp32"], option("The precision that training computes in.")] = "fp16"
    zero_stage: Annotated[
        Literal[0, 1, 2, 3],
        option("The ZeRO stage, which says what replicas divide."),
    ] = 0
    zero_size: Annotated[int | None, count("The number of replicas that ZeRO divides among (default: all).")] = None
    offload_optimizer: Annotated[
        float, real("The share of masters and states in host memory, from 0 to 1.", "SHARE")
    ] = 0.0
    world_size: Annotated[int | None, count("The ranks of the job (default: those of one replica).")] = None
    batch_size: Annotated[int, count("The number of samples in a micro-batch.")] = 1
    sequence_length: Annotated[int | None, count("The tokens of a sample (default: 128, or what fits).")] = None
    images: Annotated[int, index("The images of each text, if the model takes any.")] = 1


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
