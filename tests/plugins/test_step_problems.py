import pytest
from hybridpp_plugins.step_epilogue import OptimizerCalls
from hybridpp_plugins.step_problems import check_optimizer_calls

from hybridpp.errors import UnlikeCallsError


def test_ranks_that_called_the_optimizer_differently_are_named():
    check_optimizer_calls([OptimizerCalls(1, 7)] * 3)
    with pytest.raises(
        UnlikeCallsError, match=r"on ranks 0, 2 the optimizer has taken 7 steps .* on rank 1 .* 6 steps"
    ):
        check_optimizer_calls([OptimizerCalls(1, 7), OptimizerCalls(1, 6), OptimizerCalls(1, 7)])
