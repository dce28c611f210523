"""The losses of one step: what they are means over, found at the first one, and the weights that follow from it."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpp.cluster import Group, preserved_random_state
from hybridpp.config import PipelineConfig
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline import (
    CriterionAdapter,
    LossForm,
    LossReduction,
    LossTrace,
    Measured,
    NotCountedError,
    ReplicaCounts,
    SplitBatch,
    add_up,
    combined,
    confirm_sum,
    loss_form_of,
    matched,
    observed,
)
from hybridpp.pipeline.batch import TOTAL_KEY
from hybridpp.pipeline.loss_form import ADVICE, united, with_unlike
from hybridpp.pipeline.loss_items import MAX_COUNTS, Product, TooManyCountsError, entry_path
from hybridpp.pipeline.loss_trace import OF_EARLIER_STAGE, Term
from hybridpp_plugins.criterion_check import CriterionCheck
from hybridpp_plugins.criterion_trials import CriterionTrials

# The relative difference that rounding may make between a loss and the same loss by halves.
_TOLERANCE = 1e-3


class StepLosses:
    """The losses of one step on a rank of the last stage, whose form is not known, or whose terms have own weights.

    Collective in training: the first loss of a form that is not known; one small all-gather over the replicas.

    Args:
        criterion: of the step.
        batch: of this replica.
        replicas: what all replicas' batches have.
        check: gets the form, and what is wrong.
        pipeline: how batches are split.
        group: the replicas; None: there is one, or the step is an evaluation.
        scale: the loss scale.
        device: where the rank computes.
        around: a context for what is watched.
        looks_again: whether the loss of the first micro-batch with items is watched though its form is known, and must
            be divided by numbers as before.
        tries_again: whether it is watched, and must not put samples together.
        begins: whether the step begins; else only :meth:`try_others` may be called, in one that does without this.

    Attributes:
        weights: of the micro-batches in the gradient, with the loss scale; right from the first loss on.
        shares: of the micro-batches in this replica's loss; the same.
    """

    def __init__(
        self,
        criterion: CriterionAdapter,
        batch: SplitBatch,
        replicas: ReplicaCounts,
        *,
        check: CriterionCheck,
        pipeline: PipelineConfig,
        group: Group | None,
        scale: float,
        device: torch.device,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        looks_again: bool = False,
        tries_again: bool = False,
        begins: bool = True,
    ):
        self._criterion, self._replicas = criterion, replicas
        if not replicas.are_known:
            batch = batch.by_samples()  # another replica does not know it
        self._batch, self._microbatches = batch, batch.microbatches
        self._comparison = check.comparison
        is_declared = criterion.declares_reduction
        self._report = functools.partial(_report_of_declared, check.report) if is_declared else check.report
        self._pipeline, self._group = pipeline, group
        if begins:
            check.begin(criterion)
        self._scale, self._device, self._around = scale, device, around
        self._trials = CriterionTrials(criterion, batch.microbatches, pipeline, device)
        self._trace: LossTrace | None = None
        self._ratio: float | None = None
        self._observes = False
        self._form = batch.form if replicas.are_known else None
        self._found_counts = replicas
        self._measured = [one.counts for one in batch.microbatches if one.counts is not None]
        self._total: Sequence[float] = replicas.total
        self._num_seen = 0
        # Micro-batches whose losses show nothing, as they hold no items; and whether the form is guessed from such one.
        self._undecided: list[int] = []
        self._is_guessed = self._are_unlike = False
        self._looks_again, self._tries_again = looks_again, tries_again
        self.weights = batch.weights(replicas, scale)
        self.shares = [one.share for one in batch.microbatches]
        self._open: set[int] = set()
        if begins:
            self._look_for_open()
            self._compare()

    def _is_watched(self, microbatch: int) -> bool:
        form, is_unsure = self._form, self._observes or self._is_guessed or self._looks_again or self._tries_again
        return form is None or form.needs_terms or is_unsure or microbatch in self._open or self._checks_terms(form)

    def _compare(self) -> None:
        """Losses are compared with the form from here on, unless the script declares how they are weighted."""
        if self._form is not None and not self._criterion.declares_reduction:
            self._comparison.begin(self._form, self._measured)

    def _look_for_open(self, found_by: int | None = None) -> None:
        """Micro-batches without items whose losses count, if the script divides by another number then."""
        if self._form is None:
            return
        for index, own in enumerate(self._measured):
            if self._form.has_open(own) or (self._form.may_lack(own) and index != found_by):
                self._open.add(index)
                self.shares[index] = 1.0  # it is not left out

    @contextmanager
    def watched(self, microbatch: int, inputs: Any, received: Sequence[Tensor]) -> Iterator[None]:
        """A context for the last stage's forward of a micro-batch and its loss."""
        if not self._is_watched(microbatch):
            yield
            return
        given = self._microbatches[microbatch]
        choice = 0 if self._form is None else self._form.choice
        self._trace = LossTrace([given.inputs, inputs], given.num_samples, self._pipeline.batch_dims or 0, choice)
        self._trace.of_earlier_stages(received)
        try:
            with self._around(), self._trace:
                yield
        finally:
            self._trace = None

    def __call__(self, outputs: Any, inputs: Any) -> Any:
        """The criterion."""
        if self._trace is not None:
            self._trace.in_criterion = True
            self._trace.received([leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)])
        loss = self._criterion(outputs, inputs)
        # A script may begin with the number 0, and add no term where none has items.
        is_nothing = self._trace is not None and type(loss) in (int, float) and not loss
        return torch.zeros((), device=self._device) if is_nothing else loss

    def inspect(self, microbatch: int, loss: Tensor, outputs: Any, inputs: Any) -> tuple[Tensor | None, Tensor | None]:
        """The loss that the backward pass begins from, None if it has no items; and the part of the batch's loss."""
        trace, self._trace = self._trace, None
        if trace is None:
            found = self._comparison.inspect(microbatch, loss, outputs)
            self.try_others(microbatch, loss, outputs, inputs)
            return found
        with trace.paused():
            return self._inspect(trace, microbatch, loss, outputs, inputs)

    def _inspect(
        self, trace: LossTrace, microbatch: int, loss: Tensor, outputs: Any, inputs: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        terms: Sequence[Term] | None = trace.terms(loss)
        self._num_seen += 1
        is_last = self._num_seen == len(self._microbatches)
        if self._form is None and trace.is_empty and not float(loss.detach()):
            # It adds nothing, whatever it weighs, and the script may have taken another branch.
            self._undecided.append(microbatch)
            if is_last:
                self._exchanged(0.0, ())
            return loss if loss.requires_grad or not torch.is_grad_enabled() else None, None
        if self._form is None:
            self._form, terms = self._find(trace, terms, microbatch, loss, outputs, inputs)
            self._observes = bool(terms and observed(terms))
            self._is_guessed = bool(trace.guessed)
        elif self._is_guessed and not trace.is_empty:
            self._confirm(trace, terms)
        elif microbatch in self._open:
            if not self._fill(trace, terms or (), microbatch, loss):
                return None, None
        elif (self._looks_again or self._tries_again) and not trace.is_empty:
            self._look_again(trace, terms or (), microbatch, loss, outputs, inputs)
        self._comparison.inspect(microbatch, loss, outputs)
        self.try_others(microbatch, loss, outputs, inputs)
        if self._is_guessed and is_last:
            self._report(LossReduction.UNCOUNTED, "no micro-batch of the first step has an item")
        if self._observes and terms:
            self._check_observed(terms, microbatch)
        if terms is None or not (self._form.needs_terms or self._checks_terms(self._form)):
            return loss, None
        try:
            products = self._matched(terms, microbatch)
        except NotCountedError as error:
            self._report(LossReduction.UNCOUNTED if self._form.needs_terms else LossReduction.CHANGED, str(error))
            return loss, None
        if not self._form.needs_terms:
            return loss, None
        self._comparison.has_products(microbatch, products)
        weighted = combined(self._form, terms, products, functools.partial(self._weight, microbatch))
        part = combined(self._form, terms, products, functools.partial(self._share, microbatch))
        return weighted, part

    def _checks_terms(self, form: LossForm) -> bool:
        """Whether losses must show that they have no other terms: in evaluations there is no graph to compare."""
        return form.branches and not torch.is_grad_enabled() and not self._criterion.declares_reduction

    def _matched(self, terms: Sequence[Term], microbatch: int) -> Sequence[Product | None]:
        """The products of a micro-batch's terms."""
        assert self._form is not None
        given = self._microbatches[microbatch]
        return matched(
            self._form, terms, self._measured[microbatch], lambda count: count.of(given.inputs, given.num_samples)
        )

    def _confirm(self, trace: LossTrace, terms: Sequence[Term] | None) -> None:
        """A micro-batch with items must show what was guessed of one without."""
        assert self._form is not None
        self._is_guessed = False
        parts, sizes = [one.inputs for one in self._microbatches], [one.num_samples for one in self._microbatches]
        try:
            form = self._form_of(trace, terms or (), parts, sizes)
            is_same = form.products == self._form.products and [one.added for one in form.measure(parts, sizes)] == [
                one.added for one in self._measured
            ]
        except NotCountedError:
            is_same = False
        if not is_same:
            self._report(LossReduction.UNCOUNTED, "a micro-batch without items makes another loss")

    def _look_again(
        self, trace: LossTrace, terms: Sequence[Term], microbatch: int, loss: Tensor, outputs: Any, inputs: Any
    ) -> None:
        """A later loss must be divided by what the first one was divided by, and be of each sample, too."""
        if self._looks_again and self._form is not None and self._form.shows_divisors:
            self._compare_divisors(trace, terms, microbatch)
        if self._tries_again:
            self._try(trace, terms, microbatch, loss, outputs, inputs, "")
        self._looks_again = self._tries_again = False

    def try_others(self, microbatch: int, loss: Tensor, outputs: Any, inputs: Any) -> None:
        """Try a criterion of known form again that calls functions which it did not call when it was tried."""
        form, given = self._form, self._microbatches[microbatch]
        if form is None or not form.others:
            return
        since = f"; in this step the criterion calls {_names_of(form.others)}, and did not before"
        form.functions.update(form.others)
        form.others.clear()
        trees, count = [given.inputs, inputs], given.num_samples
        try:
            trace, terms = self._trials.trace_of(trees, count, outputs, inputs, form.choice)
        except Exception:  # a criterion may raise anything when it is called again
            return
        self._try(trace, terms, microbatch, loss, outputs, inputs, since)

    def _try(
        self,
        trace: LossTrace,
        terms: Sequence[Term],
        microbatch: int,
        loss: Tensor,
        outputs: Any,
        inputs: Any,
        since: str,
    ) -> None:
        assert self._form is not None
        problems: list[tuple[LossReduction, str]] = []
        self._trials = self._trials.of_outputs(trace, outputs)
        self._checked(self._form, terms, trace, microbatch, loss, outputs, inputs, problems)
        for reduction, words in problems:
            self._report(reduction, f"{words}{since}")

    def _compare_divisors(self, trace: LossTrace, terms: Sequence[Term], microbatch: int) -> None:
        known, own, given = self._form, self._measured[microbatch], self._microbatches[microbatch]
        assert known is not None
        try:
            form = self._form_of(trace, terms, [given.inputs], [given.num_samples])
            (now,) = form.measure([given.inputs], [given.num_samples])
        except NotCountedError:
            return
        before = [known.divisor(one, own) for one in known.products]
        after = [form.divisor(one, now) for one in form.of_terms if one is not None]
        if not all(any(math.isclose(one, other, rel_tol=_TOLERANCE) for other in before) for one in after):
            self._report(LossReduction.CHANGED, "")

    def _fill(self, trace: LossTrace, terms: Sequence[Term], microbatch: int, loss: Tensor) -> bool:
        """Weigh a micro-batch without items by what its loss is divided by instead; False: it adds nothing."""
        form, own = self._form, self._measured[microbatch]
        assert form is not None
        self._open.discard(microbatch)
        if form.needs_terms and terms:
            try:
                products = self._matched(terms, microbatch)
            except NotCountedError:
                products = form.of_terms if len(terms) >= len(form.of_terms) else ()
            if all(form.has_items(one, own) for one in products if one):
                return True  # the terms without items are left out
        self.shares[microbatch] = 0.0
        if not torch.isfinite(loss.detach()) or not float(loss.detach()):
            return False
        # Without a divisor, it is one of 1.
        is_mean = not trace.guessed and any(one.factors for one in terms) and len(form.products) == 1
        divisors = set(trace.guessed) or {1.0}
        if is_mean or len(divisors) > 1 or own.used.count(0.0) > 1 or len(terms) != len(form.of_terms):
            advice = f"; {ADVICE}" if form.may_branch else ""
            self._report(LossReduction.UNCOUNTED, f"a micro-batch without items makes another loss{advice}")
            return False
        (divisor,) = divisors
        filled = own._replace(used=tuple(one or divisor for one in own.used))
        self._measured[microbatch] = filled
        weighted = self.weighted(self._batch)
        # Of a batch without any item, the divisor is the same.
        total = [one or divisor for one in weighted.counts]
        self.shares[microbatch] = form.weights([filled], total)[0]
        self.weights[microbatch] = weighted.weights(self._found_counts, self._scale)[microbatch]
        return True

    def _check_observed(self, terms: Sequence[Term], microbatch: int) -> None:
        """Numbers that the model computed must be proportional to the samples that they are taken for."""
        for factor in observed(terms):
            ratio = float(factor.observed) / self._microbatches[microbatch].num_samples
            self._ratio = ratio if self._ratio is None else self._ratio
            if abs(ratio - self._ratio) > 1e-3 * abs(self._ratio):
                self._report(LossReduction.UNCOUNTED, "the model computes a number that it is divided by")

    def _find(
        self,
        trace: LossTrace,
        terms: Sequence[Term] | None,
        microbatch: int,
        loss: Tensor,
        outputs: Any,
        inputs: Any,
    ) -> tuple[LossForm, Sequence[Term] | None]:
        """The form of the first loss, and its terms; its weights are known from here on."""
        self._trials = self._trials.of_outputs(trace, outputs)
        in_criterion = not terms or not any(term.in_model for term in terms)
        found = self._tried(terms, trace, microbatch, loss, outputs, inputs)
        for choice in range(1, trace.num_choices) if in_criterion else ():
            if not (found.problems or found.is_doubtful):
                break
            # A plain number may be another than it was taken for, of an equal value.
            trace.choose(choice)
            with preserved_random_state(self._device), trace:
                again = trace.terms(self._trials.again(outputs, inputs))
            other = self._tried(again, trace, microbatch, loss, outputs, inputs, choice)
            if not other.problems and not other.is_doubtful:
                found = other._replace(form=replace(other.form, choice=choice))
        for problem in found.problems:
            self._report(*problem)
        if not self._criterion.declares_reduction and (kept := self._trials.kept(microbatch, outputs, inputs)):
            self._report(LossReduction.KEPT, kept)
        is_sure = found.problems or found.is_told_apart or torch.is_grad_enabled()  # in training graphs are compared
        if not is_sure and self._is_open_choice(trace, microbatch, in_criterion):
            self._report(LossReduction.UNCOUNTED, "numbers of the batch are equal in the first micro-batch")
        return self._found(found.form, found.measured, microbatch), found.terms

    def _told_apart(
        self, terms: Sequence[Term], trace: LossTrace, microbatch: int, outputs: Any, choice: int
    ) -> Sequence[Term] | None:
        """The terms with the inputs of a micro-batch in which counts differ that are equal here; None: in none."""
        own = self._microbatches[microbatch]
        forms = [LossForm(counts=tuple(counts), products=()) for counts in trace.ambiguous]
        for other in self._microbatches:
            if other.num_samples != own.num_samples:
                continue
            try:
                values = [form.measure([other.inputs], [other.num_samples])[0].used for form in forms]
                if all(len(set(one)) == 1 for one in values):
                    continue
                inputs = pytree.tree_map_only(Tensor, self._trials.here, other.inputs)
                _, found = self._trials.trace_of([other.inputs, inputs], own.num_samples, outputs, inputs, choice)
            except Exception:  # a criterion may raise anything for inputs that do not belong to its outputs
                continue
            if len(found) == len(terms):
                return found
        return None

    def _with_others(
        self, terms: Sequence[Term], trace: LossTrace, microbatch: int, outputs: Any, choice: int
    ) -> Sequence[Term]:
        """The terms with those that the criterion makes of the other micro-batches' inputs alone.

        A script that branches by what it reads of the inputs may leave out a term that has no items.
        """
        if not trace.has_read or any(term.in_model for term in terms):
            return terms
        own = self._microbatches[microbatch]
        others = [one for one in self._microbatches if one is not own and one.num_samples == own.num_samples]
        lists: list[Sequence[Term]] = []
        guessed: list[Sequence[Term]] = []
        for one in (own, *others) if others else ():
            try:
                inputs = pytree.tree_map_only(Tensor, self._trials.here, one.inputs)
                again, found = self._trials.trace_of([one.inputs, inputs], own.num_samples, outputs, inputs, choice)
            except Exception:  # a criterion may raise anything for inputs that do not belong to its outputs
                if one is own:
                    return terms
                continue
            if one is own or trace.num_choices == again.num_choices == 1:
                lists.append(found)
            else:
                guessed.append(found)  # plain numbers that are equal may have been taken for each other
                if _number_of(found) > max(map(_number_of, lists)):
                    lists = [found]
        if not lists:
            return terms
        if len(lists) == 1:
            most = lists[0] if _number_of(lists[0]) > _number_of(terms) else terms
            return with_unlike(most, guessed)
        # What the model has made may be counted in another way than where the criterion alone is looked at.
        return [*terms, *united(lists)[len(lists[0]) :]]

    def _tried(
        self,
        terms: Sequence[Term] | None,
        trace: LossTrace,
        microbatch: int,
        loss: Tensor,
        outputs: Any,
        inputs: Any,
        choice: int = 0,
    ) -> "_Tried":
        """The form that terms show, and what is wrong with it. Nothing is reported."""
        problems: list[tuple[LossReduction, str]] = []
        parts = [one.inputs for one in self._microbatches]
        sizes = [one.num_samples for one in self._microbatches]
        form, told_apart, all_terms = LossForm.of_rows(), None, terms
        try:
            if terms is not None:
                if trace.ambiguous and not any(term.in_model for term in terms):
                    told_apart = self._told_apart(terms, trace, microbatch, outputs, choice)
                all_terms = self._with_others(told_apart or terms, trace, microbatch, outputs, choice)
                form = self._form_of(trace, all_terms, parts, sizes)
            measured = form.measure(parts, sizes)
        except TooManyCountsError as error:  # nothing else is wrong, as far as is seen
            form = LossForm.of_rows()
            problems.append((LossReduction.UNCOUNTED, str(error)))
            return _Tried(form, form.measure(parts, sizes), terms, problems, is_doubtful=False, is_told_apart=False)
        except NotCountedError as error:
            problems.append((LossReduction.UNCOUNTED, str(error)))
            form = LossForm.of_rows()
            measured = form.measure(parts, sizes)
        is_sum = form.is_sum
        if not self._criterion.declares_reduction and not form.divides_by_total:
            form = self._checked(form, all_terms, trace, microbatch, loss, outputs, inputs, problems)
        if len(form.counts) != len(measured[0].used):
            measured = form.measure(parts, sizes)
        return _Tried(form, measured, terms, problems, is_sum and not form.is_sum, bool(told_apart))

    def _is_open_choice(self, trace: LossTrace, microbatch: int, in_criterion: bool) -> bool:
        """Whether it does not show which of several counts a number is, and they differ in other micro-batches."""
        own = self._microbatches[microbatch]
        middle = own.num_samples // 2
        halves = [slice(0, middle), slice(middle, own.num_samples)] if in_criterion and middle else []
        try:
            for counts in trace.ambiguous:
                form = LossForm(counts=tuple(counts), products=())
                measured = form.measure(
                    [self._trials.part_of(own.inputs, own.num_samples, half) for half in halves],
                    [half.stop - half.start for half in halves],
                )
                if any(len(set(one.used)) > 1 for one in measured):
                    continue  # the halves have shown it
                all_parts = form.measure(
                    [one.inputs for one in self._microbatches], [one.num_samples for one in self._microbatches]
                )
                if any(len(set(one.used)) > 1 for one in all_parts):
                    return True
        except NotCountedError:
            return True
        return False

    def _form_of(self, trace: LossTrace, terms: Sequence[Term], parts: Sequence[Any], sizes: Sequence[int]) -> LossForm:
        """The form that terms show, as far as the criterion does not say it."""
        has_total = any(self._is_total(factor.count) for term in terms for factor in term.factors or ())
        is_mean = self._criterion.declares_reduction and not has_total
        rows = trace.rows if is_mean else None
        form = loss_form_of(terms, parts, self._trials.twice_inputs, sizes, rows, self._trials.part_of)
        if not has_total:
            if form.in_model:
                return form
            return replace(form, may_branch=trace.has_read, branches=trace.has_branched)
        return form.divided_by_total(next((term.natural for term in terms if term.natural), None))

    def _found(self, form: LossForm, measured: list[Measured], microbatch: int) -> LossForm:
        """The form is known: so are the weights. That of a declared mean is of rows, if replicas found unlike ones."""
        counts = self._exchanged(form.kind, add_up(measured))
        if self._are_unlike and self._criterion.declares_reduction:
            form = LossForm.of_rows()
            measured = [Measured((float(one.num_samples),), (float(one.num_samples),)) for one in self._microbatches]
            counts = [(one,) for one in self._replicas.num_items]
        elif self._are_unlike:
            self._report(LossReduction.UNCOUNTED, f"the replicas' losses are made in different ways; {ADVICE}")
        self._criterion.found(torch.is_grad_enabled(), self._batch.has_total, form)
        before = [one.share for one in self._batch.microbatches]
        self._form, self._measured = form, measured
        self.shares[:] = [one.share for one in self.weighted(self._batch).microbatches]
        with_items = [one for one in self._undecided if any(measured[one].added)]
        if any(not math.isclose(self.shares[one], before[one]) for one in with_items):
            self._report(LossReduction.UNCOUNTED, "a micro-batch that has items has a loss of 0")
        self._look_for_open(microbatch)
        self._compare()
        self._total = [math.fsum(column) for column in zip(*counts, strict=True)]
        is_all = len(counts) == len(self._replicas.num_items)
        if is_all and form.counts and not form.divides_by_total and not any(form.limited(self._total)):
            self._report(LossReduction.EMPTY, "")
            self.weights[:] = [0.0] * len(self.weights)
            return form
        self._found_counts = self._replicas._replace(forms=[form.kind] * len(counts), counts=counts)
        self.weights[:] = self.weighted(self._batch).weights(self._found_counts, self._scale)
        return form

    def _exchanged(self, kind: float, counts: Sequence[float]) -> list[tuple[float, ...]]:
        """The counts of all replicas; ``kind``: of the form, 0 if nothing shows it here. Collective: the replicas."""
        if self._group is None:
            return [tuple(counts)]
        group, self._group = self._group, None
        # Of one size, and with a number that tells forms apart.
        row = [kind, *counts, *[0.0] * (MAX_COUNTS - len(counts))]
        sent = torch.tensor(row, dtype=torch.float64).to(self._device)
        rows = [one.tolist() for one in group.all_gather(sent)]
        self._are_unlike = bool(kind) and any(one[0] not in (0, kind) for one in rows)
        return [tuple(one[1 : 1 + len(counts)]) for one in rows]

    def settle(self) -> None:
        """After an error before the first loss was made: take part in the exchange that it begins."""
        if self._form is None:
            self._exchanged(0.0, ())

    def weighted(self, batch: SplitBatch) -> SplitBatch:
        """The batch, with the shares of its micro-batches as they were found."""
        if self._form is None:
            return batch
        return batch.weighted(self._form, self._measured)

    def _weight(self, microbatch: int, product: Product) -> float:
        return self._form.share(product, self._measured[microbatch], self._total) if self._form else 0.0

    def _share(self, microbatch: int, product: Product) -> float:
        total = [one or used for one, used in zip(add_up(self._measured), self._measured[microbatch].used, strict=True)]
        return self._form.share(product, self._measured[microbatch], total) if self._form else 0.0

    @staticmethod
    def _is_total(count: Any) -> bool:
        return entry_path(count) == (TOTAL_KEY,)

    def _checked(
        self,
        form: LossForm,
        terms: Sequence[Term] | None,
        trace: LossTrace,
        microbatch: int,
        loss: Tensor,
        outputs: Any,
        inputs: Any,
        problems: list[tuple[LossReduction, str]],
    ) -> LossForm:
        """The form, if the loss is a mean or a sum as it says; else what is wrong is added to ``problems``."""
        count = self._microbatches[microbatch].num_samples
        in_criterion = not terms or not any(term.in_model for term in terms)
        why = next((term.why for term in terms or () if term.why), "")
        if self._criterion.is_torchs and in_criterion and not why:
            return LossForm.of_rows() if form.is_sum else form
        if form.is_sum:
            if not in_criterion:
                if not why and all(term.adds_up for term in terms or () if term.factors is not None):
                    return form
                problems.append((LossReduction.COUPLED if why else LossReduction.SUM_IN_MODEL, why))
                return LossForm.of_rows()

            form = LossForm.of_rows()
            if (
                not why
                and confirm_sum(loss, lambda: self._trials.on_twice(outputs, inputs, count)) is LossReduction.SUM
            ):
                problems.append((LossReduction.SUM, ""))
                return form
        if why:
            problems.append((LossReduction.OF_EARLIER_STAGE if why == OF_EARLIER_STAGE else LossReduction.COUPLED, why))
            return form
        unsaid = [
            term
            for term, of_term in zip(terms or (), form.of_terms, strict=False)
            if of_term == () and not term.adds_up
        ]
        if len(form.products) > 1 and unsaid and not in_criterion:
            problems.append((LossReduction.COUPLED, "one of its terms is a sum, another a mean"))
            return form
        if not in_criterion:
            if why := self._trials.coupling_of_given(form, trace, microbatch):
                problems.append((LossReduction.COUPLED, why))
            if any(term.is_times_rows for term in terms or ()):
                problems.append((LossReduction.SUM_IN_MODEL, "a mean that is multiplied with the number of samples"))
            return form
        why = self._trials.coupling(form, trace, microbatch, loss, outputs, inputs)
        if why:
            problems.append((LossReduction.COUPLED, why))
        return form


def _report_of_declared(report: Callable[[LossReduction, str], None], reduction: LossReduction, words: str) -> None:
    """What a script declares is not refused: what cannot be counted is averaged."""
    if reduction is LossReduction.EMPTY:
        report(reduction, words)


def _names_of(functions: Iterable[str]) -> str:
    """Those of nodes of the graph, as scripts call them."""
    return ", ".join(sorted({one.split()[0].partition("Backward")[0].lower() for one in functions}))


class _Tried(NamedTuple):
    """A form of a loss; ``is_doubtful``: its terms show a sum, which it is not."""

    form: LossForm
    measured: list[Measured]
    terms: Sequence[Term] | None
    problems: list[tuple[LossReduction, str]]
    is_doubtful: bool
    is_told_apart: bool


def _number_of(terms: Sequence[Term]) -> int:
    return sum(term.factors is not None for term in terms)
