"""Temporary memory of an update, against what torch's optimizers allocate."""

import pytest
import torch
from torch import nn

from hybridpp import HybridAdam
from hybridpp.estimate import AllocationLog
from hybridpp.optim import adam_kernels, adam_update_bytes


def most_in_an_update(make_optimizer, counts):
    """Bytes beyond what is there before and after, when there is a state."""
    with AllocationLog() as log:
        parameters = [nn.Parameter(torch.randn(count)) for count in counts]
        optimizer = make_optimizer(parameters)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            log.peak = before = log.now
            optimizer.step()
    return log.peak - before


@pytest.mark.parametrize("counts", [[1000], [3000, 4000, 1000], [4000, 4000], [4000, 2000]], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("kernels", "chosen"), [("fused", {"fused": True}), ("foreach", {"foreach": True}), ("loop", {})]
)
def test_an_update_takes_what_is_said(kind, kernels, chosen, counts):
    found = most_in_an_update(lambda parameters: kind(parameters, **chosen), counts)
    assert found == adam_update_bytes([4 * count for count in counts], kernels)


def test_hybrid_adam_takes_nothing():
    assert most_in_an_update(HybridAdam, [1000, 2000]) == 0


def test_no_tensor_takes_nothing():
    assert [adam_update_bytes([], kernels) for kernels in ("fused", "foreach", "loop")] == [0, 0, 0]


def test_torchs_choice_is_changed_where_it_is_fused():
    assert adam_kernels("cuda", ("cuda",)) == "fused"
    assert adam_kernels("cuda", ()) == "foreach"
    assert adam_kernels("cpu", ("cuda",)) == "loop"
    assert adam_kernels("cpu", ("cuda", "cpu")) == "fused"
