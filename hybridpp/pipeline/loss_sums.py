"""Which terms of a loss that a script made add up over samples: they are divided by nothing that counts samples."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hybridpp.nn.torch_private import INPUT_METADATA
from hybridpp.pipeline.loss_coupling import LossSection, outputs_at
from hybridpp.pipeline.loss_graph import GraphLoss, GraphTerm

# Nodes below a term that are looked at, and dimensions of a tensor.
_MAX_NODES, _MAX_DIMS = 100, 6
# A mean that is multiplied with a smaller number is weighted, though there may be as many samples.
_LEAST_SAMPLES = 3
_TOLERANCE = 1e-5
# What nodes keep of the tensors that choose or weigh elements.
_CHOOSING = ("_saved_other", "_saved_self", "_saved_mask", "_saved_condition", "_saved_target")
_BY_NOTHING = "a sum that is divided by nothing"
_BY_CONSTANTS = "a sum that is only multiplied with constants"
_BY_OTHERS = "a sum, divided by {number:g}, which is no number of samples or elements"
_TIMES_SAMPLES = "a mean that is multiplied with the number of samples"


class SumSearch:
    """The search for sums in losses that are made in one way.

    A number that a sum is divided by, and that is no size that shows, may be counted in ways that leave no
    trace. It is taken for a constant if the next loss has the same one.
    """

    def __init__(self) -> None:
        self._before: dict[int, float] = {}
        self.is_done = False

    def look(self, loss: GraphLoss, section: LossSection) -> str:
        """Which term is a sum over samples, in words; "": none is, as far as known. Look again unless it is done.

        The host waits for masks on a device, once, if a sum is divided by a number that no size shows.

        Args:
            loss: what is read of a loss.
            section: of it.
        """
        self.is_done = True
        for index, term in enumerate(loss.terms):
            if not isinstance(term.num_items, Tensor) and not term.num_items:  # it may begin later, as annealed ones do
                self.is_done = False
                continue
            if not _is_of_samples(term, section):
                continue
            why, number = _sum_in(term, section, _sizes(term, section, len(loss.terms)))
            if why and (math.isnan(number) or self._before.get(index) == number):
                return why
            if why and index not in self._before:
                is_chosen = any(_is_near(number, one) for one in _chosen(term.node))
                self._before[index] = math.nan if is_chosen else number
                self.is_done &= is_chosen
        return ""


def _sum_in(term: GraphTerm, section: LossSection, sizes: Set[int]) -> tuple[str, float]:
    """In words, how a term is a sum, "" if it is none; and the number that must be a constant; NaN: it is sure."""
    if not all(_is_plain(factor) for factor, _ in term.scales):
        return "", math.nan
    divisors = [float(factor) for factor, power in term.scales if power > 0]
    multipliers = [float(factor) for factor, power in term.scales if power < 0]
    numbers = [*divisors, math.prod(divisors)]
    # One of a single digit, as 0.1, is a weight, though there may be ten samples.
    numbers += [1 / one for one in multipliers if one and float(f"{one:.1g}") != one]
    is_mean = term.factors is None
    samples = section.nums_samples | {math.prod(shape) for shape in section.shapes}
    if is_mean and not any(one >= _LEAST_SAMPLES and one in samples for one in multipliers):
        return "", math.nan
    # What nothing was divided by is divided by 1, which is no count then.
    if (divisors or multipliers) and any(_is_near(abs(one), size) for one in numbers if one != 1 for size in sizes):
        return "", math.nan
    if 1 in sizes and any(one == 1 for one in divisors):
        return "", math.nan
    if is_mean:
        return _TIMES_SAMPLES, math.prod(divisors) if divisors else math.nan
    if divisors:
        return _BY_OTHERS.format(number=math.prod(divisors)), math.prod(divisors)
    return (_BY_CONSTANTS if multipliers else _BY_NOTHING), math.nan


def _is_plain(factor: Any) -> bool:
    """Whether a factor is a number: torch saves one as a tensor of the host's, without a dimension."""
    if not isinstance(factor, Tensor):
        return True
    return factor.is_cpu and not factor.dim() and factor.dtype in (torch.int64, torch.float64)


def _is_near(number: float, other: float) -> bool:
    return math.isclose(number, other, rel_tol=_TOLERANCE)


def _nodes_below(node: Node) -> Iterator[tuple[Node, bool]]:
    """The nodes that made a term, up to the outputs of models; and whether one is such an output."""
    pending, seen = [node], {node}
    for one in pending:  # which grows
        is_output = bool(outputs_at(one)) and one is not node
        yield one, is_output
        if is_output or len(pending) > _MAX_NODES:
            continue
        inner = [following for following, _ in one.next_functions if following is not None and following not in seen]
        seen.update(inner)
        pending += dict.fromkeys(inner)


def _is_of_samples(term: GraphTerm, section: LossSection) -> bool:
    """Whether a term is made of samples, as far as known, and not of weights alone, as penalties are."""
    nodes = list(_nodes_below(term.node))
    outputs = [output for node, is_output in nodes if is_output for output in outputs_at(node)]
    if outputs:
        return any(output.samples is not None for output in outputs)
    if not section.is_of_own_loss:
        return False
    # Elements of weights stay as many until they are added up.
    return any(
        following is not None and following.next_functions and _numel(one) != _numel(following)
        for one, _ in nodes[1:]
        for following, _ in one.next_functions
    )


def _shape(node: Node) -> tuple[int, ...]:
    made = getattr(node, INPUT_METADATA, ())
    return tuple(map(int, made[0].shape)) if made else ()


def _numel(node: Node) -> int:
    return math.prod(_shape(node))


def _sizes(term: GraphTerm, section: LossSection, num_terms: int) -> set[int]:
    """The numbers of samples, and of elements of all samples, that show, of one and of all terms."""
    samples = {one for one in section.nums_samples if one}
    shapes = [_shape(node) for node, _ in _nodes_below(term.node)]
    shapes += [*section.shapes, *section.given]
    found = set(samples)
    for shape in dict.fromkeys(shapes):
        if 0 < len(shape) <= _MAX_DIMS and 0 not in shape:
            found.update(_products(shape, samples))
    return found | {one * num_terms for one in found}


def _products(shape: Sequence[int], samples: Set[int]) -> Iterator[int]:
    """Of some dimensions, with that of the samples."""
    for size in range(1, len(shape) + 1):
        for dims in itertools.combinations(range(len(shape)), size):
            if 0 in dims or any(shape[dim] in samples for dim in dims):
                yield math.prod(shape[dim] for dim in dims)


def _chosen(node: Node) -> Iterable[float]:
    """The numbers of elements that masks choose, or the sums of weights, that a term is made of."""
    for one, is_output in _nodes_below(node):
        if is_output:
            continue
        for label in _CHOOSING:
            tensor = getattr(one, label, None)
            if not isinstance(tensor, Tensor) or tensor.numel() < 2:
                continue
            tensor = tensor.detach()
            if (ignored := getattr(one, "_saved_ignore_index", None)) is not None:
                tensor = tensor != ignored
            repeats = max(_numel(one) // tensor.numel(), 1)  # it was broadcast
            numbers = (tensor.double().sum(), tensor.count_nonzero(), (tensor == 0).sum())
            yield from (repeats * float(number) for number in numbers)
        if isinstance(total := getattr(one, "_saved_total_weight", None), Tensor) and total.numel() == 1:
            yield float(total)
