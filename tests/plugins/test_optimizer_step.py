import pytest
import torch
from hybridpp_plugins.optimizer_step import AccumulatedGradients
from support import on_ranks
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
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


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_norm": 0.01},
        {"precision": "bf16"},
        {"precision": "fp16", "initial_scale": 8.0},
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3},
    ],
    ids=str,
)
def test_the_norm_of_a_step_is_there_until_the_next_backward_pass(settings):
    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]

    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3))
        booster = Booster(plugin=HybridParallelPlugin(ddp_bucket_cap_mb=0.001, **settings))
        parts = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), sample=batches[0])
        parts.optimizer.zero_grad()
        found = [(0.0, parts.optimizer.get_grad_norm())]
        for batch in batches:
            booster.execute_pipeline(iter([batch]), parts.model, lambda y, _: y.square().mean(), parts.optimizer)
            before = parts.optimizer.get_grad_norm()
            parts.optimizer.step()
            parts.optimizer.zero_grad()
            found.append((before, parts.optimizer.get_grad_norm()))
            parts.optimizer.zero_grad()
            found.append((before, parts.optimizer.get_grad_norm()))
        return found

    for of_rank in Loopback(2).run(run):
        assert all(after == pytest.approx(before, rel=1e-6) for before, after in of_rank)
        assert of_rank[1][0] > 0.1
        assert of_rank[1] != of_rank[-1]


def test_a_norm_that_no_step_needed_is_kept_without_asking_before():
    def run(zeros):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        booster = Booster(plugin=HybridParallelPlugin())
        parts = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), sample=torch.randn(2, 6))
        data = iter([torch.ones(2, 6)])
        booster.execute_pipeline(data, parts.model, lambda y, _: y.sum(), parts.optimizer, num_microbatches=1)
        gradients = [gradient for _, gradient in parts.optimizer.gradients()]
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=not zeros)
        return parts.optimizer.get_grad_norm(), torch.nn.utils.get_total_norm(gradients).item()

    ((norm, expected),) = Loopback(1).run(lambda: run(False))
    assert norm == pytest.approx(expected)
    message = "the gradient norm of the last step is not known: the step did not need it, and its gradients are"
    with pytest.raises(ConfigError, match=message):
        Loopback(1).run(lambda: run(True))
