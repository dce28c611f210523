"""``hybridpp profile``: its arguments."""

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpp.cli.argtypes import count, index, option
from hybridpp.cli.command import Command


@dataclass(frozen=True, kw_only=True)
class ProfileArguments:
    """Measure this device, and a model on it, for estimates.

    Under torchrun, srun or mpirun, with two processes or more, the links between them are measured, too.
    """

    output: Annotated[str, option("To write, or to add to.", "FILE")] = "device.json"
    model: Annotated[str | None, option("Also this one: folder, hub's name, module:function.", "NAME")] = None
    task: Annotated[str | None, option("As CausalLM (default: as config.json says).", "TASK")] = None
    precision: Annotated[Literal["fp16", "bf16", "fp32"], option("Of training.")] = "bf16"
    tp_size: Annotated[int, count("Tensor-parallel ranks.")] = 1
    microbatch_size: Annotated[int, count("Samples of a micro-batch.")] = 1
    sequence_length: Annotated[int | None, count("Tokens (default: 128, or what fits).")] = None
    images: Annotated[int, index("Of each text, if the model takes any.")] = 1
    recompute: Annotated[bool, option("With all blocks recomputed.", name="--recompute")] = False
    schedule: Annotated[str | None, option("To be part of: some split backward passes.", "NAME")] = None
    device: Annotated[Literal["cpu", "cuda"] | None, option("Default: cuda, if there is one.")] = None
    address: Annotated[str | None, option("Where ranks of srun or mpirun meet.", "HOST:PORT")] = None


PROFILE = Command(
    name="profile",
    arguments=ProfileArguments,
    work="hybridpp.cli.profile:run",
    examples=(
        "hybridpp profile --output device.json",
        "hybridpp profile --model llama --microbatch-size 4 --sequence-length 2048",
    ),
)
