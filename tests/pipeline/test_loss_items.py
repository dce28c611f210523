"""Counts of micro-batches, and the weights that follow from them."""

import operator

import pytest
import torch

from hybridpp.errors import ConfigError, DataError
from hybridpp.pipeline.loss_items import (
    Constant,
    Count,
    LossForm,
    Measured,
    NotCountedError,
    ReplicaCounts,
    TracedInt,
    add_up,
    counted_targets,
    entry,
    entry_path,
    num_rows,
    number,
    traced,
    without_floor,
)

MASK = {"mask": torch.tensor([[1.0, 0.0], [1.0, 1.0]])}


def test_a_count_is_a_function_of_the_inputs():
    total = Count(torch.Tensor.sum, (entry(("mask",)),))
    assert float(total.of(MASK, 2)) == 3
    weights = Count(counted_targets, (entry((1,)), 0, Constant(torch.tensor([1.0, 2.0, 4.0]))))
    assert float(weights.of((None, torch.tensor([0, 1, 2])), 3)) == 6
    assert not total.is_of_sizes
    assert Count(operator.mul, (num_rows(), 3)).is_of_sizes


@pytest.mark.parametrize("function", [operator.mul, lambda rows, mask: torch.gather(rows, 1, mask.long())])
def test_rows_that_the_script_made_are_as_many_as_there_are_samples(function):
    two_rows = Constant(torch.tensor([[2.0, 3.0]]).expand(2, 2), num_samples=2)
    count = Count(torch.sum, (Count(function, (two_rows, entry(("mask",)))),))
    expected = float(count.of(MASK, 2))
    assert float(count.of({"mask": MASK["mask"].repeat(3, 1)}, 6)) == 3 * expected
    unlike = Constant(torch.tensor([[2.0, 3.0], [1.0, 4.0]]), num_samples=2)
    with pytest.raises(RuntimeError):
        Count(function, (unlike, entry(("mask",)))).of({"mask": MASK["mask"].repeat(3, 1)}, 6)


def test_arithmetic_on_a_size_keeps_where_it_came_from():
    rows = TracedInt.of(4, num_rows())
    for value in (2 * rows - 1, rows // 3, (7 - rows) / 2, -rows, rows * 0.5, 1 + rows % 3):
        assert value.count.of({}, 4) == value
    assert (rows, 12 / rows) == (4, 3.0)


def test_a_lower_limit_is_no_part_of_a_sum():
    total = Count(torch.Tensor.sum, (entry(("mask",)),))
    limited = Count(torch.Tensor.float, (Count(torch.clamp, (total,), {"min": 5}),))
    assert float(limited.of(MASK, 2)) == 5
    assert float(without_floor(limited).of(MASK, 2)) == 3
    assert without_floor(total) is total


@pytest.mark.parametrize(
    ("limited", "expected"),
    [
        (lambda n: Count(torch.where, (Count(operator.gt, (n, 0)), n, Count(torch.ones_like, (n,)))), (1, 1)),
        (lambda n: Count(torch.maximum, (n, Count(torch.ones_like, (n,)))), (1, 1)),
        (lambda n: Count(operator.mul, (Count(torch.clamp, (n,), {"min": 1}), 2)), (2, 2)),
        (lambda n: Count(operator.add, (n, 1e-8)), (1, 1e-8)),
        (lambda n: Count(operator.add, (n, 1)), None),
        (lambda n: Count(torch.sum, (Count(torch.clamp, (entry(("mask",)),), {"min": 1}),)), None),
    ],
)
def test_a_lower_limit_is_found_by_what_it_makes_of_numbers(limited, expected):
    count = limited(Count(torch.Tensor.sum, (entry(("mask",)),)))
    if expected is None:
        assert count.limit is None
    else:
        inner, floor = count.limit
        assert (float(inner.of(MASK, 2)) / 3, floor) == pytest.approx(expected)


def test_a_number_of_the_batch_is_known_by_its_path():
    assert entry_path(Count(number, (Count(torch.Tensor.item, (entry(("n",)),)),))) == ("n",)
    assert entry_path(Count(torch.Tensor.sum, (entry(("n",)),))) is None


def test_a_micro_batch_weighs_what_it_holds():
    form = LossForm(counts=(num_rows(),), products=(((0, -1),),), of_terms=(((0, -1),),))
    own = form.measure([{}, {}], [3, 1])
    assert own == [Measured((3,), (3,)), Measured((1,), (1,))]
    assert form.weights(own, [8.0]) == [3 / 8, 1 / 8]
    assert form.weights([Measured((0,), (0,)), *own[1:]], add_up(own[1:])) == [0.0, 1.0]


def test_what_is_divided_by_a_lower_limit_weighs_without_items_too():
    total = Count(torch.Tensor.sum, (entry(("mask",)),))
    form = LossForm(counts=(Count(torch.clamp, (total,), {"min": 2}),), products=(((0, -1),),))
    assert form.floors == (2,)
    own = form.measure([{"mask": torch.zeros(2)}, {"mask": torch.ones(4)}], [2, 4])
    assert own == [Measured((2,), (0,)), Measured((4,), (4,))]
    assert form.weights(own, add_up(own)) == [0.5, 1.0]
    assert form.weights(own[:1], [0.0]) == [1.0]
    assert form.kind < 0 < LossForm.of_rows().kind


def test_a_branch_on_a_count_is_a_lower_limit():
    count = entry(("n",))
    assert max(traced(0, count), 1) == 1
    assert max(traced(3.0, count), 2) == 3
    assert count.limits == {1.0: True, 2.0: False}


def test_terms_with_other_counts_have_other_weights():
    form = LossForm(counts=(num_rows(), num_rows()), products=(((0, -1),), ((1, -1), (0, 1))))
    own = Measured((2, 3), (2, 3))
    assert form.needs_terms
    assert [form.share(product, own, (4, 12)) for product in form.products] == [0.5, 0.5]
    assert form.weights([own, Measured((0, 0), (0, 0))], (4, 12)) == [1.0, 0.0]


def test_a_batch_that_cannot_be_counted_says_why():
    form = LossForm(counts=(entry(("mask",)),), products=(((0, -1),),))
    with pytest.raises(NotCountedError, match="KeyError: 'mask'"):
        form.measure([{}], [1])


def test_replicas_without_any_item_are_refused():
    with pytest.raises(DataError, match="the loss is a mean over no items: no replica's batch has any"):
        ReplicaCounts([2, 2], [7.0, 7.0], [(0.0,), (0.0,)]).check()
    with pytest.raises(ConfigError, match="the replicas' losses must be divided by the same numbers of items"):
        ReplicaCounts([2, 2], [7.0, 8.0], [(1.0,), (2.0,)]).check()
    ReplicaCounts([2, 2], [7.0, 0.0], [(0.0,), ()]).check()  # not known yet


@pytest.mark.parametrize(
    ("totals", "counted", "is_global"),
    [([24, 24], 24, True), ([26, 26], 24, True), ([12, 12], 24, False), ([13, 13], 24, False), ([14, 10], 24, False)],
)
def test_a_total_of_all_replicas_is_told_from_one_of_a_replica(totals, counted, is_global):
    assert ReplicaCounts(totals, [7.0, 7.0], [(counted / 2,)] * 2).has_global_total == is_global
