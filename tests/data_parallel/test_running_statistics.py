"""Running statistics of replicas, against one process that sees all batches in their order."""

import pytest
import torch
from support import assert_near, on_ranks
from torch import nn

from hybridpp.data_parallel import RunningStatistics


def make(momentum=0.1, **options):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(3, momentum=momentum, **options), nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=0.3)
    )


def batches(replica, step, count):
    generator = torch.Generator().manual_seed(100 * replica + step)
    return [torch.randn(4, 3, generator=generator) + replica for _ in range(count)]


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (0, 2), (2, 1, 2)])
def test_replicas_have_those_of_one_process(momentum, counts):
    def run(group):
        model = make(momentum)
        statistics = RunningStatistics(model, group)
        for step in range(2):
            statistics.begin()
            for batch in batches(group.rank, step, counts[group.rank]):
                model(batch)
            statistics.finish()
        return buffers(model)

    model = make(momentum)
    for step in range(2):
        for replica, count in enumerate(counts):
            for batch in batches(replica, step, count):
                model(batch)
    for replica in on_ranks(len(counts), run):
        assert_near(replica, buffers(model))


def test_without_a_beginning_they_are_averaged():
    def run(group):
        model = make()
        statistics = RunningStatistics(model, group)
        model(batches(group.rank, 0, 1)[0])
        alone = buffers(model)
        statistics.average()
        return alone, buffers(model)

    (first, averaged), (second, same) = on_ranks(2, run)
    assert_near(averaged, same, 0)
    assert_near(averaged, {name: ((first[name] + second[name]) / 2).to(first[name]) for name in first})


class Silent:
    """Ranks that must not communicate."""

    size, rank = 2, 0


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 3),
        make().eval(),
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.SyncBatchNorm(3),
        nn.LayerNorm(3),
    ],
)
def test_where_none_move_nothing_is_said(model):
    statistics = RunningStatistics(model, Silent())
    statistics.begin()
    statistics.finish()
    statistics.average()


def test_double_precision_stays():
    def run(group):
        model = make().double()
        statistics = RunningStatistics(model, group)
        statistics.begin()
        model(torch.full((4, 3), 1 / 3, dtype=torch.float64))
        statistics.finish()
        return buffers(model)["0.running_mean"]

    for mean in on_ranks(2, run):
        assert torch.allclose(mean, torch.full((3,), (1 - 0.81) / 3, dtype=torch.float64), atol=1e-15, rtol=0)
