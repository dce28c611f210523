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

    output: Annotated[str, option("The profile to write, or to add to.", "FILE")] = "device.json"
    model: Annotated[
        str | None, option("Also measure this model: a folder, a name on the hub, or module:function.", "NAME")
    ] = None
    task: Annotated[str | None, option("The task, such as CausalLM (default: that of config.json).", "TASK")] = None
    precision: Annotated[Literal["fp16", "bf16", "fp32"], option("The precision that training computes in.")] = "bf16"
    tp_size: Annotated[int, count("The number of tensor-parallel ranks.")] = 1
    microbatch_size: Annotated[int, count("The number of samples in a micro-batch.")] = 1
    sequence_length: Annotated[int | None, count("The tokens of a sample (default: 128, or what fits).")] = None
    images: Annotated[int, index("The images of each text, if the model takes any.")] = 1
    recompute: Annotated[bool, option("Measure the model with all blocks recomputed.", name="--recompute")] = False
    schedule: Annotated[str | None, option("Measure for this schedule; some split backward passes.", "NAME")] = None
    device: Annotated[
        Literal["cpu", "cuda"] | None, option("The device to measure (default: cuda if there is one).")
    ] = None
    address: Annotated[str | None, option("The address where ranks of srun or mpirun meet.", "HOST:PORT")] = None


PROFILE = Command(
    name="profile",
    arguments=ProfileArguments,
    work="hybridpp.cli.profile:run",
    examples=(
        "hybridpp profile --output device.json",
        "hybridpp profile --model llama --microbatch-size 4 --sequence-length 2048",
    ),
)
