"""What a loss that the script made is a mean over, read from its autograd graph."""

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hybridpp.nn.torch_private import INPUT_METADATA, loss_input_of, loss_reduction_of, reduced_sizes_of

# Linear in their one input.
_KEEPING = frozenset(
    f"{name}Backward{number}"
    for name in ("ToCopy", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Clone", "Alias", "Neg", "Expand")
    for number in (0, 1, 2)
) | {"CopyBackwards"}
_ADDING = frozenset(f"{name}Backward{number}" for name in ("Add", "Sub", "Rsub") for number in (0, 1))
_MULTIPLYING = frozenset(["MulBackward0", "MulBackward1"])
_DIVIDING = frozenset(["DivBackward0", "DivBackward1"])
_MEANS = frozenset(["MeanBackward0", "MeanBackward1"])
_SUMS = frozenset(["SumBackward0", "SumBackward1"])
_ROWS = frozenset(["SelectBackward0", "UnbindBackward0", "SplitBackward0"])
_MEAN, _ADDS_UP = 1, 2  # at::Reduction
# Nodes that are looked at below a term.
_MAX_BELOW = 30


class GraphTerm(NamedTuple):
    """A part of a loss, which is a sum over items, divided by a number of items.

    Attributes:
        node: that made the sum, or the mean.
        num_items: the number, or in proportion to them; a scalar tensor where it is on a device.
    """

    node: Node
    num_items: float | Tensor


class GraphLoss(NamedTuple):
    """What is read of a loss.

    Attributes:
        terms: that depend on the batch; empty: it is not known what the loss is a mean over.
        kind: equal for losses that are made in the same way, with tensors of any size; from 1 on; 0: not known.
        size: of the tensors that it is made of, if its terms are not known; else 0.
    """

    terms: tuple[GraphTerm, ...] = ()
    kind: int = 0
    size: int = 0


class _Unknown(Exception):
    """The node that is no known sum or mean."""


def read_loss(loss: Tensor, max_terms: int) -> GraphLoss:
    """What a loss is a mean over. Nothing is computed, and no device is waited for.

    Means and sums are followed through additions, and through multiplications and divisions by numbers, in the loss and
    in what the model does last.

    Args:
        loss: scalar, with a graph.
        max_terms: a loss of more terms is not known.
    """
    if loss.grad_fn is None:
        return GraphLoss()
    terms: list[GraphTerm] = []
    names: list[str] = []
    try:
        _walk(loss.grad_fn, [], terms, names)
        nodes = [term.node for term in terms]
        if len(terms) > max_terms or len(set(nodes)) < len(nodes) or _are_of_rows(nodes):
            raise _Unknown(loss.grad_fn)
    except _Unknown as unknown:
        return GraphLoss(size=_size_below(unknown.args[0]))
    return GraphLoss(tuple(terms), 1 + (zlib.crc32(" ".join(names).encode()) & 0xFFFFFF))


def _walk(node: Node, factors: list[tuple[Any, int]], terms: list[GraphTerm], names: list[str]) -> None:
    """Append the terms of what a node makes, which has been divided by factors (power 1), or multiplied (-1)."""
    name = node.name()
    inner = [one for one, _ in node.next_functions if one is not None]
    if math.prod(_shape(node)) != 1:
        raise _Unknown(node)
    names.append(name)
    if _is_of_parameters(node):
        return
    if name in _ADDING or (name in _KEEPING and len(inner) == 1):
        for one in inner:
            _walk(one, factors, terms, names)
    elif name in _MULTIPLYING or name in _DIVIDING:
        _walk_product(node, name, inner, factors, terms, names)
    elif name in _MEANS or name in _SUMS:
        numel = math.prod(reduced_sizes_of(node))
        if numel == 1 and inner:
            _walk(inner[0], factors, terms, names)
        else:
            terms.append(GraphTerm(node, _product(numel if name in _MEANS else 1, factors)))
    elif hasattr(node, "_saved_reduction"):
        terms.append(GraphTerm(node, _product(_num_items(node), factors)))
    elif name == "DotBackward0":
        terms.append(GraphTerm(node, _product(1, factors)))
    else:
        raise _Unknown(node)


def _walk_product(
    node: Node,
    name: str,
    inner: Sequence[Node],
    factors: list[tuple[Any, int]],
    terms: list[GraphTerm],
    names: list[str],
) -> None:
    is_divisor = name in _DIVIDING
    if len(inner) == 2:
        # A learned weight of the term is the same on all replicas.
        of_parameters = [one for one in inner if _is_of_parameters(one)]
        rest = [one for one in inner if one not in of_parameters]
        if len(rest) != 1 or (is_divisor and rest[0] is not inner[0]):
            raise _Unknown(node)
        _walk(rest[0], factors, terms, names)
        return
    if len(inner) != 1 or (is_divisor and node.next_functions[0][0] is None):
        raise _Unknown(node)
    is_first = node.next_functions[0][0] is not None
    factor = getattr(node, "_saved_other" if is_first else "_saved_self", None)
    if factor is None or (isinstance(factor, Tensor) and factor.numel() != 1):
        raise _Unknown(node)
    _walk(inner[0], [*factors, (factor, 1 if is_divisor else -1)], terms, names)


def _num_items(node: Any) -> Any:
    """What one of torch's losses divides by, or a number in proportion to it."""
    if loss_reduction_of(node) == _MEAN:
        weight = getattr(node, "_saved_total_weight", None)
        return loss_input_of(node).numel() if weight is None else weight
    return 1


def _product(count: Any, factors: Sequence[tuple[Any, int]]) -> float | Tensor:
    """A count times factors with their powers: a float, unless one is on a device."""
    product: float | Tensor = _number(count)
    for factor, power in factors:
        value = _number(factor)
        # As tensors do it: a count of 0 items is no error.
        product = product * value if power > 0 else product / value if isinstance(value, Tensor) or value else math.nan
    return product


def _number(value: Any) -> float | Tensor:
    if not isinstance(value, Tensor):
        return float(value)
    return float(value) if value.is_cpu else value.detach().double().reshape(())


def _shape(node: Node) -> tuple[int, ...]:
    """Of what a node makes."""
    made = getattr(node, INPUT_METADATA, ())
    return tuple(made[0].shape) if made else ()


def _below(node: Node) -> Iterator[Node]:
    """Some of the nodes that a node's inputs were made by, from the nearest on."""
    pending, seen = [node], {node}
    for one in pending:
        yield one
        inner = [inner for inner, _ in one.next_functions if inner is not None and inner not in seen]
        if len(pending) > _MAX_BELOW:
            continue
        seen.update(inner)
        pending.extend(inner)


def _is_of_parameters(node: Node) -> bool:
    """Whether it is computed from a few parameters of one element."""
    found = list(_below(node))
    if len(found) > _MAX_BELOW or any(math.prod(_shape(one)) != 1 for one in found):
        return False
    return all(one.next_functions or one.name().endswith("AccumulateGrad") for one in found)


def _are_of_rows(nodes: Sequence[Node]) -> bool:
    """Whether two terms are of rows of one tensor: a loss that is made sample by sample."""
    sources: set[Node] = set()
    for node in nodes:
        own = {
            source
            for one in _below(node)
            if one.name() in _ROWS and getattr(one, "_saved_dim", 1) == 0
            for source, _ in one.next_functions
            if source is not None
        }
        if own & sources:
            return True
        sources |= own
    return False


def _size_below(node: Node) -> int:
    """The size of the nearest tensor that has more than one element."""
    return next((size for one in _below(node) if (size := math.prod(_shape(one))) != 1), 1)


def weigh(node: Node, weight: Tensor) -> Any:
    """Multiply the gradient of what a node made with a weight, in the next backward passes; returns a handle."""

    def weighed(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        # A mean over no items has inf or NaN gradients.
        return tuple(
            None if one is None else torch.where(weight == 0, torch.zeros_like(one), one * weight.to(one.dtype))
            for one in gradients
        )

    return node.register_prehook(weighed)
