from dataclasses import replace

import pytest
import torch

from hybridpp.estimate import DEVICES, Memory, ModelRun, Op, Ops, UnitMarks, roofline, with_sums

# A product of 1 ms in each of two units, and a sum over two ranks after the first one's.
DEVICE = replace(DEVICES["h100"], tflops={"fp32": 1.0}, op_us=0.0, host_us=0.0, message_us=500.0)
RUN = ModelRun(
    calls=(UnitMarks("a", 0, 2, 6), UnitMarks("b", 2, 3, 4)),
    memory=Memory.of([]),
    ops=Ops.of(
        [
            Op(1, 10**9, 0, torch.float32),
            Op(2, 0, 0, None, "all_reduce"),
            Op(2, 0, 0, None, "wait"),
            Op(3, 10**9, 0, torch.float32),
            Op(5, 10**9, 0, torch.float32),
            Op(7, 10**9, 0, torch.float32),
        ]
    ),
    loss=4,
    pass_end=8,
    backward_end=8,
    end=8,
)


def test_measured_times_get_the_sums_of_ranks_that_share_layers():
    alone = replace(RUN, ops=Ops.of(op for op in RUN.ops if not op.message))
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
    large = replace(RUN, ops=Ops.of([Op(1, 0, 2**30, None, "all_reduce"), Op(1, 0, 0, None, "wait")]))
    # A ring of two sends half of it twice.
    assert roofline(large, device, 2).ends[0] == pytest.approx(1.0 + 1.5e-3)


def test_communication_proceeds_beside_operators_until_it_is_waited_for():
    def end(*ops, device=DEVICE):
        return roofline(replace(RUN, calls=(), ops=Ops.of(ops)), device, 2).end

    product, start, wait = Op(1, 10**9, 0, torch.float32), Op(1, 0, 0, None, "all_reduce"), Op(1, 0, 0, None, "wait")
    assert end(product, start, wait, product) == pytest.approx(2.5e-3)
    assert end(product, start, product, wait) == pytest.approx(2e-3)
    # One after the other: the second one ends 1 ms after both were started.
    assert end(start, start, wait._replace(age=1)) == pytest.approx(0.5e-3)
    assert end(start, start, wait, product) == pytest.approx(2e-3)
    # Cores that compute do not communicate.
    assert end(product, start, product, wait, device=replace(DEVICE, cores=2)) == pytest.approx(2.5e-3)


def test_kernels_have_rates_of_their_own():
    device = replace(DEVICE, tflops={"fp32": 1.0, "bf16": 1.0}, memory_gib_s=1.0, op_us=100.0, host_us=0.0)
    fused = replace(device, kernels={"pointwise": 2.0, "attention": 4.0})

    def end(op, device):
        return roofline(replace(RUN, calls=(), ops=Ops.of([op])), device, 1).end

    attention = Op(1, 10**12, 0, torch.bfloat16, kernel="attention")
    assert end(attention, device) == pytest.approx(1.0 + 1e-4)
    assert end(attention, fused) == pytest.approx(0.25 + 1e-4)
    assert end(attention._replace(dtype=torch.float32), fused) == pytest.approx(1.0 + 1e-4)
    first = Op(1, 0, 2**30, torch.bfloat16, kernel="pointwise", joined_bytes=2**29)
    assert end(first, device) == pytest.approx(1.0 + 1e-4)
    assert end(first, fused) == pytest.approx(0.25 + 1e-4)
    # A part of a kernel has no start of its own.
    assert end(first._replace(begins_kernel=False), fused) == pytest.approx(0.25)
