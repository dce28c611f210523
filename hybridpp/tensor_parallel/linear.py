"""How a layer's weight lies: which of its dimensions are outputs, which inputs."""

from typing import NamedTuple

from torch import nn


class Layer(NamedTuple):
    """A module that multiplies by one weight.

    Attributes:
        output_dim: of the weight.
        input_dim: of the weight.
        num_outputs: its size.
        num_inputs: its size.
    """

    output_dim: int
    input_dim: int
    num_outputs: int
    num_inputs: int


def layer_of(module: nn.Module) -> Layer | None:
    """How a linear layer's weight lies; None for modules of any other kind."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or weight.shape[0] * weight.shape[1] == 0:
        return None
    if isinstance(module, nn.Linear):
        return Layer(0, 1, *weight.shape)
    forward = type(module).forward
    # transformers' own; known by name, so that it need not be there.
    if f"{forward.__module__}.{forward.__qualname__}" == "transformers.pytorch_utils.Conv1D.forward":
        return Layer(1, 0, weight.shape[1], weight.shape[0])
    return None


def layers_of(block: nn.Module) -> dict[str, Layer]:
    """The linear layers of a block, by name."""
    found = {name: layer_of(module) for name, module in block.named_modules()}
    return {name: layer for name, layer in found.items() if layer is not None}
