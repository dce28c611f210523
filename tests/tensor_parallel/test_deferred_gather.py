"""Divided activations that look whole: whatever is done to one gives what it gives for the whole."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from hybridpp.cluster import Loopback, current_world
from hybridpp.tensor_parallel import DeferredGatherTensor, gathered
from hybridpp.tensor_parallel.collectives import local_part
from hybridpp.tensor_parallel.deferred_gather import deferred_gather

B, S, V, RANKS = 2, 3, 7, 2
FULL = torch.randn(B, S, V, generator=torch.Generator().manual_seed(0))
TARGET = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(1))


class Counted:
    """A group that counts its gathers along a dimension, which are those of whole activations."""

    def __init__(self, group):
        self._group, self.num_gathers = group, 0

    def __getattr__(self, name):
        return getattr(self._group, name)

    def all_gather_along(self, tensor, dim):
        self.num_gathers += 1
        return self._group.all_gather_along(tensor, dim)


def on_ranks(use, whole=FULL):
    """``use(lazy)`` on every rank, of something that depends on a leaf: results, the leaf's gradient, gathers."""

    def run():
        group = Counted(current_world().split([list(range(RANKS))]))
        leaf = whole.clone().requires_grad_()
        lazy = deferred_gather(local_part(leaf, group, -(-V // RANKS)), group, leaf.dim() - 1, V)
        result = use(lazy)
        if result.requires_grad:
            (result * weights_like(result)).sum().backward()
        # Each rank's leaf has the gradient of its own columns only.
        gradient = torch.zeros_like(whole) if leaf.grad is None else leaf.grad
        group.all_reduce(gradient).wait()
        return type(result), gathered(result).detach(), gradient, group.num_gathers

    return Loopback(RANKS).run(run)


def weights_like(result):
    return torch.arange(1.0, result.numel() + 1).view(result.shape)


def check(use, num_gathers=None, kind=None):
    leaf = FULL.clone().requires_grad_()
    expected = use(leaf * 1.0)
    if expected.requires_grad:
        (expected * weights_like(expected)).sum().backward()
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    for result_type, result, found, gathers in on_ranks(use):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(result, expected.detach(), atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(found, gradient, atol=1e-5, rtol=1e-5)
        assert kind in (None, result_type)
        assert num_gathers in (None, gathers)


MASK = TARGET > 2
BIAS = torch.arange(float(V))
LOSSES = {
    "Hugging Face's": lambda x: functional.cross_entropy(x.float().view(-1, V), TARGET.view(-1), reduction="sum"),
    "shifted": lambda x: functional.cross_entropy(x[..., :-1, :].contiguous().view(-1, V), TARGET[:, 1:].reshape(-1)),
    "module": lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(x.reshape((-1, V)), TARGET.flatten()),
    "classes second": lambda x: functional.cross_entropy(x.transpose(1, 2), TARGET),
    "permuted": lambda x: functional.cross_entropy(x.permute(0, 2, 1), TARGET, reduction="none"),
    "flattened": lambda x: functional.cross_entropy(x.flatten(0, 1), TARGET.flatten(), ignore_index=3),
    "the last position": lambda x: functional.cross_entropy(x[:, -1], TARGET[:, -1]),
    "masked positions": lambda x: functional.cross_entropy(x[MASK], TARGET[MASK]),
    "chosen positions": lambda x: functional.cross_entropy(x[[0, 1], torch.tensor([2, 0])], TARGET[:, 0]),
    "scaled and capped": lambda x: functional.cross_entropy((x / 5).tanh().mul(5.0).view(B * S, -1), TARGET.view(-1)),
    "a bias and a mask": lambda x: functional.cross_entropy((x + BIAS - BIAS[None] / 2).view(-1, V), TARGET.view(-1)),
    "weighted": lambda x: functional.cross_entropy((x * BIAS * torch.ones(S, 1) + 1).view(-1, V), TARGET.view(-1)),
    "there and back": lambda x: functional.cross_entropy(
        x.transpose(0, 1).transpose(1, 0).view(-1, V), TARGET.view(-1)
    ),
    "half": lambda x: functional.cross_entropy(x.to(torch.bfloat16).float().view(-1, V), TARGET.view(-1)),
    "one sample": lambda x: functional.cross_entropy(x[0], TARGET[0]) + functional.cross_entropy(x[1:][0], TARGET[1]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_computed_from_the_parts(name):
    # A list of indices means what torch says it means, on the whole.
    check(LOSSES[name], num_gathers=1 if name == "chosen positions" else 0)


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
        lazy = deferred_gather(local_part(FULL, group, 4).requires_grad_(), group, 2, V)
        assert (lazy.shape, lazy.size(-1), lazy.dim(), lazy.ndim, len(lazy)) == (FULL.shape, V, 3, 3, B)
        assert (lazy.dtype, lazy.device, lazy.numel()) == (FULL.dtype, FULL.device, FULL.numel())
        assert lazy.requires_grad
        assert not lazy.detach().requires_grad
        assert lazy.is_floating_point()
        assert lazy.float() is lazy.contiguous() is lazy
        assert repr(lazy) == "DeferredGatherTensor(shape=(2, 3, 7), dtype=torch.float32, 2 parts)"
        assert not isinstance(gathered({"logits": [lazy.detach()]})["logits"][0], DeferredGatherTensor)
        return group.num_gathers

    assert Loopback(2).run(run) == [1, 1]


def test_a_hook_on_the_whole_sees_the_gradient_of_a_loss():
    def run():
        group = current_world().split([[0, 1]])
        lazy = deferred_gather(local_part(FULL, group, 4).requires_grad_(), group, 2, V)
        seen = []
        lazy.register_hook(seen.append)
        functional.cross_entropy(lazy.view(-1, V), TARGET.view(-1)).backward()
        return seen[0]

    whole = FULL.clone().requires_grad_()
    functional.cross_entropy(whole.view(-1, V), TARGET.view(-1)).backward()
    for gradient in Loopback(2).run(run):
        torch.testing.assert_close(gradient, whole.grad)


def test_what_is_added_or_multiplied_gets_its_whole_gradient():
    def loss(x, bias, scale):
        return functional.cross_entropy((x + bias).mul(scale).view(-1, V), TARGET.view(-1))

    def leaves():
        return nn.Parameter(BIAS.clone()), nn.Parameter(torch.tensor(0.3))

    def run():
        group = Counted(current_world().split([[0, 1]]))
        bias, scale = leaves()
        loss(deferred_gather(local_part(FULL, group, 4), group, 2, V), bias, scale).backward()
        # One: the bias's gradient.
        assert group.num_gathers == 1
        return bias.grad, scale.grad

    bias, scale = leaves()
    loss(FULL, bias, scale).backward()
    for gradients in Loopback(2).run(run):
        torch.testing.assert_close(gradients, (bias.grad, scale.grad))


def test_without_gradients():
    loss = functional.cross_entropy(FULL.view(-1, V), TARGET.view(-1))

    def run(mode):
        with mode():
            group = Counted(current_world().split([[0, 1]]))
            lazy = deferred_gather(local_part(FULL, group, 4), group, 2, V)
            found = functional.cross_entropy(lazy.view(-1, V), TARGET.view(-1))
            assert not found.requires_grad
            assert group.num_gathers == 0
            assert torch.equal(lazy.argmax(-1), FULL.argmax(-1))
            return found

    for mode in (torch.no_grad, torch.inference_mode):
        for found in Loopback(2).run(functools.partial(run, mode)):
            torch.testing.assert_close(found, loss)
