import pytest
import torch
from data_parallel.replicas import TINY_MIB, accumulate, make_buckets, make_model, plain

from hybridpp.cluster import Loopback, current_world
from hybridpp.data_parallel import GradientSharding
from hybridpp.data_parallel.replicas import HybridReplicas

# Of which sums depend on the order: (0 + 1) + (2 + 3) is 0, and 0 + 1 + 2 + 3 is 1.
VALUES = [1e8, 1.0, -1e8, 1.0]


class Recorded:
    """A group that writes down what begins in it."""

    def __init__(self, group, name, events):
        self._group, self._name, self._events = group, name, events
        self.rank, self.size = group.rank, group.size

    def __getattr__(self, kind):
        def begin(tensor):
            self._events.append((self._name, kind, tensor.numel()))
            return getattr(self._group, kind)(tensor)

        return begin


def in_twos(events=None):
    """Four replicas in two sets of two."""
    world, events = current_world(), [] if events is None else events
    everyone = world.split([[0, 1, 2, 3]], "dp")
    shards, copies = world.split([[0, 1], [2, 3]], "shards"), world.split([[0, 2], [1, 3]], "copies")
    groups = {"everyone": everyone, "shards": shards, "copies": copies}
    return HybridReplicas(**{name: Recorded(group, name, events) for name, group in groups.items()})


def test_a_sum_goes_over_each_set_and_then_over_the_sets():
    def run():
        rank = current_world().rank
        replicas, flat = in_twos(), torch.full((4,), VALUES[rank])
        replicas.reduce_scatter_segments(flat).wait()
        own = flat[2 * (rank % 2) :][:2].clone()
        replicas.all_gather_segments(flat).wait()
        return own.tolist(), flat.tolist()

    assert Loopback(4).run(run) == [([0.0, 0.0], [0.0] * 4)] * 4


def test_only_segments_are_sent_between_sets_and_while_the_next_sum_runs():
    def run():
        events = []
        replicas = in_twos(events)
        works = []
        for size in (4, 6, 8):
            works.append(replicas.reduce_scatter_segments(torch.ones(size)))
            replicas.go_on(num_left=1)
        events.append("begun")
        for work in reversed(works):
            work.wait()
        replicas.all_reduce(torch.ones(5)).wait()
        return events

    first = [("shards", "reduce_scatter_segments", size) for size in (4, 6, 8)]
    second = [("copies", "all_reduce", size) for size in (2, 3, 4)]
    expected = [first[0], first[1], second[0], first[2], second[1], "begun", second[2], ("everyone", "all_reduce", 5)]
    assert Loopback(4).run(run) == [expected] * 4


@pytest.mark.parametrize("are_in_step", [True, False])
def test_sums_between_sets_run_in_the_last_backward_of_replicas_in_step(are_in_step):
    def run():
        events, model = [], make_model()
        buckets = make_buckets(model, in_twos(events), TINY_MIB, sharding=GradientSharding.SCATTERED)
        buckets.are_in_step = are_in_step
        accumulate(buckets, model, [0, 1])
        for name, gradient in buckets.whole_gradients().items():
            torch.testing.assert_close(gradient, plain(4, [0, 1])[name], rtol=1e-5, atol=1e-5)
        return [name for name, kind, _ in events if kind != "all_gather_segments"]

    in_set, between, flags = ["shards"], ["copies"], ["everyone"]
    expected = [*in_set * 4, *flags, *between * 4]
    if are_in_step:
        expected = [*in_set, *(in_set + between) * 3, *flags, *between]
    assert Loopback(4).run(run) == [expected] * 4
