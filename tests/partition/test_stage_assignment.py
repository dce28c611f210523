"""Stages keep what they were given: inputs that need it elsewhere are refused, and too large a share is told."""

import re

import pytest
import torch
import torch.nn.functional as F
from container_code_models import Blocks
from networks import Convolutions, wide_images
from partition.tracing import CPU
from support import boosted, sgd
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.config import PartitionConfig
from hybridpp.errors import ConfigError, PartitionError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.partition import StagedModel, StagingOptions, TrainingStateSpec


class Reader(Blocks):
    """Another way through the blocks for wider batches."""

    def forward(self, x):
        first, last = (0, 3) if len(x) < 4 else (3, 0)
        return self.head(self.blocks[last](self.blocks[2](self.blocks[1](self.blocks[first](self.embed(x))))))


def test_an_input_that_needs_a_parameter_elsewhere():
    model = Reader()
    staged = StagedModel(ModuleAdapter(model), 2, [0], device=CPU, samples=[((torch.ones(2, 4),), {})])
    text = (
        "for this input, stage 0 needs parameter 'blocks.3.weight', which was given to stage 1 at boost. "
        "Show boost a batch of each kind: samples=[one, another]. What the forward uses in training or in evaluation "
        "alone (a penalty of weights) must be in both: multiply it by 0 in the other."
    )
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}$"):
        staged.plans((torch.ones(4, 4),), {})


class TwoHeads(nn.Module):
    """A batch uses one of the heads, or the short cut past the blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.heads = nn.ModuleDict({"one": nn.Linear(4, 2), "other": nn.Linear(4, 2), "wide": nn.Bilinear(4, 4, 2)})
        self.early = nn.Linear(4, 4, bias=False)

    def forward(self, x, task):
        shift = self.early(x) if task == "early" else x
        for block in self.blocks:
            x = block(x).tanh()
        if task == "wide":
            return self.heads["wide"](x, x)
        return self.heads["other" if task == "early" else task](x + shift)


def _train_tasks(tasks, **options):
    """Losses and weights after a step for each task, on each rank and in one process."""
    x, y = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)), torch.ones(4, 2)
    batches = [{"x": x, "task": task, "y": y} for task in tasks]

    def loss(outputs, inputs):
        return F.mse_loss(outputs, inputs["y"])

    def model():
        torch.manual_seed(1)
        return TwoHeads()

    def on_rank():
        net = model()
        booster = Booster(plugin=HybridParallelPlugin(**options.pop("settings", {"pp_size": 2, "num_microbatches": 2})))
        given = {name: value(batches) for name, value in options.items()}
        net, optimizer, *_ = booster.boost(net, sgd(net.parameters()), **given)
        losses = []
        for batch in batches:
            losses.append(booster.execute_pipeline(iter([batch]), net, loss, optimizer)["loss"].item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, {name: one.detach().clone() for name, one in net.named_parameters()}

    alone, losses = model(), []
    optimizer = sgd(alone.parameters())
    for batch in batches:
        value = loss(alone(batch["x"], batch["task"]), batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    whole = dict(alone.named_parameters())
    ranks = Loopback(2).run(on_rank)
    for got, held in ranks:
        assert got == pytest.approx(losses)
        for name, one in held.items():
            torch.testing.assert_close(one, whole[name].detach())
    return [set(held) for _, held in ranks]


def test_a_head_that_the_sample_does_not_use_is_held_beside_the_first():
    first, last = _train_tasks(["one", "other", "one"], sample=lambda batches: batches[0])
    assert "heads.other.weight" in last - first


@pytest.mark.parametrize("order", [1, -1])
def test_a_stage_holds_what_a_sample_of_any_kind_uses_there(order):
    tasks = ["one", "early", "wide"][::order]
    first, last = _train_tasks(tasks, samples=lambda batches: batches)
    assert "heads.wide.weight" in last - first
    assert "early.weight" in first


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.ModuleList([Wide()]), nn.ModuleList([Wide()])

    def forward(self, x, which):
        for block in getattr(self, which):
            x = block(x)
        return x


def test_blocks_that_only_a_further_sample_calls_are_sharded():
    samples = [{"x": torch.ones(4, 4), "which": which} for which in ("one", "other")]

    def on_rank():
        plugin = HybridParallelPlugin(tp_size=2, num_microbatches=1)
        net = Booster(plugin=plugin).boost(TwoTowers(), samples=samples).model
        return net.one[0].up.weight.shape[0], net.other[0].up.weight.shape[0]

    assert Loopback(2).run(on_rank) == [(4, 4), (4, 4)]


@pytest.mark.parametrize("samples", [{"x": 1}, [], [None], torch.ones(2)])
def test_samples_that_are_no_batches_of_each_kind_are_refused(samples):
    with pytest.raises(ConfigError, match=r"^samples must "):
        Booster(plugin=HybridParallelPlugin()).boost(TwoHeads(), samples=samples)


def test_one_sample_and_several_are_refused_together():
    with pytest.raises(ConfigError, match=r"^sample and samples are both given"):
        Booster(plugin=HybridParallelPlugin()).boost(TwoHeads(), sample={"x": 1}, samples=[{"x": 1}])


def test_a_model_that_is_not_cut_is_held_to_the_memory_limit_too():
    staging = StagingOptions(partition=PartitionConfig(memory_limit=300_000), state_spec=TrainingStateSpec(2))
    with pytest.raises(PartitionError, match=r"the parameters of stage 0 \(rank 0 of the pipeline\) take"):
        StagedModel(ModuleAdapter(Convolutions()), 1, [0], device=torch.device("cpu"), samples=[], staging=staging)


def test_a_stage_with_far_more_than_its_share_of_parameters_is_named(caplog):
    def boost(**settings):
        caplog.clear()
        with caplog.at_level("WARNING", logger="hybridpp"):
            Loopback(4).run(lambda: boosted(Convolutions(), sgd, wide_images(), pp_size=4, **settings))
        return [record.getMessage() for record in caplog.records]

    (said,) = boost()
    assert said.endswith(
        "stage 3 of Convolutions holds 3.6 times as many parameters as the mean of the 4 stages, because that balances "
        'flops best. Where memory is short, use balance="parameters", memory_limit= or layers_per_stage=.'
    )
    assert boost(balance="parameters") == boost(layers_per_stage=[2, 2, 2, 2]) == []
