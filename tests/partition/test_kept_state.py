"""What a forward keeps for its next call is found where that changes results, and nowhere else."""

import pytest
import torch
from torch import nn

from hybridpp.partition import KeptState


class Net(nn.Module):
    """A model with one kind of state, by the function that makes its hidden values."""

    def __init__(self, use):
        super().__init__()
        self.a, self.r = nn.Linear(6, 5), nn.GRUCell(5, 5)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("queue", torch.zeros(5, 12))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.rows = nn.Embedding(7, 5, max_norm=0.5).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(5))
        self.h, self.state, self.table, self.stored, self.step, self.length = None, [], None, None, 0, 0
        self.use = use

    def forward(self, x):
        return self.use(self, self.a(x)) * self.scale


def hidden(net, x):
    net.h = net.r(x, net.h).detach()
    return net.h + x


def hidden_in_a_tuple(net, x):
    h = net.r(x, net.state[0][0].clone() if net.state else None)
    net.state[:] = [(h.detach(), None)]
    return h


def running_mean(net, x):
    net.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x


def mean_through_data(net, x):
    net.mean.data = net.mean.data * 0.9 + x.detach().mean(0)
    return x - net.mean


def sum_of_means(net, x):
    net.mean += x.detach().mean(0)
    return x


def frozen_average(net, x):
    with torch.no_grad():
        net.frozen.data.lerp_(x.mean(0), 0.1)
    return x + net.frozen


def average_of_weights(net, x):
    net.frozen.data = net.frozen.data * 0.9 + net.scale.data * 0.1
    return x + net.frozen


def queue(net, x):
    start = int(net.count)
    net.queue[:, start : start + 2] = x.detach()[:2].T
    net.count[...] = (start + 2) % 12
    return x + (x @ net.queue).mean()


def counter_in_use(net, x):
    net.step += 1
    return x * min(1.0, net.step / 100)


def total_in_use(net, x):
    net.count = net.count + len(x)
    return x / net.count


STATE = {
    hidden: {"h"},
    hidden_in_a_tuple: {"state"},
    running_mean: {"mean"},
    mean_through_data: {"mean"},
    sum_of_means: {"mean"},
    frozen_average: {"frozen"},
    average_of_weights: {"frozen"},
    queue: {"queue", "count"},
    counter_in_use: {"step"},
    total_in_use: {"count"},
}


def stored_for_a_log(net, x):
    net.stored, net.state = x, [x.detach(), (x.detach(),)]
    return x


def set_before_it_is_read(net, x):
    net.mean.copy_(x.detach().mean(0))
    net.h = x.detach() * 2
    net.length = float(x.detach().sum())
    return x * net.mean + net.h * net.length


def made_once(net, x):
    if net.table is None or net.length < len(x):
        net.table, net.length = torch.arange(5.0).cos(), len(x)
        net.mean.fill_(3.0)
    return x * net.table + net.mean


def made_equal_again(net, x):
    old = 0 if net.table is None else net.table.sum()
    net.table = torch.arange(5.0).cos()
    return x * net.table + 0 * old


def shape_of_the_last(net, x):
    if net.h is None or net.h.shape != x.shape or net.h.dtype != x.dtype:
        net.length = len(x)
    net.h = torch.zeros_like(x if net.h is None else net.h) + x.detach()
    return x


def counted(net, x):
    net.step += 1
    net.count += len(x)
    net.stored = (0 if net.stored is None else net.stored) + x.detach().mean()
    return x


def normalised_weights(net, x):
    with torch.no_grad():
        net.scale.div_(net.scale.norm())
        net.frozen.clamp_(max=1.0)
    return x * net.frozen


def frozen_rows_of_a_norm(net, x):
    return x + net.rows(torch.arange(len(x)))


SILENT = [
    *(stored_for_a_log, set_before_it_is_read, made_once, made_equal_again, shape_of_the_last, counted),
    normalised_weights,
    frozen_rows_of_a_norm,
]


def found(use, num_calls=2, size=4):
    net = Net(use)
    state = KeptState(net)
    for number in range(num_calls):
        x = torch.randn(size, 6, generator=torch.Generator().manual_seed(number))
        with state.watching(0, {size}, x):
            net(x)
    return state.found


@pytest.mark.parametrize("use", STATE, ids=lambda use: use.__name__)
def test_state_that_the_next_call_reads_is_found(use):
    assert {one.name for one in found(use)} == STATE[use]


@pytest.mark.parametrize("use", SILENT, ids=lambda use: use.__name__)
def test_what_the_next_call_does_not_depend_on_is_no_state(use):
    assert found(use) == []


def test_state_with_an_entry_for_each_sample_is_told_apart():
    assert [one.shape for one in found(hidden)] == [(4, 5)]
    assert [one.shape for one in found(hidden_in_a_tuple)] == [(4, 5)]
    # As long as a layer is wide: it cannot be told.
    assert [one.shape for one in found(hidden, size=5)] == [()]
    assert [one.shape for use in (running_mean, queue) for one in found(use)] == [(), (), ()]


def test_a_weight_that_the_first_call_alone_sets_is_found():
    def first_samples(net, x):
        if not net.step:
            net.scale.data.copy_(1 / x.detach().std(0))
            net.step = 1
        return x

    assert [(one.name, one.is_set_once) for one in found(first_samples)] == [("scale", True)]


def test_the_third_call_is_not_watched():
    assert len(found(counter_in_use, num_calls=4)) == 1
    assert "step" not in vars(Net)
