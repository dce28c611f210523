"""What is estimated, which `estimate` and `plan` take."""

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpp.cli.argtypes import count, index, option


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model, how it is trained, and on what device."""

    model: Annotated[str, option("Folder, name on the hub, or module:function.", "NAME")]
    task: Annotated[str | None, option("As CausalLM (default: as config.json says).", "TASK")] = None
    precision: Annotated[Literal["fp16", "bf16", "fp32"], option("Of training.")] = "bf16"
    optimizer: Annotated[Literal["adam", "sgd-momentum", "sgd"], option("Its states take memory.")] = "adam"
    sequence_length: Annotated[int | None, count("Tokens (default: 128, or what fits).")] = None
    images: Annotated[int, index("Of each text, if the model takes any.")] = 1
    device: Annotated[str, option("h100, a100, rtx4090, cpu; or a profile's file.", "NAME")] = "h100"
    links: Annotated[str | None, option("Devices in a host; Gbit/s to others.", "nvlink:N,ib:R")] = None
