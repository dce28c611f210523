import pytest
from hybridpp_plugins.optimizer_step import AccumulatedGradients
from support import on_ranks
from torch import nn

from hybridpp.data_parallel import GradientBuckets, layout_of
from hybridpp.errors import ConfigError
from hybridpp.optim import GlobalGradNorm


def on_one_rank(run):
    """``run(accumulated, buckets, weight)`` for one weight of [3, 4], whose gradient is that times a loss's factor."""

    def rank(group):
        weight = nn.Linear(2, 1, bias=False).weight
        weight.data = weight.new_tensor([[3.0, 4.0]])
        buckets = GradientBuckets({"weight": weight}, group, layout_of({"weight": weight}, group, 25.0))
        norm = GlobalGradNorm(group, (0,), num_replicas=1, counted=("weight",), copied=(), unique={})
        return run(AccumulatedGradients(buckets, norm), buckets, weight)

    return on_ranks(1, rank)[0]


def one_pass(accumulated, weight, factor, manual=False, loss_scale=8.0):
    accumulated.begin(loss_scale, manual)
    (weight.square().sum() * 0.5 * factor * loss_scale).backward()
    accumulated.end()


def test_passes_count_until_the_gradients_are_consumed():
    def run(accumulated, buckets, weight):
        one_pass(accumulated, weight, 1.0)
        one_pass(accumulated, weight, 1.0, manual=True)
        first = accumulated.round
        assert (accumulated.num_passes, accumulated.num_manual_passes) == (2, 1)
        assert accumulated.norm() == 10.0
        buckets.consume()
        one_pass(accumulated, weight, 1.0)
        assert (accumulated.num_passes, accumulated.num_manual_passes) == (1, 0)
        assert accumulated.round > first
        assert accumulated.norm() == 5.0

    on_one_rank(run)


def test_the_norm_is_without_the_scale_and_follows_what_is_done():
    def run(accumulated, buckets, weight):
        one_pass(accumulated, weight, 1.0)
        assert accumulated.cached_norm is None
        assert accumulated.norm() == accumulated.cached_norm == 5.0
        accumulated.unscale()
        assert (accumulated.norm(), accumulated.scale) == (5.0, 1.0)
        weight.grad.mul_(2)  # by the script
        assert accumulated.norm() == 10.0
        assert accumulated.clip_by_norm(1.0) == 10.0
        assert accumulated.norm() == pytest.approx(1.0, abs=1e-6)

    on_one_rank(run)


def test_clearing_starts_a_round_with_nothing_in_it():
    def run(accumulated, buckets, weight):
        one_pass(accumulated, weight, 1.0)
        first = accumulated.round
        accumulated.clear(set_to_none=True)
        assert accumulated.round > first
        assert (accumulated.num_passes, accumulated.cached_norm, weight.grad) == (0, None, None)

    on_one_rank(run)


def test_sums_over_replicas_are_refused_inside_no_sync():
    def run(accumulated, buckets, weight):
        with buckets.no_sync():
            one_pass(accumulated, weight, 1.0)
            with pytest.raises(ConfigError, match="get_grad_norm inside no_sync"):
                accumulated.finalize_for("get_grad_norm")

    on_one_rank(run)
