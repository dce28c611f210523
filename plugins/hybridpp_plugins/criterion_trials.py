"""A criterion called again, on other samples than those of a micro-batch: whether its loss couples samples."""

import functools
import math
import operator
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybridpp.cluster import get_dist_logger, preserved_random_state
from hybridpp.config import PipelineConfig
from hybridpp.nn.deferred_tensor import DeferredTensor, MadeWhenRead, with_values
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline import (
    CriterionAdapter,
    LossForm,
    LossTrace,
    Measured,
    add_up,
    combined,
    duplicate_samples,
    leaf_dims,
    map_sample_lists,
    matched,
    select_samples,
    with_another,
    with_unlike_samples,
)
from hybridpp.pipeline.batch import Microbatch
from hybridpp.pipeline.criterion_state import may_keep, unchanged
from hybridpp.pipeline.loss_form import loss_form_of
from hybridpp.pipeline.loss_items import Count, NotCountedError, Product, without_floor
from hybridpp.pipeline.loss_reduction import (
    APART,
    MIXED,
    PARTS_OF_APART,
    PARTS_OF_MIXED,
    duplicate_inputs,
    joined_samples,
    picked_samples,
)
from hybridpp.pipeline.loss_trace import Term
from hybridpp.pipeline.packed_rows import joined_sequences, packed_lengths, some_sequences
from hybridpp_plugins.trial_samples import Chosen, TrialPair, copies, trial_pairs

# The relative difference that rounding may make between a loss and the same loss by halves.
_TOLERANCE = 1e-3
# Makes outputs of another sample from those of one: probabilities stay between 0 and 1.
_FACTOR = 0.75
# Outputs of more elements are copied of two samples alone.
_MAX_COPIED = 2**24

Part: TypeAlias = tuple[Any, Any, slice]
"""Outputs and inputs of some samples, and which of all samples they are."""

_OF_APPLIED = "a number of all samples is applied to each of them, as weights of classes by their counts"
_OF_MIXED = "of other samples together it is another than that of parts of them, as a mean over the classes in a batch"


