"""The table of a boosted model's stages, the same on every rank."""

from networks import ROWS, Chain
from support import boosted, image_batch, tiny_vit
from torch import nn

from hybridpp.cluster import Loopback


class Tied(nn.Module):
    """Its first and last layers share their weight."""

    def __init__(self):
        super().__init__()
        self.first, self.body, self.last = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.body(self.first(x)))


def tables(make, sample, num_ranks, **settings):
    def run():
        booster, model, _ = boosted(make(), None, sample, **settings)
        return booster.plugin.describe_stages(model)

    (table,) = set(Loopback(num_ranks).run(run))
    return table.splitlines()


def test_stages_of_a_chain_with_their_modules_and_parameters():
    table = tables(Chain, ROWS, 3, pp_size=3)
    assert table == [
        "Chain, stages: 3",
        "",
        "stage | rank of the pipeline | modules              | parameters",
        "------+----------------------+----------------------+-----------",
        "    0 |                    0 | layer0.0             |         20",
        "    1 |                    1 | layer0.1, layer1.0   |         40",
        "    2 |                    2 | layer1.1, layer2.0-1 |         18",
        "------+----------------------+----------------------+-----------",
        "total |                      |                      |         78",
    ]


def test_shards_count_as_the_complete_layers_and_chunks_name_their_ranks():
    sample = {"pixel_values": image_batch(2)["pixel_values"]}
    whole = tables(tiny_vit, sample, 1)
    sharded = tables(tiny_vit, sample, 4, tp_size=2, pp_size=2, schedule="zb-v")
    assert whole[-1].split() == sharded[-1].split()
    assert [line.split("|")[1].strip() for line in sharded[4:8]] == ["0", "1", "1", "0"]


def test_what_several_stages_hold_is_named():
    def make():
        import torch

        torch.manual_seed(0)
        return Tied()

    table = tables(make, ROWS, 2, pp_size=2, split_points={"body": "after"})
    assert table[-1] == "  first.weight: stages 0, 1"
