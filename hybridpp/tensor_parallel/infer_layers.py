"""How a layer's weight lies: which of its dimensions are outputs, which inputs, and what a rank's part of it is."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """What a rank has of one parameter (or of another tensor that is divided like one).

    Attributes:
        dim: along which it is divided.
        widths: of the pieces along it that are each divided evenly; one where it is not fused.
        copies: of each piece, how many neighbouring ranks share a part: more than one where there are fewer heads than
            ranks. Empty: one for all.
        repeated: whether the pieces follow each other again and again (heads of the first sample, of the second, …).
    """

    dim: int
    widths: tuple[int, ...]
    copies: tuple[int, ...] = ()
    repeated: bool = False

    def index(self, rank: int, tp_size: int, size: int) -> Tensor:
        """Places that this rank has along a dimension of ``size``."""
        places, start = [], 0
        for width, copies in zip(self.widths, self.copies or (1,) * len(self.widths), strict=True):
            own = width * copies // tp_size
            first = start + rank // copies * own
            places.append(torch.arange(first, first + own))
            start += width
        once = torch.cat(places)
        return torch.cat([once + start * turn for turn in range(size // start)]) if self.repeated else once

    def divides(self, tp_size: int) -> bool:
        """Whether every rank's part has the same size."""
        copies = self.copies or (1,) * len(self.widths)
        return all(tp_size % c == 0 and w % (tp_size // c) == 0 for w, c in zip(self.widths, copies, strict=True))

    def of(self, tensor: Tensor, rank: int, tp_size: int) -> Tensor:
        """A rank's part of a tensor."""
        return tensor.index_select(self.dim, self.index(rank, tp_size, tensor.shape[self.dim]).to(tensor.device))


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
