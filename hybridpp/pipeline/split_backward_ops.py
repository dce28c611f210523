"""The kinds of layers whose weight gradient can be computed separately from the input's.

In this file ``x`` is a layer's input and ``dy`` the gradient of its output. All results are equal, bit for bit, to
those of autograd for the module's own forward.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpp.nn.linear import is_conv1d_forward
from hybridpp.nn.torch_private import conv_forward, parameters_of

Gradients = tuple[Tensor, Tensor | None]


class SavedInput(Protocol):
    """Restores a layer's input, of which only a part was saved."""

    def expect(self) -> None:
        """Announce one :meth:`take` per backward pass."""

    def start(self, part: Tensor, /) -> None:
        """Start to restore the input from the part that was saved."""

    def take(self) -> Tensor:
        """The input; :meth:`start` must have been called before."""

    def with_gradient(self, part: Tensor, /) -> Tensor:
        """The input, restored from the part that was saved, to which its gradients flow."""


class SplitBackwardOps(NamedTuple):
    """The operations of one kind of module.

    Attributes:
        forward: ``(module, x, weight, bias)`` gives the output.
        input_gradient: ``(module, dy, x, weight)`` gives the gradient of ``x``.
        weight_gradients: ``(module, dy, x, weight, has_bias)`` gives the gradients of the weight and of the bias (None
            without one).
        input_dims: the number of dimensions of ``x``.
        any_dims: whether ``x`` may have more dimensions, in front; they then number samples.
        pre_forward: a differentiable function that is applied to ``x`` first; None: no function.
        post_forward: a differentiable function that is applied to the output last; None: no function.
        save_input: ``(x, later)`` gives what is saved of ``x`` for the weight's gradient, and a handle that restores
            ``x`` from it. ``later``: the weight's gradient waits for a W action. None: ``x`` itself is saved.
            ``input_gradient`` and ``pre_grad`` are given what is saved.
        pre_grad: ``(dy, x)`` gives the ``dy`` that the gradients above are computed from; None: ``dy`` itself.
        factors: ``(module, dy, x)`` gives two matrices whose product is the weight's gradient; None: there are none.
        bias_gradient: ``(module, dy, x)`` gives the gradient of the bias, where there are ``factors``.
        overlap_comm: whether to compute the weight's gradient while the backward of ``pre_forward`` communicates (see
            ``WeightGradients.run_overlapped``).
    """

    forward: Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Any, Tensor, Tensor, Tensor], Tensor]
    weight_gradients: Callable[[Any, Tensor, Tensor, Tensor, bool], Gradients]
    input_dims: int
    any_dims: bool = True
    pre_forward: Callable[[Tensor], Tensor] | None = None
    post_forward: Callable[[Tensor], Tensor] | None = None
    save_input: Callable[[Tensor, bool], tuple[Tensor, SavedInput] | None] | None = None
    pre_grad: Callable[[Tensor, Tensor], Tensor] | None = None
    factors: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    bias_gradient: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    overlap_comm: bool = False


def split_backward_ops(module: nn.Module) -> SplitBackwardOps | None:
    """The operations of a module; None: its class is not supported, or an option or an own forward changes them."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    forward = type(module).forward
    if "forward" in vars(module) or parameters_of(module).get("weight") is None:
        return None
    if is_conv1d_forward(forward):
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


def _linear_factors(module: nn.Linear, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return _rows(dy).t(), _rows(x)


def _sum_of_rows(module: nn.Module, dy: Tensor, x: Tensor) -> Tensor:
    return _rows(dy).sum(0, dtype=torch.float32)


def _conv1d(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = torch.mm(_rows(x), weight) if bias is None else torch.addmm(bias, _rows(x), weight)
    return rows.view(*x.shape[:-1], weight.shape[1])


def _conv1d_input(module: Any, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return dy @ weight.t()


def _conv1d_weights(module: Any, dy: Tensor, x: Tensor, weight: Tensor, has_bias: bool) -> Gradients:
    rows = _rows(dy)
    return _rows(x).t() @ rows, rows.sum(0) if has_bias else None


def _conv1d_factors(module: Any, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return _rows(x).t(), _rows(dy)


def _conv2d(module: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return conv_forward(module, x, weight, bias)


def _conv2d_backward(
    module: nn.Conv2d, dy: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor | None]:
    # The bias has the size of the output's channels.
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


_CONV1D = SplitBackwardOps(
    _conv1d, _conv1d_input, _conv1d_weights, input_dims=2, factors=_conv1d_factors, bias_gradient=_sum_of_rows
)
_KINDS: dict[Any, SplitBackwardOps] = {
    nn.Linear.forward: SplitBackwardOps(
        _linear, _linear_input, _linear_weights, input_dims=2, factors=_linear_factors, bias_gradient=_sum_of_rows
    ),
    nn.Conv2d.forward: SplitBackwardOps(_conv2d, _conv2d_input, _conv2d_weights, input_dims=4, any_dims=False),
    nn.Embedding.forward: SplitBackwardOps(_embedding, _no_input_gradient, _embedding_weights, input_dims=1),
}
