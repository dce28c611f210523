"""Which modules are linear layers, and the dimensions of their weights."""

from typing import Any, NamedTuple

import torch
from torch import nn

from hybridpp.nn import walk
from hybridpp.nn.torch_private import parameters_of

# transformers' GPT-2 layer; known by name, so that transformers need not be installed.
_CONV1D = "transformers.pytorch_utils.Conv1D"


class LinearShape(NamedTuple):
    """The weight of a linear layer.

    Attributes:
        output_dim: the weight's dimension of outputs.
        input_dim: the weight's dimension of inputs.
        num_outputs: size of ``output_dim``.
        num_inputs: size of ``input_dim``.
    """

    output_dim: int
    input_dim: int
    num_outputs: int
    num_inputs: int


def linear_shape(module: nn.Module) -> LinearShape | None:
    """The dimensions of a linear layer's weight; None for other modules and empty weights."""
    weight = parameters_of(module).get("weight")
    if weight is None or weight.dim() != 2 or weight.shape[0] * weight.shape[1] == 0:
        return None
    if isinstance(module, nn.Linear):
        return LinearShape(0, 1, *weight.shape)
    if is_conv1d_forward(type(module).forward):
        return LinearShape(1, 0, weight.shape[1], weight.shape[0])
    return None


def linear_shapes(block: nn.Module) -> dict[str, LinearShape]:
    """The linear layers of a block, by name."""
    found = {name: linear_shape(module) for name, module in walk.named_modules(block)}
    return {name: shape for name, shape in found.items() if shape is not None}


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an ``nn.Linear`` or transformers' ``Conv1D``, or of a subclass."""
    return isinstance(module, nn.Linear) or any(_full_name(kind) == _CONV1D for kind in type(module).__mro__)


def output_dim(module: nn.Module) -> int:
    """The dimension of outputs in the weight of a module for which :func:`is_linear` holds."""
    return 0 if isinstance(module, nn.Linear) else 1


def is_conv1d_forward(forward: Any) -> bool:
    """Whether a class's ``forward`` is that of transformers' ``Conv1D``."""
    return _full_name(forward) == f"{_CONV1D}.forward"


def is_matrix_layer(module: nn.Module) -> bool:
    """Whether a module has a matrix as its weight, no children, and is no embedding, whatever its class."""
    if isinstance(module, nn.Embedding | torch.jit.ScriptModule) or next(module.children(), None) is not None:
        return False
    weight = parameters_of(module).get("weight")
    return weight is not None and weight.dim() == 2


def _full_name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
