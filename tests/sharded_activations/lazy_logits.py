"""Logits on ranks that each hold some classes, for tests."""

import torch

from hybridpp.cluster import Loopback, current_world
from hybridpp.sharded_activations import gathered
from hybridpp.sharded_activations.collectives import local_part
from hybridpp.sharded_activations.deferred_gather import deferred_gather
from hybridpp.sharded_activations.deferred_logits_gather import DeferredLogitsTensor

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


def deferred_logits(shard, group):
    """The logits of the ranks' shards, which have ``V`` classes together."""
    return deferred_gather(shard, group, shard.dim() - 1, V, kind=DeferredLogitsTensor)


def on_ranks(use, whole=FULL):
    """``use(lazy)`` on every rank, of something that depends on a leaf: results, the leaf's gradient, gathers."""

    def run():
        group = Counted(current_world().split([list(range(RANKS))]))
        leaf = whole.clone().requires_grad_()
        lazy = deferred_logits(local_part(leaf, group, -(-V // RANKS)), group)
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
