"""What a loss is a mean over, read from its autograd graph: of scripts' own losses, and to compare those of steps."""

import math
import zlib
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hybridpp.nn.torch_private import INPUT_METADATA, loss_input_of, loss_reduction_of, pytree, reduced_sizes_of
from hybridpp.pipeline.loss_items import LossForm, Measured, Product
from hybridpp.pipeline.loss_reduction import LossReduction

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
_TURNING = frozenset(["PermuteBackward0", "TransposeBackward0", "TBackward0"])
# Sums of products; and where they keep a factor that needs no gradient.
_DOTS = frozenset(["DotBackward0", "VdotBackward0", "MvBackward0", "MmBackward0", "BmmBackward0"])
_FACTORS = ("_saved_tensor", "_saved_other", "_saved_vec", "_saved_mat2", "_saved_self")
_JOINING = frozenset(["StackBackward0", "CatBackward0"])
_ROWS = frozenset(["SelectBackward0", "UnbindBackward0", "SplitBackward0"])
_SOME_ROWS = _ROWS | {"SliceBackward0", "NarrowBackward0", "IndexBackward0"}
# Of a sum, they make what is no sum over items.
_UNLINEAR = frozenset(
    f"{name}Backward{number}"
    for name in ("Sqrt", "Exp", "Log", "Log1P", "Pow", "Clamp", "ClampMin", "ClampMax", "Abs", "Sigmoid", "Tanh")
    for number in (0, 1, 2)
)
# Of a tensor alone, whose graph has no other inputs.
_OF_ONE = (
    _KEEPING
    | _MEANS
    | _SUMS
    | _ROWS
    | _TURNING
    | frozenset(
        f"{name}Backward{number}"
        for name in (
            *("Exp", "Log", "Log1P", "Softplus", "Softmax", "LogSoftmax", "Logsumexp", "Sigmoid", "LogSigmoid", "Tanh"),
            *("Relu", "Reciprocal", "Pow", "Sqrt", "Rsqrt", "Abs", "Clamp", "ClampMin", "ClampMax", "Slice"),
        )
        for number in ((0, 1) if name.startswith("Clamp") else (0,))
    )
)
_MEAN, _ADDS_UP = 1, 2  # at::Reduction
# The most numbers that are followed where a script stacks its terms.
_MAX_STACKED = 32
# Nodes that are looked at below a term.
_MAX_BELOW = 30
# Nodes between a loss and the outputs whose functions are noted.
_MAX_NOTED = 64
# The relative difference that rounding makes between two counts of items: half precision has three digits.
_TOLERANCE = 1e-2


class Site(NamedTuple):
    """Where the gradient of a term is weighed: all of it passes there, and nothing of other terms.

    Attributes:
        node: that made the term, or its product with what is learned.
        element: which one of the node's result, where others are other terms; None: all.
        of_inputs: whether the gradients of the node's inputs are weighed, not that of its result.
    """

    node: Node
    element: int | None = None
    of_inputs: bool = False


class GraphTerm(NamedTuple):
    """A part of a loss, which is a sum over items, divided by a number of items.

    Attributes:
        node: that made the sum, or the mean.
        num_items: the number, or in proportion to them; a scalar tensor where it is on a device.
        kind: by which function it is reduced, and whether it is divided; "": that does not show.
        is_of_elements: whether the number is that of a tensor's elements.
        is_sum: whether it is a sum that is divided by nothing.
        factors: what a sum is divided by (power 1) and multiplied with (-1); None: it is none, but a mean.
        product: where it is multiplied with what is learned; None: it is not.
        scales: all that it is divided by and multiplied with, but for what a mean is over.
    """

    node: Node
    num_items: float | Tensor
    kind: str = ""
    is_of_elements: bool = False
    is_sum: bool = False
    factors: tuple[tuple[Any, int], ...] | None = None
    product: Site | None = None
    scales: tuple[tuple[Any, int], ...] = ()

    @property
    def site(self) -> Site:
        """Where its gradient is weighed."""
        return self.product or Site(self.node)


class GraphLoss(NamedTuple):
    """What is read of a loss.

    Attributes:
        terms: that depend on the batch; empty: it is not known what the loss is a mean over.
        kind: equal for losses that are made in the same way, with tensors of any size; from 1 on; 0: not known.
        size: of the tensors that it is made of, if its terms are not known; else 0.
        is_one: whether the terms are parts of one sum, which is divided by one number: their number tells nothing.
        is_nothing: whether it is something times 0, or a number, as scripts write it where there is nothing to learn.
        why: why its terms are not known; "": it is made of what is not read.
    """

    terms: tuple[GraphTerm, ...] = ()
    kind: int = 0
    size: int = 0
    is_one: bool = False
    is_nothing: bool = False
    why: str = ""


