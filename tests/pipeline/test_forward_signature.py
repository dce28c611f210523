"""What of a batch a forward is called with."""

import dataclasses
import functools
import re

import pytest

from hybridpp.errors import DataError
from hybridpp.pipeline import ForwardSignature
from hybridpp.pipeline.criterion_form import CriterionForm


def takes(forward):
    return ForwardSignature.of(forward, "Net")


def one(x):
    pass


def two(x, mask):
    pass


def optional(x, masks=None, *, scale=1.0):
    pass


def labelled(x, labels=None):
    pass


def many(x, cond=None, past=None):
    pass


def anything(*args, **kwargs):
    pass


def by_name(*, x):
    pass


@pytest.mark.parametrize(
    ("forward", "batch", "expected"),
    [
        (one, (1, 2), (1,)),
        (one, [1, 2, 3], [1]),
        (one, {"x": 1, "labels": 2}, {"x": 1}),
        (two, (1, 2, 3), (1, 2)),
        (optional, (1,), (1,)),
        (labelled, (1, 2, 3), (1, 2)),
        (optional, {"x": 1, "scale": 2, "labels": 3}, {"x": 1, "scale": 2}),
        (anything, {"x": 1, "labels": 2}, {"x": 1, "labels": 2}),
        (anything, (1, 2, 3, 4), (1, 2, 3, 4)),
        (functools.partial(two, 0), (1, 2), (1,)),
        (print, (1, 2), (1, 2)),
        (min, (1, 2), (1, 2)),
        (by_name, {"x": 1}, {"x": 1}),
    ],
)
def test_a_forward_is_called_with_what_it_takes(forward, batch, expected):
    part = takes(forward).model_inputs(batch)
    assert part == expected
    assert type(part) is type(batch)


def test_a_batch_of_which_all_is_taken_is_handed_on_as_it_is():
    batch = {"x": 1, "masks": 2}
    assert takes(optional).model_inputs(batch) is batch


@pytest.mark.parametrize(
    ("forward", "batch", "text"),
    [
        (two, {"x": 1}, "the forward of Net needs 'mask': got x. Name the entries after the forward's arguments;"),
        (optional, {"x": 1, "mask": 2}, "the forward of Net takes 'masks', not 'mask': got x, mask. Name the entries"),
        (two, (1,), "the forward of Net needs 'mask', 'x': got 1 entry. Return a dict with the forward's names"),
        (two, 1, "the forward of Net needs 'mask', 'x': got 1 entry."),
        (by_name, (1,), "the forward of Net needs 'x': got 1 entry. Return a dict"),
        (lambda: None, (1,), "the forward of Net takes no positional argument: got 1 entry."),
        (
            optional,
            (1, 2),
            "entry 1 of 2 may be Net.forward's optional argument 'masks', or for the criterion only. Say which entries "
            "the model gets, with booster.boost(..., model_inputs=[0]) or [0, 1]; or return a dict",
        ),
        (optional, (1, 2, 3), "entry 1 of 3 may be Net.forward's optional argument 'masks', or for the criterion"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_the_forwards_names(forward, batch, text):
    with pytest.raises(DataError, match=re.escape(text)):
        takes(forward).model_inputs(batch)


def test_a_decorator_may_add_what_a_forward_needs():
    @functools.wraps(two)
    def adding(*args, **kwargs):
        return two(*args, mask=0, **kwargs)

    assert takes(adding).model_inputs((1,)) == (1,)
    assert takes(adding).model_inputs({"x": 1, "labels": 2}) == {"x": 1}


def test_a_name_that_is_near_one_that_is_given_as_well_is_the_criterions():
    assert takes(optional).model_inputs({"x": 1, "mask": 2, "masks": 3}) == {"x": 1, "masks": 3}


@pytest.mark.parametrize(
    ("forward", "count", "form", "taken"),
    [
        (optional, 2, CriterionForm.BATCH, 1),
        (optional, 3, CriterionForm.BATCH, 2),
        (labelled, 2, CriterionForm.BATCH, 2),
        (two, 2, CriterionForm.BATCH, 2),
        (many, 3, CriterionForm.BATCH, 2),
        (anything, 2, CriterionForm.BATCH, 2),
        (optional, 2, CriterionForm.TARGET, 1),
        (labelled, 2, CriterionForm.TARGET, 1),
        (two, 2, CriterionForm.TARGET, 2),
        (many, 3, CriterionForm.TORCHS_TARGET, 2),
        (anything, 3, CriterionForm.TORCHS_TARGET, 2),
        (one, 1, CriterionForm.TORCHS_TARGET, 1),
        (labelled, 2, CriterionForm.OUTPUTS, 2),
    ],
)
def test_the_last_entry_of_a_tuple_fills_no_optional_argument(forward, count, form, taken):
    assert dataclasses.replace(takes(forward), form=form).num_taken(count) == taken


def test_before_the_criterion_is_known_a_sample_is_tried_both_ways():
    assert takes(optional).possible_inputs((1, 2)) == [(1, 2), (1,)]
    assert takes(two).possible_inputs((1, 2)) == [(1, 2)]
