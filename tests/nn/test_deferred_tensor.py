"""Tensors whose values are made when they are read."""

import copy

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hybridpp.nn.deferred_tensor import DeferredTensor, deferred, with_values

CPU = torch.device("cpu")


class Source:
    """A tensor that counts its copies."""

    def __init__(self, tensor):
        self.tensor, self.copies = tensor, 0
        self.lazy = deferred(tensor, self.make, dtype=tensor.dtype, device=CPU)

    def make(self):
        self.copies += 1
        return self.tensor.to(CPU, copy=True)


@pytest.fixture
def source():
    return Source(torch.arange(6.0).reshape(2, 3))


def test_metadata_is_that_of_the_copy_and_copies_nothing(source):
    lazy = source.lazy
    assert isinstance(lazy, Tensor)
    assert (lazy.shape, lazy.dtype, lazy.device, lazy.dim(), len(lazy)) == ((2, 3), torch.float32, CPU, 2, 2)
    assert lazy.is_floating_point()
    assert not lazy.requires_grad
    half = lazy.to(torch.bfloat16)
    assert half.dtype is torch.bfloat16
    assert lazy.to(torch.float32) is lazy
    assert source.copies == 0
    assert torch.equal(half + 0, source.tensor.bfloat16())
    assert source.copies == 1


READS = {
    "arithmetic": lambda x: x + 1,
    "method": lambda x: x.sum(),
    "index": lambda x: x[1],
    "function": lambda x: torch.stack([x, x]),
    "module": nn.Linear(3, 2),
    "loss": lambda x: cross_entropy(x, torch.tensor([0, 1])),
    "host": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "bool": lambda x: bool((x > 0).any()),
    "iteration": list,
    "text": repr,
    "strides": lambda x: x.stride(),
    "deep copy": copy.deepcopy,
    "property": lambda x: x.mT,
    "other first": lambda x: torch.ones(2, 3) * x,
    "keyword": lambda x: torch.add(torch.ones(2, 3), other=x),
    "view": lambda x: x.view(-1),
    "detached": lambda x: x.detach(),
    "device and dtype": lambda x: x.to("cpu", torch.float64),
    "out": lambda x: torch.add(x, 1, out=torch.empty(2, 3)),
}


@pytest.mark.parametrize("name", READS)
def test_every_read_copies_once_and_gives_what_the_copy_gives(name, source):
    read = READS[name]
    expected = read(source.tensor.clone())
    for _ in range(2):
        found = read(source.lazy)
        assert not isinstance(found, DeferredTensor)
        torch.testing.assert_close(found, expected, rtol=0, atol=0) if name not in ("text",) else None
        assert str(found) == str(expected)
    assert source.copies == 1


def test_a_write_is_seen_by_later_reads_and_not_by_the_source(source):
    source.lazy.mul_(2)
    source.lazy[0] = 7
    assert source.lazy.tolist() == [[7, 7, 7], [6, 8, 10]]
    assert source.tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert source.lazy._version == 2


def test_autograd_functions_get_the_copy(source):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, x):
            ctx.save_for_backward(x)
            return weight * x

        @staticmethod
        def backward(ctx, dy):
            return (dy * ctx.saved_tensors[0]).sum(), None

    weight = torch.tensor(2.0, requires_grad=True)
    Scale.apply(weight, source.lazy).sum().backward()
    assert weight.grad == source.tensor.sum()
    assert source.copies == 1


def test_copies_of_a_tree(source):
    tree = with_values({"x": [source.lazy, 1], "y": source.tensor})
    assert type(tree["x"][0]) is Tensor
    assert torch.equal(tree["x"][0], source.tensor)
    assert tree["y"] is source.tensor


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, dy):
        return dy * 3


def widened(x):
    return deferred(x, x.float, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    "loss", [lambda y: (y * 3).sum(), lambda y: Scale.apply(y).sum(), lambda y: y.to(torch.float64).mul(3).sum()]
)
def test_gradients_reach_what_it_was_made_of(loss):
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    lazy = widened(weight * 1)
    assert lazy.requires_grad
    loss(lazy).backward()
    assert weight.grad.tolist() == [3] * 4
    assert weight.grad.dtype is torch.bfloat16


def test_its_graph_is_that_of_the_values_whoever_reads_them_first():
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    lazy = widened(weight * 1)
    with torch.no_grad():
        assert lazy.sum() == 4
    assert lazy.grad_fn is lazy.view_as(lazy).grad_fn.next_functions[0][0]
    assert not lazy.is_leaf
    lazy.retain_grad()
    lazy.sum().backward()
    assert lazy.grad.tolist() == [1] * 4


def test_without_gradients_it_requires_none():
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        lazy = widened(weight)
    assert not lazy.requires_grad
    assert not (lazy + 0).requires_grad


SCALAR_READS = {
    "item": lambda loss: loss.item(),
    "float": float,
    "an array": numpy.asarray,
    "a sum from 0": lambda loss: 0 + loss,
    "a running sum": lambda loss: torch.zeros(()).add_(loss),
    "stacked": lambda loss: torch.stack([loss, loss]).mean(),
    "formatted": lambda loss: float(f"{loss:.2f}"),
    "an entry": lambda loss: torch.zeros(2).index_fill(0, torch.tensor([1]), loss)[1],
    "an operator": lambda loss: torch.ops.aten.add.Tensor(loss, torch.tensor(0.0)),
}


@pytest.mark.parametrize("read", SCALAR_READS.values(), ids=SCALAR_READS)
def test_a_scalar_is_its_value_however_it_is_read(read):
    source = Source(torch.tensor(2.5))
    for _ in range(2):
        assert float(read(source.lazy)) == 2.5
    assert source.copies == 1


def test_what_making_raises_is_raised_at_every_read():
    def make():
        raise RuntimeError("the peer is gone")

    lazy = deferred(torch.empty(()), make, dtype=torch.float32, device=CPU)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the peer is gone"):
            lazy.item()
