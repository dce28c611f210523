"""Equal units on arguments of one kind are traced once, and only those."""

import pytest
import torch
from torch import nn

from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.partition import Tracer, find_units
from hybridpp.partition.blocks import finest_units
from hybridpp.partition.intercept import Interceptor


class Counted(nn.Module):
    """Counts how often its forward really ran."""

    num_runs = 0

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        Counted.num_runs += 1
        return self.block(x)


def shapes(blocks, sample):
    Counted.num_runs = 0
    model = nn.Sequential(*map(Counted, blocks))
    finest, units = (
        Interceptor(ModuleAdapter(model), AdapterLayer.UNIT_RNG, finest_units(model)),
        Interceptor(ModuleAdapter(model), AdapterLayer.STAGE, find_units(model, 2).units),
    )
    found = Tracer(model, units, finest, torch.device("cpu")).trace((sample,), {})
    return [call.leaves[0].shape for call in found.calls], Counted.num_runs


def test_equal_blocks_are_run_once():
    # Twice: the first gets the real input, the others fakes.
    assert shapes([nn.Linear(4, 4) for _ in range(5)], torch.ones(2, 4)) == ([(2, 4)] * 5, 2)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ([{"stride": 1}, {"stride": 2}], [8, 4]),
        ([{"padding": 1, "dilation": 1}, {"padding": 0, "dilation": 3}], [8, 2]),
        ([{}, {"padding_mode": "circular"}], [8, 8]),
    ],
)
def test_blocks_that_differ_in_a_setting_are_run_each(settings, sizes):
    blocks = [nn.Conv2d(3, 3, 3, **{"padding": 1, **setting}) for setting in settings]
    expected = ([(2, 3, size, size) for size in sizes], 2)
    assert shapes(blocks, torch.ones(2, 3, 8, 8)) == expected


def test_what_is_made_from_memory_may_be_written_to_and_differentiated():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                x *= 2
            return x

    model = Writes()
    finest, units = (
        Interceptor(ModuleAdapter(model), AdapterLayer.UNIT_RNG, finest_units(model)),
        Interceptor(ModuleAdapter(model), AdapterLayer.STAGE, find_units(model, 2).units),
    )
    found = Tracer(model, units, finest, torch.device("cpu")).trace((torch.ones(2, 4),), {})
    assert [call.leaves[0].requires_grad for call in found.calls] == [True] * 3
    assert [call.written for call in found.calls] == [{0}] * 3
