"""What a criterion is: a loss of torch's or a function, and what it returns over samples."""

import functools

import pytest
from torch import nn
from torch.nn import functional

from hybridpp.errors import ConfigError
from hybridpp.pipeline import check_reduction, takes_targets

SUM = functools.partial(functional.mse_loss, reduction="sum")


@pytest.mark.parametrize(
    ("criterion", "is_torchs"),
    [
        (nn.CrossEntropyLoss(), True),
        (functional.mse_loss, True),
        (SUM, True),
        (nn.TripletMarginLoss(), False),
        (lambda outputs, inputs: outputs, False),
    ],
)
def test_losses_of_torch_with_one_target_are_known(criterion, is_torchs):
    assert takes_targets(criterion) is is_torchs


@pytest.mark.parametrize(
    ("criterion", "loss_reduction", "reduction"),
    [
        (SUM, None, "sum"),
        (SUM, "sum", "sum"),
        (len, None, None),
        (len, "sum", "sum"),
        (nn.KLDivLoss(reduction="batchmean"), "mean", "batchmean"),
        (None, "mean", "mean"),
    ],
)
def test_a_criterions_own_reduction_or_what_boost_was_told(criterion, loss_reduction, reduction):
    assert check_reduction(criterion, loss_reduction) == reduction


@pytest.mark.parametrize(
    ("criterion", "loss_reduction", "message"),
    [
        (SUM, "mean", "boost got loss_reduction='mean'. Give one of them, or the same"),
        (nn.MSELoss(), "add", "loss_reduction must be 'mean', 'sum' or None"),
    ],
)
def test_two_reductions_are_refused(criterion, loss_reduction, message):
    with pytest.raises(ConfigError, match=message):
        check_reduction(criterion, loss_reduction)