class _Unknown(Exception):
    """The node that is no known sum or mean; and why, if it is another reason than that."""


def read_loss(loss: Tensor, max_terms: int) -> GraphLoss:
    """What a loss is a mean over. Nothing is computed, and no device is waited for.

    Means and sums are followed through additions, and through multiplications and divisions by numbers, in the loss and
    in what the model does last.

    Args:
        loss: scalar, with a graph.
        max_terms: a loss of more terms is not known.
    """
    if loss.grad_fn is None:
        return GraphLoss(is_nothing=True)
    walk = _Walk(max_terms=max_terms)
    terms, names = walk.terms, walk.names
    try:
        walk(loss.grad_fn, [])
        nodes, sites = [term.node for term in terms], [term.site[:2] for term in terms]
        if len(terms) > max_terms or len(set(nodes)) < len(nodes) or _are_of_rows(nodes):
            raise _Unknown(loss.grad_fn)
        first = (terms[0].factors if terms else None) or ()
        is_one = bool(first) and all(one.factors is not None and _is_same(one.factors, first) for one in terms)
        if len(set(sites)) < len(sites) and not is_one:  # the gradient of the factor would need each of them
            raise _Unknown(loss.grad_fn, "a learned factor multiplies several terms: write a product for each of them")
    except _Unknown as unknown:
        node, *why = unknown.args
        return GraphLoss(size=_size_below(node), why="".join(why))
    if is_one:
        names = sorted({one.kind for one in terms})
    kind = 1 + (zlib.crc32(" ".join(names).encode()) & 0xFFFFFF)
    return GraphLoss(
        tuple(terms), kind, is_one=is_one, is_nothing=bool(terms) and all(_is_zero(one.num_items) for one in terms)
    )


