"""What a loss is a mean over, from its terms."""

import re

import pytest
import torch

from hybridpp.pipeline.loss_form import combined, loss_form_of, matched, observed, united
from hybridpp.pipeline.loss_items import Count, NotCountedError, entry, num_rows, size
from hybridpp.pipeline.loss_trace import Term, TermFactor

PARTS = [{"mask": torch.zeros(2, 3)}, {"mask": torch.ones(2, 3)}]
TOTAL = Count(torch.Tensor.sum, (entry(("mask",)),))


def unasked(count):
    raise AssertionError("terms that are made as before need no values")


def found(*terms, rows=None):
    def twice(inputs, num_samples):
        return {"mask": torch.cat([inputs["mask"]] * 2)}

    return loss_form_of(terms, PARTS, twice, [2, 2], rows)


def term(*counts, value=1.0, **about):
    return Term(tuple(TermFactor(count, -1) for count in counts), lambda: torch.tensor(value), **about)


def test_numbers_that_stay_the_same_for_more_samples_are_no_counts():
    form = found(term(Count(size, (entry(("mask",)), 1)), TOTAL), Term(None, lambda: 2.0))
    assert (form.counts, form.products, form.of_terms) == ((TOTAL,), (((0, -1),),), (((0, -1),), None))
    assert found(term()).is_sum
    rows = num_rows()
    assert found(term(), rows=rows).counts == (rows,)


def test_a_number_that_is_neither_a_count_nor_a_constant_is_refused():
    power = Count(torch.square, (TOTAL,))
    with pytest.raises(NotCountedError, match="a number that it is divided by is 36, and for twice the samples 144"):
        found(term(power))


def test_a_number_of_one_entry_of_a_list_of_samples_is_refused_by_name():
    boxes = [{"boxes": [torch.zeros(n, 4) for n in (2, 1)]} for _ in range(2)]
    second = Count(size, (entry(("boxes", 1)), 0))

    def half(inputs, num_samples, samples):
        return {"boxes": inputs["boxes"][samples]}

    with pytest.raises(NotCountedError, match=re.escape("it reads ['boxes'][1] of the batch, which not every part")):
        loss_form_of([term(second)], boxes, lambda inputs, _: {"boxes": 2 * inputs["boxes"]}, [2, 2], None, half)


def test_a_loss_is_put_together_from_terms_that_have_items():
    terms = [term(num_rows(), value=2.0), term(TOTAL, value=float("nan")), Term(None, lambda: 1.0)]
    form = found(*terms)
    own = form.measure(PARTS, [2, 2])
    (rows, masked), total = form.products, [6 if one is TOTAL else 4 for one in form.counts]
    assert [form.share(product, own[0], total) for product in (rows, masked)] == [0.5, 0.0]
    products = matched(form, terms, own[0], unasked)
    assert combined(form, terms, products, lambda product: form.share(product, own[0], total)) == 1.5


def kind(number):
    """A term of the samples of a kind."""
    return term(Count(torch.sum, (Count(torch.eq, (entry(("mask",)), number)),)))


def test_terms_are_told_apart_in_any_order_by_what_they_are_divided_by():
    form = found(*united([[term(num_rows()), kind(0)], [term(num_rows()), kind(1)]]))
    rows, zeros, ones = form.of_terms
    empty, full = form.measure(PARTS, [2, 2])
    assert matched(form, [kind(0), term(num_rows())], empty, unasked) == (zeros, rows)
    assert matched(form, [term(num_rows()), kind(1)], full, unasked) == (rows, ones)
    assert found(kind(0)).kind not in (found(kind(1)).kind, form.kind)
    assert found(kind(1), term(num_rows()), kind(0)).kind == form.kind
    with pytest.raises(NotCountedError, match="it has 1 terms, and had 3 before"):
        matched(form, [term(num_rows())], full, unasked)  # the other has items
    with pytest.raises(NotCountedError, match="it has other terms than before"):
        matched(form, [term(num_rows()), kind(2)], full, lambda count: count.of(PARTS[1], 2))


def test_equal_numbers_that_are_taken_for_each_other_keep_their_places():
    form = found(kind(1), term(num_rows()))
    own = form.measure([{"mask": torch.ones(2, 1)}], [2])[0]
    again = [term(num_rows()), term(num_rows())]
    assert matched(form, again, own, lambda count: 2) == form.of_terms


def test_numbers_that_the_model_computed_are_told_apart():
    factor = TermFactor(num_rows(), -1, True, 3)
    assert observed([term(TOTAL), Term((factor,), lambda: 1.0)]) == [factor]
