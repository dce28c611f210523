import math

import pytest
import torch
from hybridpp_plugins.manual_clipping import ManualScaling
from hybridpp_plugins.step_message import NUM_FIRST, BadLoss, row_of, summary_of

from hybridpp.pipeline import LossReduction, StepResult, split_batch

BATCH = split_batch([torch.zeros(3)], num_microbatches=2, microbatch_size=None)  # of two samples and of one


UNSCALED = ManualScaling()


def row(losses=(), reduction=LossReduction.MEAN, scaled=UNSCALED, failed=False):
    result = StepResult(torch.tensor(losses), [True] * len(losses) or [False] * 2, {})
    return row_of(BATCH, result, list(losses), reduction, scaled, failed)


NOTHING = row()


def test_every_rank_learns_the_mean_loss_of_its_replica():
    rows = [NOTHING, row([1.0, 4.0]), NOTHING, row([7.0, 7.0])]
    assert all(one.shape == (NUM_FIRST,) and one.dtype is torch.float64 for one in rows)
    first, second = (summary_of(rows, [[1], [3]], last) for last in (1, 3))
    assert (first.loss, second.loss) == (2.0, pytest.approx(7.0))
    assert (first.bad_loss, first.reduction, first.unequal, first.failed) == (None, LossReduction.MEAN, {}, [])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_bad_loss_is_named(bad):
    summary = summary_of([NOTHING, row([1.0, bad]), row([bad, bad])], [[1], [2]], 1)
    assert repr(summary.bad_loss) == repr(BadLoss(bad, 1, 1))
    assert not math.isfinite(summary.loss)


def test_infinities_of_both_signs_add_up_to_nan():
    assert math.isnan(summary_of([row([math.inf, -math.inf])], [[0]], 0).loss)


def test_ranks_that_share_layers_must_have_one_loss():
    assert summary_of([row([1.0, 1.0]), row([1.0, 2.0])], [[0, 1]], 0).unequal == {0: 1.0, 1: pytest.approx(4 / 3)}
    nan = row([math.nan, 1.0])
    assert summary_of([nan, nan], [[0, 1]], 0).unequal == {}


def test_the_most_severe_finding_and_all_refusals_are_told():
    rows = [row(failed=True), row([1.0, 1.0], max(LossReduction)), row([1.0, 1.0], scaled=ManualScaling(0.5, 3.0))]
    summary = summary_of(rows, [[1], [2]], 1)
    assert (summary.reduction, summary.failed) == (max(LossReduction), [0])
    assert summary.scaled == [ManualScaling(), ManualScaling(), ManualScaling(0.5, 3.0)]