class _Walk:
    """A walk through a loss's graph, to its terms.

    Args:
        is_open: whether a part that is not known is a term, of no kind, instead of an error, and reductions are only
            looked at from outside.
        max_terms: with more, what is stacked is one term.

    Attributes:
        terms: as far as the walk has come.
        names: of what was passed.
        has_stack: of an open walk, whether a term is a reduction of what a script has stacked.
    """

    def __init__(self, is_open: bool = False, max_terms: int = 0):
        self._max_terms = max_terms
        self.terms: list[GraphTerm] = []
        self.names: list[str] = []
        self._is_open, self.has_stack = is_open, False

    def __call__(self, node: Node, factors: Sequence[tuple[Any, int]], site: Site | None = None) -> None:
        """Add the terms of what a node makes, which has been divided by factors (power 1), or multiplied (-1).

        ``site``: where it is multiplied with what is learned.
        """
        name = node.name()
        inner = [one for one, _ in node.next_functions if one is not None]
        if math.prod(_shape(node)) != 1:
            self._unknown(node, name)
            return
        self.names.append(name)
        if is_of_parameters(node):
            return
        if self._is_open and name in _MEANS | _SUMS | _DOTS:
            self.has_stack = self.has_stack or any(map(_is_stack, inner))
        if name in _ADDING or (name in _KEEPING and len(inner) == 1):
            for one in inner:
                self(one, factors, site)
        elif name in _MULTIPLYING or name in _DIVIDING:
            self._product(node, name, inner, factors, site)
        elif name in _MEANS or name in _SUMS:
            sizes = reduced_sizes_of(node)
            numel = math.prod(sizes)
            # One sample is an item as several are; a number that was given a dimension is not.
            if numel == 1 and inner and (not sizes or (not self._is_open and _is_number(inner[0]))):
                self(inner[0], factors, site)
            elif numel == 1 and self._is_open:  # of one element, every reduction is the same
                number = _product(1, [*factors, *_over_samples(inner)])
                self.terms.append(GraphTerm(node, number, is_of_elements=name in _MEANS))
            else:
                self._reduction(node, name, inner, factors, site)
        elif hasattr(node, "_saved_reduction"):
            count = _num_items(node)
            is_of_elements = loss_reduction_of(node) == _MEAN and getattr(node, "_saved_total_weight", None) is None
            self._add(node, f"{name}{loss_reduction_of(node)}", count, factors, site, is_of_elements=is_of_elements)
        elif name in _JOINING and len(inner) == 1 and not self._is_open:
            self(inner[0], factors, site)
        elif name == "DotBackward0" or (name in _DOTS and not self._is_open):
            self._dot(node, name, inner, factors, site)
        elif name in _TURNING and not self._is_open:
            self(inner[0], factors, site)
        else:
            self._unknown(node, name)

    def _reduction(
        self, node: Node, name: str, inner: Sequence[Node], factors: Sequence[tuple[Any, int]], site: Site | None
    ) -> None:
        """Add the terms of a sum, or mean, of a tensor: those that were stacked, else one or those that it adds."""
        is_mean, numel = name in _MEANS, math.prod(reduced_sizes_of(node))
        parts = [] if self._is_open or len(inner) != 1 else _elements(inner[0], numel)
        if self._stacked(parts, [*factors, (numel, 1)] if is_mean else factors, site):
            return
        added = [(node, ())] if len(inner) != 1 else _divided(node, inner[0], numel)
        if self._is_open:
            added = [(node, _over_samples(inner))]
        self.names += [name] * (len(added) - 1)
        adds_up = is_mean and any(one.name() == "SumBackward1" and _has_lost_samples(one) for one in _linear_in(inner))
        for one, own in added:
            of_elements = is_mean and not adds_up
            self._add(one, name, numel if is_mean else 1, [*factors, *own], site, is_of_elements=of_elements)
        if len(added) == 1 and not is_mean and not self._is_open:
            self._without_items(_masks(inner[0], numel) if len(inner) == 1 else [], numel)

    def _dot(
        self, node: Node, name: str, inner: Sequence[Node], factors: Sequence[tuple[Any, int]], site: Site | None
    ) -> None:
        """Add the terms of a sum of products."""
        rest = [one for one in inner if not is_of_parameters(one)]
        if len(rest) == 1 < len(inner) and not self._is_open:
            parts = _elements(rest[0], math.prod(_shape(rest[0])))
            own_sites = [one._replace(site=Site(node, at, of_inputs=True)) for at, one in enumerate(parts)]
            if self._stacked(own_sites, factors, site):
                return
        constant = next((one for label in _FACTORS if isinstance(one := getattr(node, label, None), Tensor)), None)
        numel = 0 if constant is None else constant.numel()
        if self._is_open or len(inner) != 1 or constant is None or math.prod(_shape(inner[0])) != numel:
            self._add(node, name, 1, [*factors, *(_over_samples(inner) if self._is_open else ())], site)
            return
        parts = [one.times(constant, at, -1) for at, one in enumerate(_elements(inner[0], numel))]
        if self._stacked(parts, factors, site):
            return
        added = _divided(node, inner[0], numel)
        self.names += [name] * (len(added) - 1)
        for one, own in added:
            self._add(one, name, 1, [*factors, *own], site)
        if len(added) == 1:
            self._without_items([constant, *_masks(inner[0], numel)], numel)

    def _without_items(self, masks: Sequence[Tensor], numel: int) -> None:
        """The last term has no items where all that it adds up is times 0, whatever lower limit its divisor has."""
        term = self.terms.pop()
        number: float | Tensor = term.num_items if numel else 0.0
        for mask in masks:
            if not mask.is_cpu:
                number = torch.where(mask.detach().any(), number, 0.0)
            elif not mask.any():
                number = 0.0
        self.terms.append(term._replace(num_items=number))

    def _stacked(self, parts: Sequence["_Element"], factors: Sequence[tuple[Any, int]], site: Site | None) -> bool:
        """Whether a script's own terms, which it has stacked, were followed one by one."""
        nodes = [one.node for one in parts if one.node is not None]
        if not nodes or _are_of_rows(nodes, _SOME_ROWS):  # terms of samples: each of them is an item
            return False
        if len(nodes) == 1 and not self._is_open and _is_the_only_row(nodes[0]):
            return False
        num_terms, num_names = len(self.terms), len(self.names)
        for one in parts:
            if one.node is not None:
                self(one.node, [*factors, *one.factors], site or one.site)
        if len(self.terms) <= self._max_terms:
            return True
        del self.terms[num_terms:], self.names[num_names:]
        return False

    def _add(
        self,
        node: Node,
        kind: str,
        count: Any,
        factors: Sequence[tuple[Any, int]],
        site: Site | None,
        is_of_elements: bool = False,
    ) -> None:
        is_divided = any(power > 0 for _, power in factors)
        is_sum = not (is_divided or is_of_elements or isinstance(count, Tensor) or _has_tensor(factors))
        number = _product(count, factors)
        if not self._is_open:
            # A factor below 0 counts no other items.
            number = number.abs() if isinstance(number, Tensor) else abs(number)
            for factor, power in factors:
                if power < 0:  # times 0, it has no items
                    number = _unless_zero(factor, number)
        of_sum = None if is_of_elements or isinstance(count, Tensor) else tuple(factors)
        kind += "/" * is_divided
        self.terms.append(GraphTerm(node, number, kind, is_of_elements, is_sum, of_sum, site, tuple(factors)))

    def _unknown(self, node: Node, name: str) -> None:
        if not self._is_open:
            raise _Unknown(node)
        shows = name in _UNLINEAR or name in _MULTIPLYING or name in _DIVIDING
        self.terms.append(GraphTerm(node, math.nan, name if shows and math.prod(_shape(node)) == 1 else ""))

    def _product(
        self, node: Node, name: str, inner: Sequence[Node], factors: Sequence[tuple[Any, int]], site: Site | None
    ) -> None:
        is_divisor = name in _DIVIDING
        if len(inner) == 2:
            rest = _times_parameters(name, inner)
            if rest is None:
                self._unknown(node, name)
            else:
                self(rest, factors, site or Site(node, of_inputs=True))
            return
        factor = _factor(node, name, inner)
        if factor is None:
            self._unknown(node, name)
            return
        num_terms, num_names = len(self.terms), len(self.names)
        try:
            self(inner[0], [*factors, (factor, 1 if is_divisor else -1)], site)
        except _Unknown:
            if is_divisor or not _is_zero(factor):
                raise
            del self.terms[num_terms:], self.names[num_names:]
            self.terms.append(GraphTerm(node, 0.0))


