"""Losses of logits that are sharded by vocabulary are those of the full logits, and gather nothing."""

import functools

import pytest
import torch
from sharded_activations.lazy_logits import FULL, TARGET, B, Counted, S, V, check, deferred_logits
from torch import nn
from torch.nn import functional

from hybridpp.cluster import Loopback, current_world
from hybridpp.nn.deferred_tensor import deferred
from hybridpp.sharded_activations.collectives import local_part


def read_later(tensor):
    """As an entry of a batch that nothing has read yet."""
    return deferred(tensor, lambda: tensor, dtype=tensor.dtype, device=tensor.device)


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
    "read for the first time": lambda x: functional.cross_entropy(
        x[:, :-1].reshape(-1, V), target=read_later(TARGET[:, 1:].reshape(-1))
    ),
    "positions read for the first time": lambda x: functional.cross_entropy(
        x[read_later(MASK)], read_later(TARGET[MASK])
    ),
    "one sample": lambda x: functional.cross_entropy(x[0], TARGET[0]) + functional.cross_entropy(x[1:][0], TARGET[1]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_computed_from_the_parts(name):
    # A list of indices means what torch says it means, on the whole.
    check(LOSSES[name], num_gathers=1 if name == "chosen positions" else 0)


def test_a_hook_on_the_whole_sees_the_gradient_of_a_loss():
    def run():
        group = current_world().split([[0, 1]])
        lazy = deferred_logits(local_part(FULL, group, 4).requires_grad_(), group)
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
        loss(deferred_logits(local_part(FULL, group, 4), group), bias, scale).backward()
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
            lazy = deferred_logits(local_part(FULL, group, 4), group)
            found = functional.cross_entropy(lazy.view(-1, V), TARGET.view(-1))
            assert not found.requires_grad
            assert group.num_gathers == 0
            assert torch.equal(lazy.argmax(-1), FULL.argmax(-1))
            return found

    for mode in (torch.no_grad, torch.inference_mode):
        for found in Loopback(2).run(functools.partial(run, mode)):
            torch.testing.assert_close(found, loss)
