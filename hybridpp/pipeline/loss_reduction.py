"""Detect losses that are sums over samples without declaring it: averaging these over micro-batches would be wrong."""

from collections.abc import Callable, Collection, Iterator
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridpp.nn.torch_private import pytree

# Operations that keep a sum a sum, up to a factor. Division is not one of them: the divisor is usually a count.
_KEEPING = ("Add", "Sub", "Mul", "Neg", "View", "Reshape", "ToCopy", "Squeeze", "Unsqueeze", "Alias", "Clone")
_ARITHMETIC_CALLS = frozenset(["add", "radd", "iadd", "sub", "rsub", "mul", "rmul", "imul", "neg"])
_KEEPING_CALLS = _ARITHMETIC_CALLS | {"float", "double", "to", "view", "reshape", "squeeze", "clone", "detach"}
# torch's enum value of reduction="sum".
_SUM = 2
# Longer paths from a loss to its terms are not searched: in a branching graph the search could take very long.
_MAX_NODES = 64


class LossReduction(IntEnum):
    """How a loss is reduced over samples; the most severe last."""

    MEAN = 0
    """A mean, as far as known."""
    SUM_IN_MODEL = 1
    """The model computed the loss, and its last operation is a sum."""
    SUM = 2
    """Twice the samples gave twice the loss: a sum."""


def detect_reduction(loss: Tensor, outputs: Any, on_twice: Callable[[], Any]) -> LossReduction:
    """The reduction of a loss that has an autograd graph.

    If the graph ends with a sum, the criterion is called once more on duplicated samples, which distinguishes a sum
    from a mean with weights that add up to one. A loss that the model computed cannot be checked this way.

    Args:
        loss: the criterion's result.
        outputs: the model's outputs, which the criterion was called with.
        on_twice: calls the criterion with the micro-batch's samples duplicated.
    """
    made = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    losses = {leaf.grad_fn for leaf in made if leaf.numel() == 1}
    ends = {leaf.grad_fn for leaf in made if leaf.numel() != 1}
    terms = list(_terms(loss.grad_fn, ends | losses))
    if terms and all(term in losses for term in terms):
        inside = [last for term in terms for last in _terms(term, ends)]
        return LossReduction.SUM_IN_MODEL if inside and all(map(_is_sum, inside)) else LossReduction.MEAN
    if any(_is_sum(term) for term in terms if term not in losses):
        return confirm_sum(loss, on_twice)
    return LossReduction.MEAN


@torch.no_grad()
def confirm_sum(loss: Tensor, on_twice: Callable[[], Any]) -> LossReduction:
    """Whether a loss that ends with a sum is a sum over samples; arguments as for :func:`detect_reduction`."""
    try:
        twice = on_twice()
    except Exception:  # a criterion may raise anything for a number of samples that it was not made for
        return LossReduction.MEAN
    return LossReduction.SUM if _is_twice(twice, loss.detach()) else LossReduction.MEAN


class SumTracer(TorchFunctionMode):
    """A function mode that records sums, for losses without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: list[Tensor] = []

    def is_sum(self, loss: Any) -> bool:
        """Whether a sum, up to a factor, was the last operation that made it."""
        return any(loss is each for each in self._sums)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if isinstance(result, Tensor) and result.numel() == 1:
            name, first = getattr(function, "__name__", "").strip("_"), args[0] if args else kwargs.get("input")
            if (
                kwargs.get("reduction") == "sum"
                or (name == "sum" and isinstance(first, Tensor) and first.numel() > 1)
                or (name in _KEEPING_CALLS and any(map(self.is_sum, args)))
            ):
                self._sums.append(result)
        return result


def duplicate_samples(tree: Any, num_samples: int, dims: Callable[[Any], list[int | None]]) -> Any:
    """A copy of ``tree`` with every tensor's samples duplicated; ``dims`` gives the sample dimension of each leaf.

    Tensors with several rows per sample (all tokens, for example) are duplicated, too.
    """
    leaves, structure = pytree.tree_flatten(tree)
    for index, (leaf, dim) in enumerate(zip(leaves, dims(tree), strict=True)):
        if isinstance(leaf, Tensor) and dim is not None and dim < leaf.dim() and leaf.shape[dim] % num_samples == 0:
            leaves[index] = torch.cat([leaf.detach()] * 2, dim)
    return pytree.tree_unflatten(leaves, structure)


def _terms(node: Any, ends: Collection[Any]) -> Iterator[Any]:
    """The operations at the terms of a linear combination; empty if the search exceeds its limit."""
    pending, found = [node], list[Any]()
    for _ in range(_MAX_NODES):
        if not pending:
            yield from found
            return
        node = pending.pop()
        if node is None:
            continue
        if node not in ends and node.name().startswith(_KEEPING):
            pending += [following for following, _ in node.next_functions]
        else:
            found.append(node)


def _is_sum(node: Any) -> bool:
    return node.name().startswith(("SumBackward", "DotBackward")) or getattr(node, "_saved_reduction", None) == _SUM


def _is_twice(twice: Any, once: Tensor) -> bool:
    if not isinstance(twice, Tensor) or twice.numel() != 1:
        return False
    # A loss of 0 shows nothing; the tolerance covers rounding.
    return bool(once != 0) and bool(((twice / once) - 2).abs() < 0.01)