def _factor(node: Node, name: str, inner: Sequence[Node]) -> Any:
    """The number that the one input of a product or quotient is multiplied with or divided by; None: there is none."""
    is_first = node.next_functions[0][0] is not None
    if len(inner) != 1 or (name in _DIVIDING and not is_first):
        return None
    factor = getattr(node, "_saved_other" if is_first else "_saved_self", None)
    return None if isinstance(factor, Tensor) and factor.numel() != 1 else factor


def _linear_in(inner: Sequence[Node]) -> Iterator[Node]:
    """The nodes of one argument that a reduction is linear in, from the nearest on."""
    for _ in range(_MAX_BELOW):
        if len(inner) != 1:
            return
        (node,) = inner
        yield node
        if node.name() not in _KEEPING | _TURNING | _MULTIPLYING | _DIVIDING | _ADDING | _MEANS | _SUMS:
            return
        inner = [one for one, _ in node.next_functions if one is not None]


def _over_samples(inner: Sequence[Node]) -> tuple[tuple[int, int], ...]:
    """What a reduction's argument was divided by as means over samples, before other dimensions were reduced."""
    found = [_mean_over_samples(node) for node in _linear_in(inner)]
    return tuple((one, 1) for one in found if one is not None)


def _functions_above(node: Node, outputs: Any) -> set[str]:
    """The functions that make a loss of a model's outputs, with the dimensions that they reduce."""
    seen = {leaf.grad_fn for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)}
    nodes, names = [] if node in seen else [node], set[str]()
    for one in nodes:  # which grows
        names.add(f"{one.name()} {getattr(one, '_saved_dim', '')}")
        if len(nodes) < _MAX_NOTED:
            inner = [other for other, _ in one.next_functions if other is not None and other not in seen]
            seen.update(inner)
            nodes += dict.fromkeys(inner)
    return names


def _divided_as_one(node: Node, num_rows: float, factors: tuple[tuple[Any, int], ...] = ()) -> list[GraphTerm]:
    """What a loss is divided by as a whole, or each of the parts that it adds: a sum by a number, a mean by elements.

    Inside of a sum that the script makes item by item, each item may be divided by a number of its own.

    Args:
        node: that made the loss, or a part.
        num_rows: of the samples. A mean is over as many elements, over more of each row, or over chosen ones.
        factors: that it has been divided by.
    """
    name = node.name()
    inner = [one for one, _ in node.next_functions if one is not None]
    if math.prod(_shape(node)) != 1 or is_of_parameters(node):
        return []
    if name in _KEEPING and len(inner) == 1:
        return _divided_as_one(inner[0], num_rows, factors)
    if name in _ADDING and not any(power > 0 for _, power in factors):
        return [term for one in inner for term in _divided_as_one(one, num_rows, factors)]
    if name in _MULTIPLYING | _DIVIDING and (factor := _factor(node, name, inner)) is not None:
        return _divided_as_one(inner[0], num_rows, (*factors, (factor, 1 if name in _DIVIDING else -1)))
    if name in _MEANS and not reduced_sizes_of(node) and len(inner) == 1:  # of a number
        return _divided_as_one(inner[0], num_rows, factors)
    if name in _MEANS:
        sizes, over_samples = reduced_sizes_of(node), _over_samples(inner)
        if sizes and sizes[0] == num_rows:
            return [GraphTerm(node, num_rows)]
        is_of_rows = bool(over_samples) or not sizes or sizes[0] % num_rows == 0 or num_rows in sizes
        return [GraphTerm(node, _product(math.prod(sizes), over_samples), is_of_elements=is_of_rows)]
    factors = (*factors, *(_over_samples(inner) if name in _SUMS else ()))
    is_sum = name in _ADDING | _SUMS | _DOTS and any(power > 0 for _, power in factors)
    return [GraphTerm(node, _product(1, factors) if is_sum else math.nan)]