class CriterionTrials:
    """Calls of a criterion beside those of a step, in its first one.

    Args:
        criterion: of the step.
        microbatches: of this replica.
        pipeline: where tensors have their samples.
        device: where the rank computes.
        learned: positions of the outputs, among their leaves, that are made of parameters alone: they hold no samples.
    """

    def __init__(
        self,
        criterion: CriterionAdapter,
        microbatches: Sequence[Microbatch],
        pipeline: PipelineConfig,
        device: torch.device,
        learned: Set[int] = frozenset(),
    ):
        self._criterion, self._microbatches = criterion, microbatches
        self._pipeline, self._device, self._learned = pipeline, device, learned

    def of_outputs(self, trace: LossTrace, outputs: Any) -> "CriterionTrials":
        """The same for outputs whose making was followed."""
        leaves = enumerate(pytree.tree_leaves(outputs))
        learned = {index for index, leaf in leaves if isinstance(leaf, Tensor) and trace.is_of_parameters(leaf)}
        return CriterionTrials(self._criterion, self._microbatches, self._pipeline, self._device, learned)

    def _out_dims(self, outputs: Any) -> list[int | None]:
        """The sample dimension of each leaf of the outputs; None: it holds no samples."""
        dims = leaf_dims(outputs, dims=self._pipeline.dims_of_outputs)
        return [None if index in self._learned else dim for index, dim in enumerate(dims)]

    def again(self, outputs: Any, inputs: Any) -> Any:
        """The criterion's result for other tensors, to look at it: what it keeps between its calls stays as it is."""
        with unchanged(self._criterion.criterion):
            return self._criterion(outputs, inputs)

    def here(self, tensor: Tensor) -> Tensor:
        """A tensor on the device where the rank computes."""
        return tensor.to(self._device)

    @torch.no_grad()
    def trace_of(
        self,
        trees: list[Any],
        num_samples: int,
        outputs: Any,
        inputs: Any,
        choice: int = 0,
        in_criterion: bool = True,
    ) -> tuple[LossTrace, Sequence[Term]]:
        """The terms of the criterion's result for other inputs, or for some samples; and what has followed the calls.

        ``in_criterion=False``: what it does to samples is judged as in a model, whose loss nothing else checks.
        """
        trace = LossTrace(trees, num_samples, self._pipeline.batch_dims or 0, choice)
        trace.in_criterion = in_criterion
        leaves = pytree.tree_leaves(outputs)
        trace.of_parameters([leaves[index] for index in self._learned])
        trace.received([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        with preserved_random_state(self._device), trace:
            loss = self.again(outputs, inputs)
        return trace, trace.terms(loss) or ()

    def on_twice(self, outputs: Any, inputs: Any, count: int) -> Any:
        """The criterion's result for the samples of a micro-batch, of which there are ``count``, duplicated."""
        return self.again(*self._twice(outputs, inputs, count))

    def _twice(self, outputs: Any, inputs: Any, count: int) -> tuple[Any, Any]:
        lengths, twice = self._lengths(inputs, count), self.twice_inputs(inputs, count)
        if lengths is not None:
            return some_sequences(outputs, lengths, [*range(count)] * 2), twice
        return duplicate_samples(outputs, count, self._out_dims), twice

    def _lengths(self, inputs: Any, num_samples: int) -> Sequence[int] | None:
        """Of the samples, if they are the sequences of a packed row."""
        lengths = packed_lengths(inputs, self._pipeline.batch_dims or 0)
        return lengths if lengths is not None and len(lengths) == num_samples else None

    def twice_inputs(self, inputs: Any, num_samples: int) -> Any:
        """Inputs with their samples duplicated."""
        listed = self.of_lists(inputs, num_samples, lambda entries: entries * 2)
        return duplicate_inputs(listed, num_samples, self._pipeline.batch_dims or 0)

    def part_of(self, inputs: Any, num_samples: int, samples: slice) -> Any:
        """The inputs of some samples."""
        lengths = self._lengths(inputs, num_samples)
        if lengths is not None:
            return some_sequences(inputs, lengths, range(samples.start, samples.stop))
        dims = functools.partial(leaf_dims, dims=self._pipeline.batch_dims or 0)
        listed = self.of_lists(inputs, num_samples, operator.itemgetter(samples))
        return select_samples(listed, num_samples, dims, samples)

    def of_lists(self, inputs: Any, num_samples: int, function: Callable[[list[Any]], list[Any]]) -> Any:
        """A micro-batch's inputs with a function applied to its lists of one entry for each sample."""

        def applied(entries: list[Any]) -> list[Any]:
            return function(entries) if len(entries) == num_samples else entries

        return map_sample_lists(inputs, self._pipeline.batch_dims or 0, applied)

    @torch.no_grad()
    def coupling(
        self, form: LossForm, trace: LossTrace, microbatch: int, loss: Tensor, outputs: Any, inputs: Any
    ) -> str:
        """How the criterion's loss depends on which samples are together, as far as trying it tells; "": not at all."""
        count = self._microbatches[microbatch].num_samples
        changed = [_may_change(trace, leaf) for leaf in pytree.tree_leaves(outputs)]
        if count > 1:
            parts = self._halves(outputs, inputs, count)
            why = "of the samples together it is another than that of halves"
        else:
            parts = self._pair(microbatch, outputs, inputs)
            why = "of two samples together it is another than that of each"
        with preserved_random_state(self._device):
            try:
                differs = self._differs(form, loss, parts, known=0 if count > 1 else 1)
            except _NotCalledError:
                why = self._coupling_of_twice(form, loss, outputs, inputs, count, changed)
                return why or self._coupling_of_mixed(form, trace, microbatch, outputs, changed)
            if differs is None:
                return ""
            with suppress(_NotCalledError):  # for other outputs
                if not differs and count > 1:
                    # That the samples' losses are equal must not hide it.
                    some = slice(0, count if _size_of(outputs) <= _MAX_COPIED else 2)
                    unlike = with_unlike_samples(
                        select_samples(outputs, count, self._out_dims, some), some.stop, self._out_dims, changed
                    )
                    parts = self._halves(unlike, self.part_of(inputs, count, some), some.stop)
                    differs = self._differs(form, None, parts, known=0)
            return why if differs else self._coupling_of_mixed(form, trace, microbatch, outputs, changed)

    @torch.no_grad()
    def kept(self, microbatch: int, outputs: Any, inputs: Any) -> str:
        """What the criterion keeps from call to call, if another number of calls makes another loss; "": nothing.

        A count of calls is that of steps where each replica has one micro-batch.
        """
        if not may_keep(self._criterion.criterion):
            return ""

        def call(given: tuple[Any, Any]) -> float:
            with preserved_random_state(self._device):
                try:
                    return float(self._criterion(*given))
                except Exception as error:  # a criterion may raise anything when it is called again
                    raise _NotCalledError from error

        def after(*calls: tuple[Any, Any]) -> tuple[float, list[str]]:
            with unchanged(self._criterion.criterion) as changes:
                for one in calls:
                    call(one)
                return call((outputs, inputs)), changes()

        with suppress(_NotCalledError):
            once, names = after()
            twice = after((outputs, inputs))[0] if names else once
            if not _is_another(twice, once):
                return ""
            count = self._microbatches[microbatch].num_samples
            *_, other = self._halves(outputs, inputs, count) if count > 1 else self._pair(microbatch, outputs, inputs)
            if len(self._microbatches) > 1 or _is_another(after(other[:2])[0], twice):
                return ", ".join(names[:3])
        return ""

    def _coupling_of_twice(
        self, form: LossForm, loss: Tensor, outputs: Any, inputs: Any, count: int, changed: Sequence[bool]
    ) -> str:
        """The same of a criterion that cannot be called with halves: with the samples twice, and by its calls."""
        twice, twice_inputs = self._twice(outputs, inputs, count)
        with suppress(_NotCalledError):  # for other numbers of samples
            differs = self._differs(form, loss, self._halves(twice, twice_inputs, 2 * count), known=1)
            if differs is False:
                unlike = with_unlike_samples(twice, 2 * count, self._out_dims, changed)
                differs = self._differs(form, None, self._halves(unlike, twice_inputs, 2 * count), known=0)
            return "of the samples twice it is another than of them once" if differs else ""
        try:
            _, terms = self.trace_of([inputs], count, outputs, inputs, form.choice, in_criterion=False)
        except Exception:  # a criterion may raise anything when it is called again
            return ""
        return next((term.why for term in terms if term.why), "")

    def _coupling_of_mixed(
        self, form: LossForm, trace: LossTrace, microbatch: int, outputs: Any, changed: Sequence[bool]
    ) -> str:
        """The same of samples that are chosen or made for that, of two kinds.

        What a criterion makes of all samples and applies to each, such as weights of classes by how usual these are,
        may be equal for the halves of a micro-batch, whose samples may be alike; and a single one has no halves.
        """
        own = self._microbatches[microbatch]
        if self._lengths(own.inputs, own.num_samples) is not None:
            return ""  # a row of sequences is none of samples
        alike = [own, *(one for one in self._microbatches if one is not own and one.num_samples == own.num_samples)]
        leaves = pytree.tree_leaves(outputs)
        remade = [trace.of_inputs(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        known = zip(leaves, remade, strict=True)
        is_all = all(
            count or index in self._learned or trace.is_computed(leaf)
            for index, (leaf, count) in enumerate(known)
            if isinstance(leaf, Tensor)
        )
        if not is_all:
            alike = [own]  # what it returned of the inputs would not belong to other ones
        if len(MIXED) * _size_of(outputs) > own.num_samples * 8 * _MAX_COPIED:
            return ""
        counted = {id(one) for count in form.counts for one in (count, without_floor(count))}
        applied = [one for one in trace.applied if id(one) not in counted]
        trees, size, dims = [one.inputs for one in alike], own.num_samples, self._pipeline.batch_dims or 0
        made = _Outputs(outputs, size, changed, remade)
        try:
            for pair in trial_pairs(trees, size, dims, applied, functools.partial(self._chosen, size=size)):
                if self._couples(form, pair, made, self._device):
                    return _OF_APPLIED if pair.applies else _OF_MIXED
            host, is_whole = torch.device("cpu"), not any(map(_is_divided, leaves))
            for device in dict.fromkeys((host, self._device) if is_whole else (self._device,)) if is_all else ():
                # Values that a criterion does not take end a process that computes on a device.
                num_called = 0
                for pair in copies(trees, size, dims, may_guess=device == host):
                    found = self._couples(form, pair, made, device)
                    if found:
                        return _OF_MIXED
                    num_called += found is not None
                if num_called:
                    break
        except torch.OutOfMemoryError:  # the step itself may need less
            get_dist_logger().warning(
                "out of memory while the criterion was tried on other samples, in its first step: whether its loss "
                "couples unlike samples is not known. Training goes on."
            )
        return ""

    def coupling_of_given(self, form: LossForm, trace: LossTrace, microbatch: int) -> str:
        """How what a model gives to its own losses is made of several samples' inputs; "": it is not."""
        own = self._microbatches[microbatch]
        if self._lengths(own.inputs, own.num_samples) is not None:
            return ""
        alike = [own, *(one for one in self._microbatches if one is not own and one.num_samples == own.num_samples)]
        counted = {id(one) for count in form.counts for one in (count, without_floor(count))}
        given = [one for one in trace.given_to_losses if id(one) not in counted]
        trees, size, dims = [one.inputs for one in alike], own.num_samples, self._pipeline.batch_dims or 0
        pairs = trial_pairs(trees, size, dims, given, functools.partial(self._chosen, size=size)) if given else ()
        return _OF_APPLIED if any(pair.applies for pair in pairs) else ""

    def _couples(self, form: LossForm, pair: TrialPair, outputs: "_Outputs", device: torch.device) -> bool | None:
        """Whether the loss of samples of a pair is another than that of parts of them; None: nothing shows it."""
        is_shown = False
        for kinds, slices in ((MIXED, PARTS_OF_MIXED), (APART, PARTS_OF_APART)):
            try:
                parts = self._parts_of(pair, kinds, slices, outputs, device)
            except (RuntimeError, ValueError):  # the samples of micro-batches may have other shapes
                return None
            try:
                measured = [self._measured(form, part) for part in parts]
                if any(form.has_open(own) or min(own.added, default=0.0) < 0 for own in measured):
                    continue  # the script may divide by another number then
                differs = self._differs(form, None, parts, known=0, is_sure=False)
            except (NotCountedError, _NotCalledError):
                differs = None
            adds_up = None if differs is False else self._adds_up_by_terms(form, parts)
            if adds_up is False or (differs and adds_up is None):
                return True
            is_shown = is_shown or differs is not None
        return False if is_shown else None

    def _chosen(self, pair: TrialPair, *, size: int) -> Chosen:
        dims = functools.partial(leaf_dims, dims=self._pipeline.batch_dims or 0)

        def chosen(kinds: Sequence[int]) -> Any:
            rows = [(kind, pair.samples[kind]) for kind in kinds]
            trees = [
                self.of_lists(tree, size, lambda entries: [entries[row] for _, row in rows]) for tree in pair.trees
            ]
            return joined_samples(trees, size, dims, rows)

        return chosen

    def _parts_of(
        self, pair: TrialPair, kinds: Sequence[int], slices: Sequence[slice], outputs: "_Outputs", device: torch.device
    ) -> list[Part]:
        """Outputs and inputs of samples of a pair, in a row; and of parts of them."""
        count, size = len(kinds), outputs.size
        inputs = self._chosen(pair, size=size)(kinds)
        picked = picked_samples(outputs.tree, size, self._out_dims, [pair.samples[kind] for kind in kinds])
        unlike = with_unlike_samples(picked, count, self._out_dims, outputs.changed)
        if device != self._device:
            unlike = with_values(unlike)
        unlike, inputs = (pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), one) for one in (unlike, inputs))
        found = []
        for part in slices:
            own = self.part_of(inputs, count, part)
            leaves, structure = pytree.tree_flatten(select_samples(unlike, count, self._out_dims, part))
            for index, made_by in enumerate(outputs.remade):
                if made_by is not None:
                    leaves[index] = made_by.of(own, part.stop - part.start)
            found.append((pytree.tree_unflatten(leaves, structure), own, part))
        return found

    def _adds_up_by_terms(self, form: LossForm, parts: Sequence[Part]) -> bool | None:
        """Whether a loss that has other terms than before is a sum of means; None: it is not shown.

        A script may leave out a term that has no items, but not divide by how many terms there are, as a mean of the
        means of the classes does. Terms are told apart by what they are divided by in all parts.
        """
        weighted: list[dict[tuple[float, ...], float]] = []
        has_others, dtype = False, torch.float32
        try:
            for at, (outputs, inputs, samples) in enumerate(parts):
                num_samples = samples.stop - samples.start
                trace, terms = self.trace_of([inputs], num_samples, outputs, inputs, form.choice)
                made = loss_form_of(terms, [inputs], self.twice_inputs, [num_samples])
                if trace.ambiguous or made.is_by_row:
                    return None
                has_others = has_others or len(terms) != len(form.of_terms)
                sums: dict[tuple[float, ...], float] = {}
                for term, product in zip(terms, made.of_terms, strict=True):
                    if product is not None:
                        divisors = _divisors(made, product, parts)
                        value = term.make()
                        dtype = _dtype_of(value)
                        sums[divisors] = sums.get(divisors, 0.0) + float(value) * divisors[at]
                weighted.append(sums)
        except Exception:  # a criterion may raise anything for a number of samples that it was not made for
            return None
        if not has_others or not form.of_terms:
            return None
        for divisors in dict.fromkeys(one for sums in weighted for one in sums):
            total, *values = (sums.get(divisors, 0.0) for sums in weighted)
            if not all(map(math.isfinite, (total, *values))):
                return None
            scale = max(map(abs, (total, *values)))
            if not _is_near(sum(values), total, scale, dtype):
                return False
        return True

    def _halves(self, outputs: Any, inputs: Any, count: int) -> list[tuple[Any, Any, slice]]:
        """The outputs and inputs of all samples; of half of them; and of the others."""
        lengths = self._lengths(inputs, count)

        def made_of(part: slice) -> Any:
            if lengths is None:
                return select_samples(outputs, count, self._out_dims, part)
            return some_sequences(outputs, lengths, range(part.start, part.stop))

        parts = slice(0, count), slice(0, count // 2), slice(count // 2, count)
        return [(made_of(part), self.part_of(inputs, count, part), part) for part in parts]

    def _pair(self, microbatch: int, outputs: Any, inputs: Any) -> list[tuple[Any, Any, slice]]:
        """A single sample with another one beside it; each of them alone.

        The inputs of the other are those of another micro-batch, its outputs those of the sample times a number.
        """
        in_dims = functools.partial(leaf_dims, dims=self._pipeline.batch_dims or 0)
        given = self._microbatches[microbatch].inputs
        others = [one.inputs for one in self._microbatches if one.num_samples == 1 and one.inputs is not given]
        both_outputs, other_outputs = with_another(outputs, None, self._out_dims, _FACTOR)
        lengths = self._lengths(inputs, 1)
        if lengths is not None:
            both_outputs = joined_sequences([outputs, other_outputs], lengths[0])
            both_inputs = some_sequences(inputs, lengths, [0, 0])
            return [
                (both_outputs, both_inputs, slice(0, 2)),
                (outputs, inputs, slice(0, 1)),
                (other_outputs, inputs, slice(1, 2)),
            ]
        both_inputs, other_inputs = with_another(inputs, next(iter(others), None), in_dims)
        return [
            (both_outputs, self.of_lists(both_inputs, 1, lambda entries: entries * 2), slice(0, 2)),
            (outputs, inputs, slice(0, 1)),
            (other_outputs, other_inputs, slice(1, 2)),
        ]

    def _differs(
        self,
        form: LossForm,
        loss: Tensor | None,
        parts: Sequence[tuple[Any, Any, slice]],
        known: int,
        is_sure: bool = True,
    ) -> bool | None:
        """Whether the loss of the first part, of all samples, is not the mean of those of the others.

        None: nothing shows it. A random one does not: ``known`` is the part whose loss is ``loss``. ``is_sure``:
        whether a part without a finite loss shows it.

        Raises:
            _NotCalledError: the criterion cannot be called with so many samples.
        """
        try:
            values = [self._alone(form, *part) for part in parts]
            full, _ = values[0]
            total = add_up([one for _, one in values[1:]])
            if form.needs_terms:
                again, *expected = [
                    self._combined(form, terms, own, total, part)
                    for (terms, own), part in zip(values, parts, strict=True)
                ]
            else:
                product = form.products[0]
                expected = [one * share for one, own in values[1:] if (share := form.share(product, own, total))]
                again = full
            numbers = [float(one) for one in expected if one is not None]
            now = float(again if again is not None else 0.0)
            before = repeated = 0.0
            if loss is not None and not form.needs_terms:
                before, repeated = float(loss), float(values[known][0])
        except Exception as error:  # a criterion may raise anything for a number of samples that it was not made for
            raise _NotCalledError from error
        if abs(repeated - before) > 1e-5 * abs(before):
            return None
        if loss is None and not math.isfinite(now):
            return None
        if not all(map(math.isfinite, numbers)):
            return math.isfinite(now) if is_sure else None  # such as the deviation of a single sample
        scale = max(map(abs, (now, *numbers)))
        return not _is_near(sum(numbers), now, scale, _dtype_of(again) if loss is None else loss.dtype)

    @staticmethod
    def _combined(
        form: LossForm, terms: Sequence[Term], own: Measured, total: Sequence[float], part: Part
    ) -> Tensor | None:
        """The loss of some samples in that of all, whose counts are ``total``."""
        _, inputs, samples = part
        try:
            products = matched(form, terms, own, lambda count: count.of(inputs, samples.stop - samples.start))
        except NotCountedError:
            if len(terms) != len(form.of_terms):
                raise
            products = form.of_terms  # a plain number may have been taken for another one: the loss shows it
        return combined(form, terms, products, lambda product: form.share(product, own, total))

    def _alone(self, form: LossForm, outputs: Any, inputs: Any, samples: slice) -> tuple[Any, Measured]:
        """The loss of some samples, or its terms; and their counts."""
        measured = self._measured(form, (outputs, inputs, samples))
        if not form.needs_terms:
            return self.again(outputs, inputs), measured
        return self.trace_of([inputs], samples.stop - samples.start, outputs, inputs, form.choice)[1], measured

    def _measured(self, form: LossForm, part: Part) -> Measured:
        _, inputs, samples = part
        return form.measure([inputs], [samples.stop - samples.start])[0]


class _Outputs(NamedTuple):
    """Outputs of a model.

    Attributes:
        tree: of a micro-batch.
        size: the number of its samples.
        changed: of each leaf, whether other numbers may stand in its place.
        remade: of each leaf, what makes it of the inputs alone; None: the model computed it.
    """

    tree: Any
    size: int
    changed: Sequence[bool]
    remade: Sequence[Count | None]


class _NotCalledError(Exception):
    """A criterion cannot be called with a number of samples."""


def _may_change(trace: LossTrace, output: Any) -> bool:
    """Whether other numbers may stand in the place of an output's, which are no masks or counts of the inputs."""
    if not isinstance(output, Tensor) or not trace.is_computed(output):
        return False
    # They would be gathered.
    return not _is_divided(output) and (output.requires_grad or not torch.is_grad_enabled())


def _size_of(outputs: Any) -> int:
    return sum(leaf.numel() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))


def _is_another(one: float, other: float) -> bool:
    """Whether two values of a loss differ by more than the order of the same additions."""
    return math.isfinite(one) and math.isfinite(other) and not math.isclose(one, other, rel_tol=1e-6)


def _is_divided(leaf: Any) -> bool:
    """Whether it is a part of logits that are divided over ranks."""
    return isinstance(leaf, MadeWhenRead) and not isinstance(leaf, DeferredTensor)


def _divisors(form: LossForm, product: Product, parts: Sequence[Part]) -> tuple[float, ...]:
    """What a term is divided by, for each part; 0: it has no items."""
    found = []
    for _, inputs, samples in parts:
        try:
            counts = [(form.counts[index].of(inputs, samples.stop - samples.start), power) for index, power in product]
            found.append(float(f"{math.prod(float(one) ** -power for one, power in counts):.5g}"))
        except Exception:  # any operation of the script's, on inputs without what it reads
            found.append(0.0)
    return tuple(found)


def _dtype_of(value: Any) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) else torch.float32


def _is_near(one: float, other: float, scale: float, dtype: torch.dtype) -> bool:
    tolerance = _TOLERANCE if dtype in (torch.float32, torch.float64) else 0.05
    return not abs(one - other) > tolerance * max(scale, 1e-30)  # NaN shows nothing
