"""Buckets that are reduced after every backward pass: the sums, and what has memory when."""

import pytest
import torch
from data_parallel.replicas import NUM_REPLICAS, TINY_MIB, data, make_buckets, make_model, on_replicas, plain
from torch import nn

from hybridpp.cluster import current_world
from hybridpp.data_parallel import GradientSharding
from hybridpp.errors import ConfigError

BY_PASS = {"sharding": GradientSharding.MICROBATCH}


def run_pass(buckets, model, number):
    buckets.begin_last_backward()
    model(data(current_world().rank, number, next(model.parameters()).dtype)).float().square().sum().backward()
    buckets.end_backward()
    buckets.launch_remaining()


def open_bytes(buckets):
    return sum(bucket.flat.untyped_storage().nbytes() for bucket in buckets._accumulator.buckets)


def assert_sums(buckets, numbers):
    """The gathered sums are those of one process."""
    expected = plain(NUM_REPLICAS, numbers)
    for name, gradient in buckets.whole_gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capacity", [TINY_MIB, 25.0])
def test_sums_over_passes_and_calls_are_those_of_one_process(capacity):
    def run():
        model = make_model()
        buckets = make_buckets(model, capacity_mib=capacity, **BY_PASS)
        for first in (0, 3):
            for numbers in ([first, first + 1], [first + 2]):
                buckets.begin()
                for number in numbers:
                    run_pass(buckets, model, number)
                buckets.finish_grad_sync()
            assert_sums(buckets, range(first, first + 3))
            assert open_bytes(buckets) == 0
            buckets.consume()

    on_replicas(run)


def test_no_sync_goes_on_reducing():
    def run():
        model = make_model()
        buckets = make_buckets(model, **BY_PASS)
        with buckets.no_sync():
            buckets.begin()
            run_pass(buckets, model, 0)
            buckets.finish_grad_sync()
            assert open_bytes(buckets) == 0
            with pytest.raises(ConfigError, match="not complete inside no_sync"):
                buckets.whole_gradients()
        buckets.begin()
        run_pass(buckets, model, 1)
        buckets.finish_grad_sync()
        assert_sums(buckets, [0, 1])

    on_replicas(run)


def test_two_buckets_are_reduced_while_a_third_one_fills():
    def run():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(9)))
        buckets = make_buckets(model, capacity_mib=TINY_MIB, **BY_PASS)
        sizes = []
        for parameter in model.parameters():
            # Called after the bucket, which holds this parameter alone, has been launched.
            parameter.register_post_accumulate_grad_hook(lambda _: sizes.append(open_bytes(buckets)))
        buckets.begin()
        for _ in range(2):
            buckets.begin_last_backward()
            model(torch.ones(2, 64)).sum().backward()
            buckets.launch_remaining()
        buckets.finish_grad_sync()
        return sizes, buckets._accumulator.buckets[0].layout.size * 4

    sizes, bucket = on_replicas(run)[0]
    assert len(sizes) == 18
    assert max(sizes) == 2 * bucket


def test_a_pass_that_adds_twice_is_refused_by_name():
    """What reentrant checkpointing does to a module that is called twice."""

    def run():
        model = make_model()
        buckets = make_buckets(model, capacity_mib=TINY_MIB, **BY_PASS)
        buckets.begin()
        buckets.begin_last_backward()
        model(data(0, 0)).sum().backward()
        with pytest.raises(ConfigError, match=r"again after its reduction had started"):
            model(data(0, 0)).sum().backward()
        buckets.abort()

    on_replicas(run)


def test_other_gradients_can_be_summed_in_between():
    """As the search for an inf does, which keeps what is reduced so far."""

    def run():
        model = make_model()
        buckets = make_buckets(model, **BY_PASS)
        buckets.begin()
        run_pass(buckets, model, 0)
        buckets.finish_grad_sync()
        with buckets.stash():
            buckets.begin()
            run_pass(buckets, model, 5)
            held = {name: gradient.clone() for name, gradient in buckets.gradients.items()}
        alone = make_model()
        alone(data(current_world().rank, 5)).float().square().sum().backward()
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(held[name], parameter.grad)
        assert_sums(buckets, [0])
        assert open_bytes(buckets) == 0

    on_replicas(run)


def test_a_failed_pass_leaves_nothing():
    def run():
        model = make_model()
        buckets = make_buckets(model, **BY_PASS)
        buckets.begin()
        run_pass(buckets, model, 0)
        buckets.abort()
        buckets.begin()
        run_pass(buckets, model, 1)
        buckets.finish_grad_sync()
        assert_sums(buckets, [1])

    on_replicas(run)
