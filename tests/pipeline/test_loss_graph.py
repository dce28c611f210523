"""What is read of a loss's autograd graph."""

import pytest
import torch
from torch.nn import functional

from hybridpp.pipeline import LossComparison, LossForm, LossReduction, Measured, read_loss

_X = torch.ones(6, 4, requires_grad=True)
_WEIGHT = torch.nn.Parameter(torch.zeros(()))
_SCALES = torch.nn.Parameter(torch.zeros(2))
_ROW = torch.nn.Parameter(torch.ones(4))
_TARGETS = torch.tensor([0, 1, 2, -100, -100, 3])


def _stack():
    return torch.stack([functional.cross_entropy(_X, _TARGETS), _X[:3].sum() / 3])


def _numbers(loss):
    return [float(term.num_items) for term in read_loss(loss, 6).terms]


@pytest.mark.parametrize(
    ("loss", "numbers"),
    [
        (functional.cross_entropy(_X, _TARGETS), [4]),
        (functional.cross_entropy(_X.bfloat16(), _TARGETS).float() / 2, [8]),
        (functional.cross_entropy(_X, _TARGETS, reduction="sum") / (_TARGETS != -100).sum(), [4]),
        (functional.cross_entropy(_X, _TARGETS, weight=torch.tensor([1.0, 2, 3, 4])), [10]),
        (functional.mse_loss(_X, torch.zeros(6, 4)), [24]),
        (functional.l1_loss(_X, torch.zeros(6, 4)) * 3, [8]),
        (_X.sum(1).mean(), [6]),
        (_X[:5].mean().mean().reshape(1).squeeze(), [20]),
        (_X.sum(), [1]),
        (torch.stack([row.mean() for row in _X]).mean(), [6]),
        (torch.stack([_X.mean(), _X[:3].sum() / 3, torch.ones(())]) @ torch.tensor([1.0, 0.5, 3]), [24, 6]),
        (torch.einsum("bt,bt->", _X, torch.ones(6, 4)) / 5, [5]),
        ((_X / torch.tensor(5.0) + 2 * (_X.abs() / torch.tensor(6.0))).sum(), [5, 3]),
        ((_X + 2 * _X.abs()).sum() / 4, [4]),
        ((_stack() * torch.exp(-_SCALES) + _SCALES).sum(), [4, 3]),
        ((_stack() / (2 * _SCALES.exp()) + 0.5 * _SCALES).mean(), [8, 6]),
        (_SCALES.softmax(0) @ _stack() - _SCALES.square().sum(), [4, 3]),
        (torch.einsum("t,t->", _stack(), _SCALES.exp()) + _SCALES[0], [4, 3]),
        (torch.exp(-_SCALES[0]) * _X.mean() + (_SCALES[1] + 2) * _X.sum() / 5, [24, 5]),
        ((_X.sum() + _X[:3].sum()) * _SCALES[0].exp() / 5, [5, 5]),
        # Numbers of the batch leave no trace in the graph where they need no gradient.
        ((torch.ones(3, 4) @ _ROW - torch.ones(3)).square().mean(), [3]),
        ((_ROW * torch.ones(1, 4)).mean() + _X.mean(), [4, 24]),
        ((_ROW - torch.ones(4)).mean() / 2, [8]),
        (2 - (_WEIGHT.exp() * _X.mean() + _WEIGHT.square()) + _X.sum() / 6, [24, 6]),
    ],
)
def test_means_and_divided_sums_are_read_through_linear_functions(loss, numbers):
    assert _numbers(loss) == pytest.approx(numbers)


@pytest.mark.parametrize(
    "loss",
    [
        _X.mean().sqrt(),
        _X.mean() / _X.square().mean(),
        _X.logsumexp((0, 1)),
        sum(functional.cross_entropy(row, torch.tensor(1)) for row in _X) / 6,
        sum(row.mean() for row in _X[:3]) / 3,
        _WEIGHT.exp() * (_X.mean() + _X[:3].mean()),
    ],
)
def test_other_losses_are_not_known_and_have_the_size_of_their_tensors(loss):
    found = read_loss(loss, 6)
    assert not found.kind
    assert not found.terms
    assert found.size > 1


def test_losses_of_one_making_are_of_one_kind_whatever_their_size():
    kinds = [read_loss(functional.cross_entropy(_X[:n], _TARGETS[:n]), 6).kind for n in (2, 3)]
    assert kinds[0] == kinds[1] != read_loss(_X.mean(), 6).kind


