"""The kinds of layers whose weight gradient can be computed apart from their input's.

In here ``x`` is a layer's input, ``dy`` the gradient of its output, and a *total* an accumulated gradient of the same
dtype, which is added to in place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Layer(NamedTuple):
    """How one kind of module computes.

    Attributes:
        forward: ``(module, x, weight, bias)`` gives the output.
        input_gradient: ``(module, dy, x, weight)`` gives the gradient of ``x``.
        weight_gradient: ``(module, dy, x, weight, total)`` gives that of the weight, added to a total if there is one.
        bias_gradient: ``(dy, dtype)`` gives that of the bias, summed in ``dtype``.
        input_dims: how many dimensions ``x`` must have; None if any number will do.
        prepare: what ``x`` goes through before, gradient and all; None: nothing.
        may_wait: whether the weight's gradient is better computed a little later, while what ``prepare`` does with the
            gradient of ``x`` is under way (see ``WeightGradients.release``).
    """

    forward: Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Any, Tensor, Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Any, Tensor, Tensor, Tensor, Tensor | None], Tensor]
    bias_gradient: Callable[[Tensor, torch.dtype], Tensor]
    input_dims: int | None = None
    prepare: Callable[[Tensor], Tensor] | None = None
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
    return tensor.reshape(-1, tensor.shape[-1])


def _row_sum(dy: Tensor, dtype: torch.dtype) -> Tensor:
    return _rows(dy).sum(0, dtype=dtype)


def _linear(module: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


def _linear_input(module: nn.Linear, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return dy @ weight


def _linear_weight(module: nn.Linear, dy: Tensor, x: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
    left, right = _rows(dy).t(), _rows(x)
    return left @ right if total is None else total.addmm_(left, right)


def _conv1d(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = torch.mm(_rows(x), weight) if bias is None else torch.addmm(bias, _rows(x), weight)
    return rows.view(*x.shape[:-1], weight.shape[1])


def _conv1d_input(module: Any, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return dy @ weight.t()


def _conv1d_weight(module: Any, dy: Tensor, x: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
    left, right = _rows(x).t(), _rows(dy)
    return left @ right if total is None else total.addmm_(left, right)


def _conv2d(module: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = module._conv_forward(x, weight, bias)
    return output


def _conv2d_backward(module: nn.Conv2d, dy: Tensor, x: Tensor, weight: Tensor, wanted: int) -> Tensor:
    mask = [place == wanted for place in range(3)]
    gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        dy, x, weight, None, module.stride, module.padding, module.dilation, False, [0, 0], module.groups, mask
    )
    return gradients[wanted]


def _conv2d_input(module: nn.Conv2d, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return _conv2d_backward(module, dy, x, weight, 0)


def _conv2d_weight(module: nn.Conv2d, dy: Tensor, x: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
    gradient = _conv2d_backward(module, dy, x, weight, 1)
    return gradient if total is None else total.add_(gradient)


def _channel_sum(dy: Tensor, dtype: torch.dtype) -> Tensor:
    return dy.sum((0, 2, 3), dtype=dtype)


def _embedding(module: nn.Embedding, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.embedding(x, weight, module.padding_idx, None, 2.0, module.scale_grad_by_freq, False)


def _embedding_weight(module: nn.Embedding, dy: Tensor, x: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
    padding = -1 if module.padding_idx is None else module.padding_idx
    gradient: Tensor = torch.ops.aten.embedding_dense_backward(
        dy, x, weight.shape[0], padding, module.scale_grad_by_freq
    )
    return gradient if total is None else total.add_(gradient)


def _no_input_gradient(module: nn.Module, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    raise AssertionError("indices have no gradient")


_CONV1D = Layer(_conv1d, _conv1d_input, _conv1d_weight, _row_sum)
_KINDS: dict[Any, Layer] = {
    nn.Linear.forward: Layer(_linear, _linear_input, _linear_weight, _row_sum),
    nn.Conv2d.forward: Layer(_conv2d, _conv2d_input, _conv2d_weight, _channel_sum, input_dims=4),
    nn.Embedding.forward: Layer(_embedding, _no_input_gradient, _embedding_weight, _row_sum),
}
