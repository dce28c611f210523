import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridpp.errors import PartitionError
from hybridpp.partition.taint import TaintMode, Value

A, B = Value(0, 0), Value(1, 2)
MODE = FakeTensorMode(allow_non_fake_inputs=True)


def fake(*shape):
    with MODE:
        return torch.empty(shape)


def traced(container_code):
    """What ``container_code(a, b, w)`` stems from: ``a`` and ``b`` are unit outputs, ``w`` is a parameter."""
    a, b, w = fake(4, 2), fake(4, 2), nn.Parameter(fake(4, 2))
    with TaintMode() as taints:
        taints.mark(a, [A])
        taints.mark(b, [B])
        taints.mark(w, ["w"])
        return taints.sources(container_code(a, b, w))


def in_place(write):
    def container_code(a, b, w):
        buffer = torch.zeros(4, 2)
        write(buffer, a)
        return buffer

    return container_code


@pytest.mark.parametrize(
    ("container_code", "expected"),
    [
        (lambda a, b, w: a + 1, {A}),
        (lambda a, b, w: torch.cat([a, b]), {A, B}),
        (lambda a, b, w: {"x": [a * w], "y": 1}, {A, "w"}),
        (lambda a, b, w: a.new_zeros(3), {A}),
        (lambda a, b, w: a.reshape(2, 4).t().unbind()[0], {A}),
        (lambda a, b, w: nn.functional.layer_norm(a, (2,), b[0], w[0]), {A, B, "w"}),
        (lambda a, b, w: torch.zeros(2) + 1, set()),
        (lambda a, b, w: (3, None), set()),
        (lambda a, b, w: a.add_(b), {A, B}),
        # A write that nobody looks at the result of.
        (lambda a, b, w: (a.add_(b), a)[1], {A, B}),
        (in_place(lambda buffer, a: buffer.copy_(a)), {A}),
        (in_place(lambda buffer, a: buffer.__setitem__(0, a[0])), {A}),
        (in_place(lambda buffer, a: buffer[:, :1].copy_(a[:, :1])), {A}),
        (in_place(lambda buffer, a: buffer[0][1:].add_(a[0, :1])), {A}),
        (in_place(lambda buffer, a: buffer.view(-1).__setitem__(0, a[0, 0])), {A}),
        (in_place(lambda buffer, a: torch.add(a, 1, out=buffer)), {A}),
        (in_place(lambda buffer, a: torch._foreach_add_([buffer], [a])), {A}),
        (in_place(lambda buffer, a: buffer.add(a)), set()),
    ],
)
def test_container_code_passes_sources_on(container_code, expected):
    assert traced(container_code) == expected


def test_a_write_shows_in_every_view_made_before_and_after():
    def container_code(a, b, w):
        buffer = torch.zeros(4, 2)
        before, apart = buffer[1:], buffer + 0
        buffer[0].copy_(a[0])
        return {"before": before, "after": buffer[:1], "apart": apart}

    a = fake(4, 2)
    with TaintMode() as taints:
        taints.mark(a, [A])
        views = container_code(a, None, None)
        assert {name: set(taints.sources(view)) for name, view in views.items()} == {
            "before": {A},
            "after": {A},
            "apart": set(),
        }


def test_a_fake_of_unseen_origin_counts_as_made_from_every_value():
    with TaintMode() as taints:
        for value in (A, B):
            taints.mark(fake(1), [value])
        taints.mark(fake(1), ["w"])
        with taints.paused():
            unseen = fake(1) * 2
        assert taints.sources(unseen) == {A, B}
        assert taints.sources(torch.ones(1)) == set()


def test_what_a_unit_made_and_nobody_saw_come_out_is_refused():
    with TaintMode() as taints:
        given, seen, excused = fake(1), fake(1), []
        with taints.paused("block"):
            stray, kept, same = fake(1) * 2, seen * 2, given.to(given.dtype)
        with taints.paused("other"):
            excused.append(fake(1) * 2)
        taints.mark(kept, [A])
        taints.excuse("other")
        for fine in (given, same, kept, excused[0]):
            _ = fine + 1
        assert stray.shape == (1,)
        with pytest.raises(
            PartitionError, match=r"^container code uses a tensor that unit 'block' created and did not return: "
        ):
            _ = stray + 1


def test_a_new_mark_forgets_the_old_one():
    with TaintMode() as taints:
        tensor = fake(1)
        taints.mark(tensor, [A])
        taints.mark(tensor, [B])
        assert taints.sources(tensor) == {B}


def test_outside_the_mode_nothing_is_followed():
    taints = TaintMode()
    tensor = torch.ones(1)
    taints.mark(tensor, [A])
    assert taints.sources(tensor * 2) == set()


def test_values_are_followed_through_vmap_after_something_was_written():
    """As where a model makes a mask from written positions."""
    with TaintMode() as taints:
        a, written = fake(4, 2), torch.zeros(2)
        taints.mark(a, [A])
        written.add_(1)
        mapped = torch.vmap(lambda row: row * 2 + written)(a)
        assert A in taints.sources(mapped)
        assert taints.sources(torch.vmap(lambda row: row * 2)(torch.ones(4, 2))) == set()


@pytest.mark.parametrize("read", [bool, float, torch.Tensor.tolist, lambda one: torch.equal(one, one)])
def test_a_real_value_that_code_reads_decides_what_follows(read):
    with TaintMode() as taints:
        mask = torch.ones(1)
        taints.mark(mask, [A])
        assert mask.shape == (1,)
        assert taints.decisions == set()
        read(mask + 1)
        with taints.paused():
            other = torch.ones(1)
            taints.mark(other, [B])
            bool(other)
    assert taints.decisions == {A}
