"""Divided activations that look whole: whatever is done to one gives what it gives for the whole."""

import copy

import pytest
import torch
from sharded_activations.lazy_logits import FULL, TARGET, B, Counted, S, V, check, deferred_logits, on_ranks
from torch.nn import functional

from hybridpp.cluster import Loopback, current_world
from hybridpp.sharded_activations import DeferredGatherTensor, gathered
from hybridpp.sharded_activations.collectives import local_part


def written(x):
    flat, twice = x.view(-1, V), x.float().mul(2)
    x[0] = 0.5
    flat[1, 2] = 4.0
    return functional.cross_entropy(flat, TARGET.view(-1)) + functional.cross_entropy(twice[0], TARGET[0]) + x[1].sum()


def scaled_in_place(x):
    x.div_(2.0)
    x *= 3
    return functional.cross_entropy(x.view(-1, V), TARGET.view(-1))


def with_a_metric(x):
    with torch.no_grad():
        accuracy = (x.argmax(-1) == TARGET).float().mean()
    return functional.cross_entropy(x.view(-1, V), TARGET.view(-1)) * (1 + accuracy)


def in_chunks(x):
    chunks = x.detach().requires_grad_()
    functional.cross_entropy(chunks.view(-1, V), TARGET.view(-1)).backward()
    return (x * chunks.grad).sum()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.reshape(-1, V)

    @staticmethod
    def backward(ctx, dy):
        return -dy.reshape(B, S, V)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


OTHERS = {
    "softmax": lambda x: x.softmax(-1),
    "class weights": lambda x: functional.cross_entropy(x.view(-1, V), TARGET.view(-1), torch.arange(1.0, V + 1)),
    "probabilities": lambda x: functional.cross_entropy(x.view(-1, V), FULL.view(-1, V).softmax(-1)),
    "nll of log-softmax": lambda x: functional.nll_loss(functional.log_softmax(x, -1).view(-1, V), TARGET.view(-1)),
    "one class": lambda x: x[..., 2] + x[:, :, -1],
    "some classes": lambda x: x[..., 1:5],
    "behind the classes": lambda x: x[..., None],
    "other shapes": lambda x: x.view(-1) + x.reshape(V, B * S).flatten() + x.flatten(1).flatten(),
    "with itself": lambda x: x * x + x / x.detach().abs().exp(),
    "with a tensor": lambda x: x * torch.arange(V),
    "divided by it": lambda x: 1 / x,
    "concatenated": lambda x: torch.cat([x, x[:, :1]], 1),
    "greatest": lambda x: x.max(-1).values + x.topk(2).values.sum(-1),
    "written to": written,
    "scaled in place": scaled_in_place,
    "a metric first": with_a_metric,
    "an autograd function": lambda x: Twice.apply(x),
    "an autograd function of parts": lambda x: functional.cross_entropy(Reversed.apply(x), TARGET.view(-1)),
    "a gradient taken before": in_chunks,
    "a matrix product": lambda x: x @ FULL[0].T,
    "transposed": lambda x: x.mT,
    "reentrant checkpoint": lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.view(-1, V), x, use_reentrant=True),
    "copied": lambda x: copy.deepcopy(x.detach()),
    "hooked": lambda x: (x.register_hook(lambda dy: dy * 3), x.view(-1, V).sum())[1],
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_done_on_the_whole(name):
    check(OTHERS[name])


def test_it_is_gathered_once_and_a_loss_after_a_metric_uses_the_shards():
    check(lambda x: x.softmax(-1) + x.tanh().argmax(-1, True) + x.sum(), num_gathers=2)
    gradients = [gathers for *_, gathers in on_ranks(with_a_metric)]
    assert gradients == [1, 1]


def test_what_is_known_of_it_is_known_without_a_gather():
    def run():
        group = Counted(current_world().split([[0, 1]]))
        lazy = deferred_logits(local_part(FULL, group, 4).requires_grad_(), group)
        assert (lazy.shape, lazy.size(-1), lazy.dim(), lazy.ndim, len(lazy)) == (FULL.shape, V, 3, 3, B)
        assert (lazy.dtype, lazy.device, lazy.numel()) == (FULL.dtype, FULL.device, FULL.numel())
        assert lazy.requires_grad
        assert not lazy.detach().requires_grad
        assert lazy.is_floating_point()
        assert lazy.float() is lazy.contiguous() is lazy
        assert repr(lazy) == "DeferredLogitsTensor(shape=(2, 3, 7), dtype=torch.float32, 2 parts)"
        assert not isinstance(gathered({"logits": [lazy.detach()]})["logits"][0], DeferredGatherTensor)
        return group.num_gathers

    assert Loopback(2).run(run) == [1, 1]
