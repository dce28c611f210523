import pytest
import torch
from torch.nn import functional

from hybridpp.estimate import Hollow, OpLog

MIB = 2**20
N = MIB // 4  # elements of a MiB in fp32
IDS = torch.arange(16)


def ops_of(function, *tensors):
    """The operators of a function of hollow tensors of these shapes."""
    with Hollow():
        given = [torch.empty(shape, requires_grad=True) for shape in tensors]
        with OpLog() as log:
            kept = function(*given)
            ops = list(log.ops)
        del kept
    return ops


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda x: x.detach() + 1, [(N,)], 2),
        (lambda x: x.detach().zero_(), [(N,)], 1),
        (torch.zeros_like, [(N,)], 1),
        (lambda x, y: x.detach().copy_(y.detach()), [(N,), (N,)], 2),
        (lambda x, y: x.detach().add_(y.detach()), [(N,), (N,)], 3),
        # What is expanded is in memory once.
        (lambda x, y: x.detach() * y.detach().expand(N // 4, 4), [(N // 4, 4), (4,)], 2 + 16 / MIB),
        # Of a large table, the rows that are read.
        (lambda x: x.detach()[IDS], [(N, 16)], (2 * 16 * 16 * 4 + 16 * 8) / MIB),
        (lambda x: functional.embedding(IDS, x.detach()), [(N, 16)], (2 * 16 * 16 * 4 + 16 * 8) / MIB),
    ],
)
def test_operators_move_what_they_read_and_write(function, shapes, expected):
    (op,) = ops_of(function, *shapes)
    assert op.num_bytes == pytest.approx(expected * MIB)


def test_views_and_reserved_memory_are_no_operators():
    assert ops_of(lambda x: (x.view(-1, 2).t().detach(), torch.empty_like(x)), (N,)) == []


def test_a_joined_kernel_does_not_move_what_its_parts_make_and_free():
    def gate(x, y):
        return functional.silu(x.detach() * 2) * y.detach()

    ops = ops_of(gate, (N,), (N,))
    assert [op.kernel for op in ops] == ["pointwise"] * 3
    assert [op.begins_kernel for op in ops] == [True, False, False]
    assert sum(op.num_bytes for op in ops) == 7 * MIB
    # Both arguments and the result.
    assert sum(op.joined_bytes for op in ops) == 3 * MIB


def test_what_is_kept_for_the_backward_pass_is_written():
    ops = ops_of(lambda x, y: functional.silu(x * 2) * y, (N,), (N,))
    # The product and what is gated are saved.
    assert sum(op.joined_bytes for op in ops) == 5 * MIB


def test_products_and_communication_end_a_joined_kernel():
    def block(x, y):
        h = x.detach() + 1
        h = (h @ y.detach()) + 1
        return h * 2

    ops = ops_of(block, (512, 512), (512, 512))
    assert [(op.kernel, op.begins_kernel) for op in ops] == [
        ("pointwise", True),
        ("", True),
        ("pointwise", True),
        ("pointwise", False),
    ]
    with Hollow(), OpLog() as log:
        h = torch.empty(N) + 1
        first = log.note_message("all_reduce", 8)
        log.note_message("all_gather", 8)
        h = h + 1
        log.note_wait(first)
        h = h + 1
    assert [(op.message, op.age) for op in log.ops if op.message] == [("all_reduce", 0), ("all_gather", 0), ("wait", 1)]
    assert all(op.begins_kernel for op in log.ops)


def test_attention_and_experts_are_kernels_with_a_format():
    def attend(x):
        return functional.scaled_dot_product_attention(*[x.bfloat16()] * 3, is_causal=True).float().sum().backward()

    found = {op.kernel: op for op in ops_of(attend, (2, 4, 128, 64)) if op.flops}
    assert {kernel: op.dtype for kernel, op in found.items()} == {
        "attention": torch.bfloat16,
        "attention_backward": torch.bfloat16,
    }
    assert found["attention_backward"].flops == 2.5 * found["attention"].flops

    def experts(x, y):
        ends = torch.arange(16, 144, 16, dtype=torch.int32)
        return functional.grouped_mm(x.bfloat16(), y.bfloat16(), offs=ends)

    (product,) = (op for op in ops_of(experts, (128, 64), (8, 64, 32)) if op.flops)
    assert (product.kernel, product.flops, product.dtype) == ("experts", 2 * 128 * 64 * 32, torch.bfloat16)
