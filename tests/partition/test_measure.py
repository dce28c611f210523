import re

import pytest
import torch
from networks import squares
from support import train
from torch import nn

from hybridpp.errors import PartitionError
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.partition import find_units
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.measure import measure_seconds

CPU = torch.device("cpu")


class Idle(nn.Module):
    """Takes a while, and remembers that it ran."""

    def __init__(self, rounds):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))
        self.norm = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.5)
        self.rounds = rounds
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for _ in range(self.rounds):
            x = x @ self.weight
        return self.dropout(self.norm(x))


def model(*rounds):
    torch.manual_seed(0)
    return nn.Sequential(*map(Idle, rounds))


ROWS = torch.ones(6, 64)


def measured(network):
    interceptor = Interceptor(ModuleAdapter(network), AdapterLayer.STAGE, find_units(network, 2).units)
    return measure_seconds(network, interceptor, ((ROWS,), {}), CPU, {})


def test_the_cut_follows_the_time_that_blocks_take():
    def make_model():
        return model(1000, 1, 1, 1)

    result = train(make_model, [ROWS], pp_size=2, num_microbatches=2, criterion=squares, balance="time")
    assert {name.partition(".")[0] for name in result["names"][0]} == {"0"}
    whole = train(make_model, [ROWS], num_microbatches=2, criterion=squares)
    assert result["losses"][0] == whole["losses"][0]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_time_is_measured_in_the_format_that_the_model_computes_in(precision):
    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    batch = [torch.ones(4, 8)]
    result = train(
        make_model, batch, pp_size=2, num_microbatches=2, criterion=squares, balance="time", precision=precision
    )
    assert set().union(*result["names"]) == {f"{block}.{part}" for block in range(4) for part in ("weight", "bias")}


def test_measuring_leaves_model_and_generators_as_they_were():
    network = model(1, 2)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state = torch.get_rng_state()
    seconds = measured(network)
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert [block.calls for block in network] == [0, 0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_model_without_numbers_cannot_be_timed():
    with torch.device("meta"):
        network = model(1, 1)
    text = "a model on the meta device cannot be timed. Use balance='flops' or 'parameters'."
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}$"):
        measured(network)
