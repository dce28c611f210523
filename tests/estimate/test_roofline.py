from dataclasses import replace

import pytest
import torch

from hybridpp.estimate import DEVICES, ModelRun, Op, UnitMarks, roofline, with_sums

# A product of 1 ms in each of two units, and a sum over two ranks after the first one's.
DEVICE = replace(DEVICES["h100"], tflops={"fp32": 1.0}, op_us=0.0, host_us=0.0, message_us=500.0)
RUN = ModelRun(
    calls=(UnitMarks("a", 0, 2, 6), UnitMarks("b", 2, 3, 4)),
    allocations=(),
    ops=(
        Op(1, 10**9, 0, torch.float32),
        Op(2, 0, 0, None, "all_reduce"),
        Op(3, 10**9, 0, torch.float32),
        Op(5, 10**9, 0, torch.float32),
        Op(7, 10**9, 0, torch.float32),
    ),
    loss=4,
    pass_end=8,
    backward_end=8,
    end=8,
)


def test_measured_times_get_the_sums_of_ranks_that_share_layers():
    alone = replace(RUN, ops=tuple(op for op in RUN.ops if not op.message))
    measured = roofline(alone, DEVICE, 1)
    expected = roofline(RUN, DEVICE, 2)
    found = with_sums(measured, RUN, DEVICE, 2)
    assert found.ends == pytest.approx(expected.ends)
    assert found.gradients == pytest.approx(expected.gradients)
    assert (found.loss, found.backward_end, found.end) == pytest.approx((2.5e-3, 4.5e-3, 4.5e-3))
    assert with_sums(measured, alone, DEVICE, 2) is measured


def test_a_sum_that_was_measured_takes_what_it_took():
    device = replace(DEVICE, sum_us=1500.0, sum_gib_s=1.0)
    assert roofline(RUN, device, 2).ends[0] == pytest.approx(2.5e-3)
    large = replace(RUN, ops=(Op(1, 0, 2**30, None, "all_reduce"),))
    # A ring of two sends half of it twice.
    assert roofline(large, device, 2).ends[0] == pytest.approx(1.0 + 1.5e-3)