def test_losses_are_compared_by_their_reductions_and_their_divisors():
    comparison, form = LossComparison(), LossForm(**vars(LossForm.of_rows()) | {"of_terms": (((0, -1),),)})

    def compared(*losses):
        comparison.begin(form, [Measured((2.0,), (2.0,)), Measured((4.0,), (4.0,))])
        for number, loss in enumerate(losses):
            comparison.inspect(number, loss)
        return comparison.close([1.0] * len(losses), [])

    assert compared(_X[:2].sum() / 3, _X[:4].sum() / 2) == (LossReduction.UNCOUNTED, 0.0)
    assert compared(3 * _X[:2].sum() / 2, _X[:4].sum() / 4 * 3 + 1) == (LossReduction.MEAN, pytest.approx(1 / 3))
    assert compared(_X[:2].sum() / 2, _X[:4].sum() / 4) == (LossReduction.MEAN, 1)
    # Of one element, every reduction is the same, and what it is divided by may have been reduced before.
    assert compared(_X[:1, :1].mean() / 2, _X[:4].sum() / 4) == (LossReduction.MEAN, 1)
    one = _X[:1, :1].mean()
    others = [_X[:2].sum() / 1, _X[:2].sum(), _X[:2].mean(), (_X[:2].sum() / 2).sqrt(), one, _X[:1].mean(1).mean()]
    assert {compared(one, _X[:4].sum() / 4)[0] for one in others} == {LossReduction.CHANGED}


_ROWS = (((0, -1),),)


def test_means_over_samples_before_those_of_others_count_samples():
    def compared(loss_of):
        comparison, form = LossComparison(), LossForm(counts=LossForm.of_rows().counts, products=_ROWS, of_terms=_ROWS)
        comparison.begin(form, [Measured((2.0,), (2.0,)), Measured((4.0,), (4.0,))])
        for number, rows in enumerate((_X[:2], _X[:4])):
            comparison.inspect(number, loss_of(rows))
        return comparison.close([1.0] * 2, [])

    weights = torch.ones(_X.shape[1])
    assert compared(lambda x: x.mean(0, keepdim=True).mean(1)) == (LossReduction.MEAN, 0)
    assert compared(lambda x: x.mean(-2).mean()) == (LossReduction.MEAN, 0)
    assert compared(lambda x: (-x.mean(0) * weights + 1).sum()) == (LossReduction.MEAN, 1)
    assert compared(lambda x: x.mean(0) @ weights) == (LossReduction.MEAN, 1)
    assert compared(lambda x: x.sum(0).mean())[0] is LossReduction.UNCOUNTED


def test_losses_taken_for_means_over_samples_are_compared_as_a_whole():
    comparison = LossComparison()

    def compared(*losses, rows=(2.0, 2.0)):
        comparison.begin(LossForm.of_rows(), [Measured((one,), (one,)) for one in rows])
        for number, loss in enumerate(losses):
            comparison.inspect(number, loss)
        return comparison.close([1.0] * len(losses), [])

    def items(first, last):
        return sum(_X[row].sum() / (row + 1) for row in range(first, last)) / (last - first)

    assert compared(_X[:2].sum() / 3, _X[2:4].sum() / 4) == (LossReduction.UNCOUNTED, 0.0)
    assert compared(_X[:3].mean(), _X[2:4].mean()) == (LossReduction.UNCOUNTED, 0.0)
    assert compared(_X[0].mean() + items(0, 2), _X[1].mean() + items(0, 3)) == (LossReduction.UNCOUNTED, 0.0)
    assert compared((_X[0].sum() + _X[1].sum()) / 3, (_X[2].sum() + _X[3].sum()) / 2)[0] is LossReduction.UNCOUNTED
    assert compared(items(0, 2), items(2, 4)) == (LossReduction.MEAN, 1)
    assert compared(_X[:3, 0].mean(), rows=(2.0,)) == (LossReduction.MEAN, 1.5)  # chosen ones
    assert compared(3 * _X[:2].mean(), 2 * _X[2:4].mean().mean()) == (LossReduction.MEAN, 1)
    assert compared(_X[:2].flatten().mean()) == (LossReduction.MEAN, 0)  # rows may be longer elsewhere
    assert compared(_X[:3].mean(0).mean(), _X[:2].mean(0).mean(), rows=(3.0, 2.0)) == (LossReduction.MEAN, 0)
    assert compared(-_X[:3].sum() / 3, -_X[:2].sum() / 2, rows=(3.0, 2.0)) == (LossReduction.MEAN, 1)
    assert compared(_X[:3].std().sqrt(), _X[:2].std().sqrt()) == (LossReduction.MEAN, 0)


@pytest.mark.parametrize("row_of", [lambda j: _X[j], lambda j: _X[j : j + 1], lambda j: _X[j][None]])
def test_a_sum_over_the_samples_one_by_one_is_not_read(row_of):
    assert not read_loss(sum(row_of(j).square().mean() for j in range(3)) / 3, 6).terms


def test_slices_of_several_samples_are_terms_of_their_own():
    assert len(read_loss(_X[:2].square().mean() + _X[2:4].abs().mean(), 6).terms) == 2