class LossComparison:
    """Whether the losses of a step are made as the one that showed what they are means over: their graphs tell it.

    The functions that reduce a loss must be those of the first step, and what it is divided by must be in proportion
    to what was counted. The latter also finds numbers that were equal in the first micro-batch by chance. Numbers on a
    device are read with the losses, at the end of the step.

    Attributes:
        counts: numbers on a device, float64 of one element each, that :meth:`close` needs.
    """

    def __init__(self) -> None:
        self.counts: list[Tensor] = []
        self._form: LossForm | None = None
        self._measured: Sequence[Measured | None] = ()
        self._products: dict[int, Sequence[Product | None]] = {}
        self._without_items: list[int] = []
        # With whether the terms show one by one.
        self._read: list[tuple[int, list[_Reduced], bool]] = []
        # Of a mean over samples that its terms do not show, what they are divided by as a whole.
        self._divided: dict[int, list[_Reduced]] = {}

    def begin(self, form: LossForm | None, measured: Sequence[Measured | None] = ()) -> None:
        """Losses of micro-batches with these counts follow; ``form``: of each; None: nothing is compared."""
        self._form, self._measured = form, measured
        self.counts, self._read = [], []
        self._products, self._divided, self._without_items = {}, {}, []

    def has_products(self, microbatch: int, products: Sequence[Product | None]) -> None:
        """What the terms of a micro-batch's loss are divided by, of which it may have others than the form."""
        self._products[microbatch] = products

    def inspect(
        self, microbatch: int, loss: Tensor, outputs: Any = None, inputs: Any = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Read the loss of a micro-batch; see :class:`~hybridpp.pipeline.step.PipelineStep`."""
        counts = self._measured[microbatch] if self._form is not None else None
        # Without items, it may be another.
        if loss.grad_fn is None or counts is None:
            return loss, None
        if not all(counts.used):
            self._without_items.append(microbatch)
        else:
            self._note_functions(loss.grad_fn, outputs)
            walk = _Walk(is_open=True)
            walk(loss.grad_fn, ())
            # Of several terms, one that reduces one element may be that of a sample that has one.
            terms = [
                term if term.kind or len(walk.terms) == 1 else term._replace(num_items=math.nan) for term in walk.terms
            ]
            self._read.append((microbatch, [self._reduced(*term[1:4]) for term in terms], not walk.has_stack))
            if self._form is not None and self._form.is_of_samples:
                parts = _divided_as_one(loss.grad_fn, counts.used[0])
                self._divided[microbatch] = [self._reduced(*term[1:4]) for term in parts]
        return loss, None

    def _note_functions(self, node: Node, outputs: Any) -> None:
        """Note the functions of which a loss is made."""
        if self._form is None or self._form.in_model:
            return
        found = _functions_above(node, outputs)
        if self._form.functions:
            self._form.others.update(found - self._form.functions)
        else:
            self._form.functions.update(found)

    def _reduced(self, count: float | Tensor, kind: str, is_of_elements: bool) -> "_Reduced":
        if not isinstance(count, Tensor):
            return _Reduced(kind, count, None, is_of_elements)
        self.counts.append(count)
        return _Reduced(kind, math.nan, len(self.counts) - 1, is_of_elements)

    def close(self, losses: Sequence[float], counts: Sequence[float]) -> tuple[LossReduction, float]:
        """What is wrong with the losses that were read, and a number that must be equal on all replicas, or 0.

        Args:
            losses: of all micro-batches; none after an error. One of 0 shows nothing: scripts return one where there is
                nothing to learn; nor does one of inf or NaN, which is reported as such.
            counts: the values of :attr:`counts`.
        """
        form, read, self._read, self._form = self._form, self._read, [], None
        if form is None or not losses:
            return LossReduction.MEAN, 0.0
        if form.must_be_empty and any(
            losses[one] and math.isfinite(losses[one]) and not all(own.used)
            for one in self._without_items
            if (own := self._measured[one]) is not None
        ):
            return LossReduction.APPEARED, 0.0
        read = [one for one in read if losses[one[0]] and math.isfinite(losses[one[0]])]
        rows = [(len(terms), {term.kind for term in terms if term.kind}) for _, terms, _ in read]
        is_first = not form.kinds
        first_number, first_kinds = rows[0] if rows else (0, set())
        known, numbers = form.kinds or first_kinds, form.numbers_of_terms or {first_number}
        found = {kind for _, kinds in rows for kind in kinds}
        # A loss that is made sample by sample has more terms where there are more samples.
        has_more = numbers == {1} and not form.is_by_row and any(number > 1 for number, _ in rows)
        if known and (found - known or has_more):
            return LossReduction.APPEARED if is_first or has_more else LossReduction.CHANGED, 0.0
        ratios: dict[tuple[int, int], float] = {}
        is_complete, total = bool(read), 0.0
        for microbatch, terms, is_apart in read:
            total, of_terms = 0.0, self._products.get(microbatch, form.of_terms)
            for index, product in _aligned(form, of_terms, len(terms)) if is_apart else ():
                own = self._measured[microbatch]
                assert own is not None, "else its loss was not read"
                ratio = terms[index].value(counts) / form.divisor(product, own)
                first = ratios.setdefault((len(terms), index), ratio)
                if not math.isclose(ratio, first, rel_tol=_TOLERANCE) and not math.isnan(ratio + first):
                    return LossReduction.UNCOUNTED if is_first else LossReduction.CHANGED, 0.0
                is_of_rows = ratio > 1 and ratio.is_integer()
                if not (is_of_rows and terms[index].is_of_elements and form.is_of_rows(product)):
                    # Else rows may be of another length on each replica.
                    total += (index + 1) * ratio
            is_complete &= math.isfinite(total)
        is_complete &= len({number for number, _ in ratios}) == 1
        if self._divided:
            is_equal, total = self._compare_divisors([one for one, *_ in read], counts)
            is_complete = math.isfinite(total)
            if not is_equal:
                return LossReduction.UNCOUNTED if is_first else LossReduction.CHANGED, 0.0
        form.kinds.update(found)
        form.numbers_of_terms.update(number for number, _ in rows)
        return LossReduction.MEAN, total if is_complete else 0.0

    def _compare_divisors(self, microbatches: Sequence[int], counts: Sequence[float]) -> tuple[bool, float]:
        """Whether losses of as many samples are divided alike; and a number that all replicas must have, or 0."""
        known: dict[tuple[float, int, int], float] = {}
        total = 0.0
        for microbatch in microbatches:
            own, parts = self._measured[microbatch], self._divided[microbatch]
            assert own is not None, "else its loss was not read"
            total = 0.0
            for index, part in enumerate(parts):
                number = part.value(counts)
                first = known.setdefault((own.used[0], len(parts), index), number)
                if not math.isclose(number, first, rel_tol=_TOLERANCE) and not math.isnan(number + first):
                    return False, 0.0
                if not part.is_of_elements:  # else rows may be of another length on each replica
                    total += (index + 1) * number / own.used[0]
        return True, total


class _Reduced(NamedTuple):
    """A term without its node; see :class:`GraphTerm`. ``position``: of its number among those on a device."""

    kind: str
    number: float
    position: int | None
    is_of_elements: bool

    def value(self, counts: Sequence[float]) -> float:
        return self.number if self.position is None else counts[self.position]


def _aligned(form: LossForm, of_terms: Sequence[Product | None], num_terms: int) -> list[tuple[int, Product]]:
    """Which terms of a graph have which of a loss's products; empty: that does not show."""
    counted = [one for one in of_terms if one is not None]
    products: Sequence[Product | None] = ()
    if form.divides_by_total or form.is_by_row or not counted or any(form.of_parts):
        products = ()
    elif num_terms in (len(of_terms), len(counted)):
        products = of_terms if num_terms == len(of_terms) else counted
    elif len(form.products) == 1 and not form.has_constant:
        products = form.products * num_terms
    return [(index, product) for index, product in enumerate(products) if product is not None]


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


def _is_zero(value: Any) -> bool:
    """Whether a number is 0, as far as the host knows it."""
    return not (isinstance(value, Tensor) and not value.is_cpu) and not float(value)


def _unless_zero(factor: Any, number: float | Tensor) -> float | Tensor:
    """A number, or 0 if a factor is 0."""
    if isinstance(factor, Tensor) and not factor.is_cpu:
        return torch.where(factor.detach().reshape(()) == 0, 0.0, number)
    return 0.0 if not float(factor) else number


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


def is_of_parameters(node: Node) -> bool:
    """Whether it is computed from a few parameters of few elements, and of these from nothing else."""
    for number, one in enumerate(_below(node)):
        inner = [following for following, _ in one.next_functions if following is not None]
        sizes = [math.prod(_shape(made)) for made in (one, *inner)]
        if number >= _MAX_BELOW or not 0 < max(sizes) <= _MAX_STACKED:
            return False
        is_wide = any(size != 1 for size in sizes)
        if not one.next_functions:
            is_parameter = not is_wide or isinstance(getattr(one, "variable", None), nn.Parameter)
            if not one.name().endswith("AccumulateGrad") or not is_parameter:
                return False
        elif is_wide and not _is_of_inner(one, inner):
            return False
    return True


def _is_of_inner(node: Node, inner: Sequence[Node]) -> bool:
    """Whether a tensor is made of those alone that its graph has: others, which need no gradient, leave no trace."""
    name = node.name()
    if name in _OF_ONE or (len(inner) == 2 and name in _ADDING | _MULTIPLYING | _DIVIDING):
        return True
    constant = _constant_of(node, name)
    return constant is not None and (not isinstance(constant, Tensor) or constant.numel() == 1)


def _times_parameters(name: str, inner: Sequence[Node]) -> Node | None:
    """What is multiplied with, or divided by, what is made of parameters: learned factors are the same on all replicas.

    None: neither is, or both are.
    """
    rest = [one for one in inner if not is_of_parameters(one)]
    return rest[0] if len(rest) == 1 and not (name in _DIVIDING and rest[0] is not inner[0]) else None


class _Element(NamedTuple):
    """A number that is a part of a tensor.

    Attributes:
        node: that made it; None: it needs no gradient.
        factors: what it is divided by there.
        site: where it is multiplied with what is learned.
    """

    node: Node | None
    factors: Sequence[tuple[Any, int]] = ()
    site: Site | None = None

    def times(self, constant: Any, at: int, power: int) -> "_Element":
        """The same, divided by (power 1) or multiplied with a number, or one of a tensor's."""
        if isinstance(constant, Tensor) and constant.numel() > 1:
            constant = constant.flatten()[at]
        return self._replace(factors=[*self.factors, (constant, power)])


def _elements(node: Node, numel: int) -> list[_Element]:
    """The numbers that were stacked, in their order; empty: it is no stack."""
    if numel > _MAX_STACKED or math.prod(_shape(node)) != numel:
        return []
    name, edges = node.name(), [one for one, _ in node.next_functions]
    inner = [one for one in edges if one is not None]
    if name in _JOINING:
        joined: list[_Element] = []
        for one in edges:
            size = 1 if one is None else math.prod(_shape(one))
            joined += [_Element(one)] if one is None or size == 1 else _elements(one, size)
        return joined if len(joined) == numel else []
    if len(inner) == 2 and name in _ADDING | _MULTIPLYING | _DIVIDING:
        rest = _times_parameters(name, inner)
        made = [] if rest is None else _elements(rest, numel)
        if name in _ADDING:
            return made
        # What is smaller was broadcast, and its gradient is that of all elements together.
        of_inputs = all(math.prod(_shape(one)) == numel for one in inner)
        return [one._replace(site=Site(node, at, of_inputs)) for at, one in enumerate(made)]
    if len(inner) != 1:
        return []
    if name in _KEEPING or name in _ADDING or (name in _TURNING and numel == max(_shape(node))):
        return _elements(inner[0], numel)
    constant = _constant_of(node, name)
    if constant is None or (isinstance(constant, Tensor) and constant.numel() not in (1, numel)):
        return []
    power = 1 if name in _DIVIDING else -1
    return [one.times(constant, at, power) for at, one in enumerate(_elements(inner[0], numel))]


def _is_stack(node: Node) -> bool:
    """Whether a script has stacked terms of its own, which are none of single samples."""
    nodes = [one.node for one in _elements(node, math.prod(_shape(node))) if one.node is not None]
    return bool(nodes) and not _are_of_rows(nodes, _SOME_ROWS)


def _constant_of(node: Node, name: str) -> Any:
    """What a node multiplies with or divides by, if that needs no gradient; None: it does neither."""
    is_first = node.next_functions[0][0] is not None
    if name not in _MULTIPLYING and not (name in _DIVIDING and is_first):
        return None
    return getattr(node, "_saved_other" if is_first else "_saved_self", None)


def _divided(node: Node, inner: Node, numel: int) -> list[tuple[Node, tuple[tuple[Any, int], ...]]]:
    """What a reduction of a tensor adds up, with the single numbers that all elements are divided by before.

    One part, of the reduction itself; or several nodes, where the elements of each are divided by another number.
    """
    factors: list[tuple[Any, int]] = []
    for _ in range(_MAX_BELOW):
        name, following = inner.name(), [one for one, _ in inner.next_functions if one is not None]
        if math.prod(_shape(inner)) != numel:
            break
        if name in _ADDING and len(following) == 2:
            parts = [part for one in following for part in _divided(one, one, numel)]
            first = parts[0][1]
            if all(_is_same(own, first) for _, own in parts):
                factors += first
            elif any(power > 0 for _, own in parts for _, power in own):
                return [(one, (*factors, *own)) for one, own in parts]
            break
        if len(following) != 1:
            break
        constant = _constant_of(inner, name)
        if name in ("MeanBackward1", "SumBackward1"):
            of_samples = _mean_over_samples(inner)
            factors += [] if of_samples is None else [(of_samples, 1)]
            numel = math.prod(_shape(following[0]))
        elif constant is not None and _is_for_all(constant, numel):
            factors.append((constant, 1 if name in _DIVIDING else -1))
        elif not (name in _KEEPING or name in _TURNING or name in _MULTIPLYING or name in _ADDING):
            break
        inner = following[0]
    return [(node, tuple(factors))]


def _mean_over_samples(node: Node) -> int | None:
    """Over how many elements a node makes means that have lost the first dimension, that of samples; None: it does not.

    Means over other dimensions have one element for each sample.
    """
    if node.name() != "MeanBackward1" or not _has_lost_samples(node):
        return None
    return math.prod(reduced_sizes_of(node)) // max(math.prod(_shape(node)), 1)


def _has_lost_samples(node: Node) -> bool:
    """Whether a mean or sum over some dimensions is one over the first."""
    sizes: Sequence[int] = reduced_sizes_of(node)
    dims: Sequence[int] = getattr(node, "_saved_dim", ())
    # Torch saves a negative dimension as an unsigned number.
    is_over = any((dim - 2**64 if dim >= 2**63 else dim) % max(len(sizes), 1) == 0 for dim in dims)
    return is_over and len(sizes) > len(dims)


def _is_for_all(constant: Any, numel: int) -> bool:
    """Whether a factor of all elements is a number, not one for each: of one element, it has no dimension then."""
    return not isinstance(constant, Tensor) or (constant.numel() == 1 and (numel > 1 or not constant.dim()))


def _masks(inner: Node, numel: int) -> list[Tensor]:
    """What the elements that a sum adds up are multiplied with, one by one."""
    found: list[Tensor] = []
    for _ in range(_MAX_BELOW):
        name, following = inner.name(), [one for one, _ in inner.next_functions if one is not None]
        if math.prod(_shape(inner)) != numel or len(following) != 1:
            break
        constant = _constant_of(inner, name)
        if isinstance(constant, Tensor) and name in _MULTIPLYING and not _is_for_all(constant, numel):
            found.append(constant)
        elif constant is None and not (name in _KEEPING or name in _TURNING):
            break
        inner = following[0]
    return found


def _is_number(node: Node) -> bool:
    """Whether what a node made is a number without a dimension, but for what was added to it afterwards."""
    for _ in range(_MAX_BELOW):
        inner = [one for one, _ in node.next_functions if one is not None]
        if not _shape(node):
            return True
        if node.name() not in _KEEPING or len(inner) != 1 or math.prod(_shape(inner[0])) != 1:
            return False
        node = inner[0]
    return False


def _is_the_only_row(node: Node) -> bool:
    """Whether a term is of the row of a tensor that has one: of the only sample of a loss that goes through samples."""
    return any(
        one.name() in _ROWS
        and getattr(one, "_saved_dim", 1) == 0
        and any(_shape(of)[:1] == (1,) for of, _ in one.next_functions if of)
        for one in _below(node)
    )


def _is_same(factors: Sequence[tuple[Any, int]], others: Sequence[tuple[Any, int]]) -> bool:
    return [(_identity(one), power) for one, power in factors] == [(_identity(one), power) for one, power in others]


def _identity(factor: Any) -> Any:
    return factor.data_ptr() if isinstance(factor, Tensor) else factor


def _has_tensor(factors: Sequence[tuple[Any, int]]) -> bool:
    return any(isinstance(factor, Tensor) for factor, _ in factors)


def _are_of_rows(nodes: Sequence[Node], rows: Set[str] = _ROWS) -> bool:
    """Whether two terms are of rows of one tensor: a loss that is made sample by sample."""
    sources: set[Node] = set()
    for node in nodes:
        own = {
            source
            for one in _below(node)
            if (one.name() in rows or (one.name() == "SliceBackward0" and _shape(one)[:1] == (1,)))
            and getattr(one, "_saved_dim", 1) == 0
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


def weigh(site: Site, weight: Tensor) -> Any:
    """Multiply the gradient that passes a site with a weight, in the next backward passes; returns a handle."""

    def weighed(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        # A mean over no items has inf or NaN gradients.
        by_weight = torch.where(weight == 0, torch.zeros_like(gradient), gradient * weight.to(gradient.dtype))
        if site.element is None:
            return by_weight
        is_own = torch.arange(gradient.numel(), device=gradient.device).view(gradient.shape) == site.element
        return torch.where(is_own, by_weight, gradient)

    def of_all(gradients: tuple[Tensor | None, ...], *_: Any) -> tuple[Tensor | None, ...]:
        return tuple(map(weighed, gradients))

    return site.node.register_hook(of_all) if site.of_inputs else site.node.register_prehook(of_all)
