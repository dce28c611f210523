import math

import pytest
import torch
from hybridpp_plugins.manual_clipping import ManualScaling
from hybridpp_plugins.step_message import (
    NUM_WITHOUT_NORM,
    BadLoss,
    OptimizerCalls,
    RankReport,
    message_of,
    summary_of,
)

from hybridpp.pipeline import LossReduction, StepResult, split_batch

BATCH = split_batch([torch.zeros(3)], num_microbatches=2, microbatch_size=None)  # of two samples and of one


def message(losses=(), **report):
    result = StepResult(torch.tensor(losses), [True] * len(losses) or [False] * 2, {})
    return message_of(BATCH, result, list(losses), RankReport(**report))


NOTHING = message()


def test_every_rank_learns_the_mean_loss_of_its_replica():
    messages = [NOTHING, message([1.0, 4.0]), NOTHING, message([7.0, 7.0])]
    assert {len(one) for one in messages} == {NUM_WITHOUT_NORM}
    first, second = (summary_of(messages, [[1], [3]], last) for last in (1, 3))
    assert (first.loss, second.loss) == (2.0, pytest.approx(7.0))
    assert (first.bad_loss, first.reduction, first.unequal, first.failed) == (None, LossReduction.MEAN, {}, [])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_bad_loss_is_named(bad):
    summary = summary_of([NOTHING, message([1.0, bad]), message([bad, bad])], [[1], [2]], 1)
    assert repr(summary.bad_loss) == repr(BadLoss(bad, 1, 1))
    assert not math.isfinite(summary.loss)


def test_infinities_of_both_signs_add_up_to_nan():
    assert math.isnan(summary_of([message([math.inf, -math.inf])], [[0]], 0).loss)


def test_ranks_that_share_layers_must_have_one_loss():
    assert summary_of([message([1.0, 1.0]), message([1.0, 2.0])], [[0, 1]], 0).unequal == {
        0: 1.0,
        1: pytest.approx(4 / 3),
    }
    nan = message([math.nan, 1.0])
    assert summary_of([nan, nan], [[0, 1]], 0).unequal == {}


def test_the_most_severe_finding_and_all_refusals_are_known():
    messages = [
        message(failed=1.0),
        message([1.0, 1.0], reduction=2.0),
        message([1.0, 1.0], scaled=ManualScaling(0.5, 3.0)),
    ]
    summary = summary_of(messages, [[1], [2]], 1)
    assert (summary.reduction, summary.failed) == (max(LossReduction), [0])
    assert [report.scaled for report in summary.reports] == [ManualScaling(), ManualScaling(), ManualScaling(0.5, 3.0)]


def test_a_message_keeps_every_number_of_a_report():
    report = RankReport(1.0, 2.0, ManualScaling(0.5, 3.0), OptimizerCalls(4.0, 5.0), 6.0)
    (received,) = summary_of([message([1.0, 1.0], **report._asdict())], [[0]], 0).reports
    assert received == report
    assert summary_of([message([1.0, 1.0], digest=7.0), NOTHING], [[0]], 0).digests == [7.0, None]


@pytest.mark.parametrize(
    "problem",
    [
        {"failed": 1.0},
        {"reduction": 1.0},
        {"scaled": ManualScaling(0.5, 3.0)},
        {"calls": OptimizerCalls(1.0, 2.0)},
        {"losses": [math.nan, 1.0]},
        {"losses": [1.0, 2.0]},
    ],
    ids=str,
)
def test_a_report_with_a_problem_is_not_clean(problem):
    clean = message([1.0, 1.0], digest=3.0)
    assert summary_of([clean, clean], [[0, 1]], 0).is_clean
    losses = problem.pop("losses", [1.0, 1.0])
    assert not summary_of([clean, message(losses, **problem)], [[0, 1]], 0).is_clean
