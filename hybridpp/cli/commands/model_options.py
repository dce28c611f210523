"""What is estimated, which `estimate` and `plan` take."""

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpp.cli.argtypes import count, index, option


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model, how it is trained, and on what device."""

    model: Annotated[str, option("The model: a folder, a name on the hub, or module:function.", "NAME")]
    task: Annotated[str | None, option("The task, such as CausalLM (default: that of config.json).", "TASK")] = None
    precision: Annotated[Literal["fp16", "bf16", "fp32"], option("The precision that training computes in.")] = "bf16"
    optimizer: Annotated[Literal["adam", "sgd-momentum", "sgd"], option("The optimizer, whose states take memory.")] = (
        "adam"
    )
    sequence_length: Annotated[int | None, count("The tokens of a sample (default: 128, or what fits).")] = None
    images: Annotated[int, index("The images of each text, if the model takes any.")] = 1
    device: Annotated[str, option("The device: h100, a100, rtx4090, cpu, or a profile's file.", "NAME")] = "h100"
    links: Annotated[str | None, option("The devices in a host, and Gbit/s to other hosts.", "nvlink:N,ib:R")] = None
