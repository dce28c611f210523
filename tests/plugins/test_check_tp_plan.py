"""A user's tensor_parallel_plan must not change what the model computes."""

import logging
import re

import pytest
import torch
from support import assert_near, boosted, sgd, train
from torch import nn
from torch.nn import functional

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
PAIR = {"*.up": "column", "*.down": "row"}
OPTIONS = {"num_microbatches": 2, "criterion": lambda outputs, inputs: outputs.square().mean()}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        return x + self.down(self.between(self.up(x)))

    def between(self, x):
        return (x * self.scale).tanh()


class Mixing(Block):
    """What is between its layers reads all features."""

    def between(self, x):
        return x.softmax(-1)


class Gated(Block):
    """Its wide layer is two in one."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(8, 8)

    def between(self, x):
        first, second = x.chunk(2, -1)
        return first.tanh() * second


class Attention(nn.Module):
    """The name of its number of heads says nothing."""

    def __init__(self):
        super().__init__()
        self.query, self.out, self.parts = nn.Linear(8, 8), nn.Linear(8, 8), 4

    def forward(self, x):
        heads = self.query(x).reshape(len(x), self.parts, -1)
        return x + self.out((heads.softmax(-1) * heads).reshape(len(x), -1))


class Net(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


WRONG = {
    "a column layer without a row layer": (
        Block,
        {"*.up": "column"},
        "'blocks.0' raises RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x8): with 'blocks.0.up' "
        "(weight 16 x 8) as 'column'; so do 1 more. The outputs of column layers go to row layers, through what "
        "computes each feature or head by itself. This fits: {'blocks.0.up': 'column', 'blocks.0.down': 'row'}. Or lea",
    ),
    "a row layer without a column layer": (
        Block,
        {"*.down": "row"},
        "with 'blocks.0.down' (weight 8 x 16) as 'row'; so",
    ),
    "a function of all features between": (
        Mixing,
        PAIR,
        "'blocks.0' gives other results than whole layers: with 'blocks.0.up' (weight 16 x 8) as 'column', "
        "'blocks.0.down' (weight 8 x 16) as 'row'; so do 1 more. No way to divide its layers was found. Leave them out",
    ),
    "two layers in one": (Gated, PAIR, "This fits: {'blocks.0.up': 'fused_column:concatenated:2', "),
    "heads that are counted by another name": (
        Attention,
        {"*.query": "column", "*.out": "row"},
        "A rank also needs blocks.0.parts of 2. Leave out tensor_parallel_plan: then a plan is searched that sets it.",
    ),
    "a layer outside of blocks": (Block, {"stem": "column"}, "Net gives other results than whole layers: with 'stem'"),
    "a sum of complete gradients": (Block, {"head": "partial_grad"}, "with 'head.bias' as 'partial_grad', 'head.weigh"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_plan_that_changes_results_is_refused_with_what_fits(case):
    block, plan, text = WRONG[case]

    def run():
        boosted(Net(block), sgd, BATCHES[0], tp_size=2, tensor_parallel_plan=plan)

    start = "^tensor_parallel_plan must not change what the model computes, and over tp_size=2 "
    with pytest.raises(ConfigError, match=start + ".*" + re.escape(text)):
        Loopback(2).run(run)


RECOMPUTED = {"pp_size": 2, "schedule": "zb-h1", "gradient_checkpoint_config": {}}


@pytest.mark.parametrize("layout", [{}, RECOMPUTED], ids=["one stage", "two stages"])
def test_gradients_that_are_sums_need_not_be_named(layout):
    run = train(Net, BATCHES, tp_size=2, tensor_parallel_plan=PAIR, **OPTIONS, **layout)
    expected = train(Net, BATCHES, **OPTIONS)
    assert_near(run["gradients"], expected["gradients"], 1e-6)
    assert_near(run["weights"], expected["weights"], 1e-6)


def test_layers_of_several_blocks_may_make_a_pair():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 8)))

    plan = {"0.0": "column", "1.0": "row"}
    run = train(make, BATCHES, tp_size=2, tensor_parallel_plan=plan, **OPTIONS)
    assert_near(run["weights"], train(make, BATCHES, **OPTIONS)["weights"], 1e-6)


def test_without_a_sample_a_warning_says_that_a_plan_was_not_tried(caplog):
    def run():
        plugin = HybridParallelPlugin(tp_size=2, num_microbatches=1, precision="fp32", tensor_parallel_plan=PAIR)
        Booster(plugin=plugin).boost(Net())

    with caplog.at_level(logging.WARNING):
        Loopback(2).run(run)
    assert "tensor_parallel_plan could not be tried on Net: there is no sample of a batch. That its" in caplog.text


class Penalised(Net):
    """Its penalty is computed with labels only."""

    def forward(self, x, y=None):
        x = super().forward(x)
        return x if y is None else functional.cross_entropy(x, y) + self.blocks[1].up.weight.norm()


LABELLED = {"x": BATCHES[0], "y": torch.zeros(4, dtype=torch.long)}


def test_a_weight_that_the_models_code_reads_must_not_be_divided():
    def run():
        boosted(Penalised(), sgd, LABELLED, tp_size=2, tensor_parallel_plan=PAIR)

    with pytest.raises(
        ConfigError, match=r"'blocks.1.up' has a part of 'blocks.1.up.weight', which code outside of it"
    ):
        Loopback(2).run(run)


@pytest.mark.parametrize("by_script", [False, True])
@pytest.mark.parametrize("plan", [None, PAIR], ids=["searched", "given"])
def test_reads_of_parts_that_the_sample_did_not_show_are_refused(plan, by_script):
    def run():
        booster, model, optimizer = boosted(Penalised(), sgd, {"x": BATCHES[0]}, tp_size=2, tensor_parallel_plan=plan)
        model(BATCHES[0])
        if by_script:
            model(**LABELLED)
        booster.execute_pipeline(iter([LABELLED]), model, lambda outputs, inputs: outputs, optimizer)

    text = "the model's code reads a weight of which this rank has a part (blocks.1.up.weight), as a penalty does"
    with pytest.raises(ConfigError, match=re.escape(text)):
        Loopback(2).run(run)


class Scaled(Net):
    """Its container code reads a weight, so that weights of a replica's pieces are gathered meanwhile."""

    def forward(self, x):
        return super().forward(x) * self.blocks[1].up.weight.norm()


def test_weights_that_are_gathered_for_container_code_are_not_read_by_it():
    def run(tp_size):
        def of_rank():
            booster, model, optimizer = boosted(Scaled(), sgd, BATCHES[0][:2], tp_size=tp_size, zero_stage=3)
            first = 2 * booster.plugin.layout.here.dp
            data = iter([BATCHES[0][first : first + 2]])
            return booster.execute_pipeline(data, model, OPTIONS["criterion"], optimizer)["loss"].item()

        return Loopback(2 * tp_size).run(of_rank)

    one, other = run(1)
    assert run(2) == pytest.approx([one, one, other, other], rel=1e-5)
