"""Where the user requests no cut, stages share the work evenly, and too few blocks are refused."""

import re

import pytest
import torch
from container_code_models import Again, Blocks
from networks import IMAGES, ROWS, Chain, cut, refused
from partition.tracing import trace
from support import image_batch, tiny_vit
from torch import nn

from hybridpp.config import PartitionConfig
from hybridpp.errors import PartitionError
from hybridpp.partition import CutPoint, find_units
from hybridpp.partition.cut import CutCriteria, choose_cut
from hybridpp.partition.measure import unit_costs


class Uneven(nn.Module):
    """Convolutions have few weights and much to do; what is even depends on what is counted."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)])
        self.linears = nn.ModuleList([nn.Linear(3, 40), nn.Linear(40, 3)])

    def forward(self, x):
        for conv in self.convs:
            x = conv(x)
        x = x.mean((2, 3))
        for linear in self.linears:
            x = linear(x)
        return x


@pytest.mark.parametrize(
    ("balance", "first"),
    [("flops", "convs.0 convs.1"), ("parameters", "convs.0 convs.1 convs.2 convs.3")],
)
def test_balance_says_what_is_shared_out_evenly(balance, first):
    assert cut(Uneven, IMAGES, 2, balance=balance)[0] == first


def test_more_stages_than_blocks():
    text = (
        "a pipeline stage needs at least one block: Chain runs 6 (layer0.0, layer0.1, layer1.0, layer1.1, layer2.0, "
        "layer2.1), for 7 stages (pp_size x num_model_chunks). Use 6 or fewer."
    )
    refused(PartitionError, text, Chain, ROWS, 7)


def test_the_cut_balances_what_the_forward_costs():
    model = tiny_vit(num_layers=6)
    calls = trace(model, count_flops=True, **image_batch(2))
    blocks = find_units(model, 2).blocks
    costs = unit_costs(model, calls, "flops", list)
    config = PartitionConfig()
    found = choose_cut(model, calls, blocks, 3, config, CutCriteria(costs))
    assert found == (CutPoint("vit.layers.1", 0), CutPoint("vit.layers.3", 0))
    assert choose_cut(model, calls, blocks, 1, config, CutCriteria(costs)) == ()


@pytest.mark.parametrize(
    ("model", "found", "num_stages", "advice"),
    [
        (Blocks(), "Blocks runs 4 (blocks.0, blocks.1, blocks.2, blocks.3)", 5, 4),
        (Again(), "Again runs 4 (blocks.0, blocks.0, blocks.0, blocks.0)", 5, 4),
    ],
)
def test_fewer_calls_of_blocks_than_stages(model, found, num_stages, advice):
    text = (
        f"a pipeline stage needs at least one block: {found}, for {num_stages} stages (pp_size x num_model_chunks). "
        f"Use {advice} or fewer."
    )
    calls = trace(model, torch.ones(2, 4))
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}$"):
        choose_cut(
            model, calls, find_units(model, 2).blocks, num_stages, PartitionConfig(), CutCriteria(lambda call: 1.0)
        )


class NeverCalled(Blocks):
    """Uses the weights of its blocks, and calls none."""

    def forward(self, x):
        for block in self.blocks:
            x = x @ block.weight
        return self.head(x)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (torch.nn.Linear(4, 4), "Linear has 0 (none)"),
        (NeverCalled(), "NeverCalled has 4 (blocks.0, blocks.1, blocks.2, blocks.3)"),
    ],
)
def test_a_model_that_calls_no_block(model, found):
    text = (
        f"a model is cut between blocks that its forward calls: {found} and calls none, as block(...). "
        "Name modules that it calls in split_points, or use pp_size=1."
    )
    calls = trace(model, torch.ones(2, 4))
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}$"):
        choose_cut(model, calls, find_units(model, 2).blocks, 2, PartitionConfig(), CutCriteria(lambda call: 1.0))
