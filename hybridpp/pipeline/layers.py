"""The kinds of layers whose weight gradient can be computed apart from their input's.

In here ``x`` is a layer's input and ``dy`` the gradient of its output. What is computed is, bit for bit, what autograd
computes for the module's own forward.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

Gradients = tuple[Tensor, Tensor | None]


class Kept(Protocol):
    """How to have a layer's input again of which less is kept."""

    def expect(self) -> None:
        """It will be asked for, once per backward pass."""

    def start(self, part: Tensor, /) -> None:
        """Begin to make it of what is kept."""

    def take(self) -> Tensor:
        """It; :meth:`start` was called before."""


class Layer(NamedTuple):
    """How one kind of module computes.

    Attributes:
        forward: ``(module, x, weight, bias)`` gives the output.
        input_gradient: ``(module, dy, x, weight)`` gives the gradient of ``x``.
        weight_gradients: ``(module, dy, x, weight, has_bias)`` gives those of the weight and, if it has one, the bias.
        input_dims: how many dimensions ``x`` has.
        any_dims: whether more will do too: all but the last ones then number samples.
        prepare: what ``x`` goes through before, gradient and all; None: nothing.
        finish: what the output goes through behind, gradient and all; None: nothing.
        keep: ``(x, later)`` gives what is kept of ``x`` for the weight's gradient, which may have to wait for a W
            action, and how to have ``x`` again; None: ``x`` itself is kept. Gradients of ``x`` and what ``arrive`` does
            are then computed of what is kept.
        arrive: ``(dy, x)`` gives what ``dy`` becomes before the gradients above are computed of it; None: ``dy``.
        may_wait: whether the weight's gradient is better computed a little later, while what ``prepare`` does with the
            gradient of ``x`` is under way (see ``WeightGradients.release``).
    """

    forward: Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Any, Tensor, Tensor, Tensor], Tensor]
    weight_gradients: Callable[[Any, Tensor, Tensor, Tensor, bool], Gradients]
    input_dims: int
    any_dims: bool = True
    prepare: Callable[[Tensor], Tensor] | None = None
    finish: Callable[[Tensor], Tensor] | None = None
    keep: Callable[[Tensor, bool], tuple[Tensor, Kept] | None] | None = None
    arrive: Callable[[Tensor, Tensor], Tensor] | None = None
    may_wait: bool = False


def layer_of(module: nn.Module) -> Layer | None:
    """How the module computes, if it is of a kind that is known here and keeps to it."""
    forward = type(module).forward
    if "forward" in vars(module) or module._parameters.get("weight") is None:
        return None
    # transformers' own; known by name, so that it need not be there.
    if f"{forward.__module__}.{forward.__qualname__}" == "transformers.pytorch_utils.Conv1D.forward":
        return _CONV1D
    if isinstance(module, nn.Conv2d) and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        return None
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return None
    return _KINDS.get(forward)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _linear(module: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


def _linear_input(module: nn.Linear, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return dy @ weight


def _linear_weights(module: nn.Linear, dy: Tensor, x: Tensor, weight: Tensor, has_bias: bool) -> Gradients:
    rows = _rows(dy)
    return rows.t() @ _rows(x), rows.sum(0) if has_bias else None


def _conv1d(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = torch.mm(_rows(x), weight) if bias is None else torch.addmm(bias, _rows(x), weight)
    return rows.view(*x.shape[:-1], weight.shape[1])


def _conv1d_input(module: Any, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return dy @ weight.t()


def _conv1d_weights(module: Any, dy: Tensor, x: Tensor, weight: Tensor, has_bias: bool) -> Gradients:
    rows = _rows(dy)
    return _rows(x).t() @ rows, rows.sum(0) if has_bias else None


def _conv2d(module: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = module._conv_forward(x, weight, bias)
    return output


def _conv2d_backward(
    module: nn.Conv2d, dy: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor | None]:
    # A bias that is wanted has the size of the output's channels.
    bias_sizes = [dy.shape[1]] if wanted[2] else None
    gradients: tuple[Tensor, Tensor, Tensor | None] = torch.ops.aten.convolution_backward(
        dy, x, weight, bias_sizes, module.stride, module.padding, module.dilation, False, [0, 0], module.groups, wanted
    )
    return gradients


def _conv2d_input(module: nn.Conv2d, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return _conv2d_backward(module, dy, x, weight, [True, False, False])[0]


def _conv2d_weights(module: nn.Conv2d, dy: Tensor, x: Tensor, weight: Tensor, has_bias: bool) -> Gradients:
    return _conv2d_backward(module, dy, x, weight, [False, True, has_bias])[1:]


def _embedding(module: nn.Embedding, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.embedding(x, weight, module.padding_idx, None, 2.0, module.scale_grad_by_freq, False)


def _embedding_weights(module: nn.Embedding, dy: Tensor, x: Tensor, weight: Tensor, has_bias: bool) -> Gradients:
    padding = -1 if module.padding_idx is None else module.padding_idx
    gradient: Tensor = torch.ops.aten.embedding_dense_backward(
        dy, x, weight.shape[0], padding, module.scale_grad_by_freq
    )
    return gradient, None


def _no_input_gradient(module: nn.Module, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    raise AssertionError("indices have no gradient")


_CONV1D = Layer(_conv1d, _conv1d_input, _conv1d_weights, input_dims=2)
_KINDS: dict[Any, Layer] = {
    nn.Linear.forward: Layer(_linear, _linear_input, _linear_weights, input_dims=2),
    nn.Conv2d.forward: Layer(_conv2d, _conv2d_input, _conv2d_weights, input_dims=4, any_dims=False),
    nn.Embedding.forward: Layer(_embedding, _no_input_gradient, _embedding_weights, input_dims=1),
}
