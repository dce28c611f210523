import re
from itertools import pairwise

import pytest
import torch
from container_code_models import EVERY, Again, Blocks, IdentitySkip, LongSkip, Repeated, WrittenInput
from partition.tracing import CPU, trace
from support import assert_same, train
from torch import nn

from hybridpp.errors import PartitionError
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.partition import CutPoint, StagedModel
from hybridpp.partition.plan import assign_stages, owners, stage_plan, uses


def cut_after(*blocks):
    return tuple(CutPoint(block, 0) for block in blocks)


def crossings(model, *cuts):
    """What crosses each border, as ``unit.leaf`` of the unit that made it."""
    found = trace(model, torch.ones(2, 4))
    stages = assign_stages(found, cut_after(*cuts))
    plans = [stage_plan(found, stages, stage) for stage in range(len(cuts) + 1)]
    for plan, following in pairwise(plans):
        assert plan.outgoing == following.incoming
        assert plan.outgoing_specs == following.incoming_specs
        assert [spec.shape for spec in plan.outgoing_specs] == [(2, 4)] * len(plan.outgoing)
    assert (plans[0].incoming, plans[-1].outgoing) == ((), ())
    assert [plan.is_last for plan in plans] == [False] * len(cuts) + [True]
    return [" ".join(f"{found.calls[value.call].name}" for value in plan.outgoing) for plan in plans[:-1]]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Blocks, ["blocks.0", "blocks.1", "blocks.2"]),
        # A skip travels along the chain, up to where it is used.
        (LongSkip, ["embed blocks.0", "embed blocks.1", "embed blocks.2"]),
        (IdentitySkip, ["blocks.0", "blocks.0 blocks.1", "blocks.0 blocks.2"]),
    ],
)
def test_values_that_cross_the_borders(model, expected):
    assert crossings(model(), "blocks.0", "blocks.1", "blocks.2") == expected


def test_a_call_between_two_blocks_belongs_to_the_one_that_follows():
    found = trace(IdentitySkip(), torch.ones(2, 4))
    stages = assign_stages(found, cut_after("blocks.0", "blocks.2"))
    assert [f"{call.name}@{stage}" for call, stage in zip(found.calls, stages, strict=True)] == [
        *("embed@0", "blocks.0@0", "same@1", "blocks.1@1", "blocks.2@1", "blocks.3@2", "head@2")
    ]


def test_ownership_follows_use():
    model = Repeated()
    model.unused = torch.nn.Linear(1, 1)
    found = trace(model, torch.ones(2, 4))
    names = tuple(name for name, _ in model.named_parameters() if name.endswith("weight"))
    held = owners(uses(found, assign_stages(found, cut_after("blocks.1"))), names)
    assert held == {
        "embed.weight": (0,),
        "blocks.0.weight": (0, 1),
        "blocks.1.weight": (0,),
        "blocks.2.weight": (0,),
        "blocks.3.weight": (1,),
        "head.weight": (1,),
        "unused.weight": (0,),
    }


def test_a_cut_lies_between_calls():
    model = Repeated()
    found = trace(model, torch.ones(2, 4))
    stages = assign_stages(found, (CutPoint("blocks.0", 1),))
    assert stages == (0, 0, 0, 0, 1, 1)


def test_a_forward_that_leaves_out_the_last_block_of_a_stage():
    found = trace(Repeated(), torch.ones(2, 4))
    text = (
        "the forward does not call block 'blocks.2', which ends stage 0, for this input. "
        "Use inputs that run every block, or pp_size=1."
    )
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}$"):
        assign_stages(found, cut_after("blocks.2", "blocks.3"))


def test_a_forward_that_calls_the_last_block_of_a_stage_less_often():
    found = trace(Repeated(), torch.ones(2, 4))
    with pytest.raises(
        PartitionError, match=r"with call 5 of block 'blocks.0', and .* calls it 2 times .*over samples"
    ):
        assign_stages(found, (CutPoint("blocks.0", 4),))
    with pytest.raises(PartitionError, match=r"in another order .*: call 1 of block 'blocks.0', which ends stage 1"):
        assign_stages(found, (CutPoint("blocks.0", 1), CutPoint("blocks.0", 0)))


# torch's fake tensors ask a buffer that a fake was written to for its gradient, and hide the warning in vain.
@pytest.mark.covering
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("pp_size", [2, 3, 4])
@pytest.mark.parametrize("model", EVERY, ids=lambda model: model.__name__)
def test_stages_give_the_whole_models_gradients(model, pp_size):
    def run(**settings):
        # Made anew: one of the models writes to its inputs.
        batches = [torch.randn(5, 4, generator=torch.Generator().manual_seed(step)) for step in range(2)]
        return train(model, batches, criterion=mean_square, num_microbatches=3, **settings)

    expected, actual = run(), run(pp_size=pp_size)
    assert actual["losses"] == expected["losses"] * pp_size
    # Uses of one parameter on several stages are added up in another order.
    check = torch.testing.assert_close if model in (Repeated, Again) else assert_same
    check(actual["gradients"], expected["gradients"])
    check(actual["weights"], expected["weights"])


def mean_square(outputs, inputs):
    return outputs.square().mean()


mean_square.reduction = "mean"  # of what micro-batches give: some models couple the samples of one


def test_tracing_does_not_write_to_the_sample():
    sample = torch.ones(2, 4)
    StagedModel(ModuleAdapter(WrittenInput()), 2, [0], device=CPU, samples=[((sample,), {})])
    assert torch.equal(sample, torch.ones(2, 4))


class WithTower(nn.Module):
    """A tower that text alone does not run, behind the embedding of the text."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 4)
        self.tower = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x, pixels=None):
        x = self.embed(x)
        if pixels is not None:
            for layer in self.tower:
                pixels = torch.tanh(layer(pixels))
            x = x + pixels
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize(
    ("ends", "settings"),
    [
        (["tower.3"], {"pp_size": 2}),
        (["tower.1", "tower.3", "blocks.1"], {"pp_size": 4}),
        (["tower.1", "tower.3", "blocks.1"], {"pp_size": 2, "schedule": "zb-v"}),
    ],
    ids=["a stage ends earlier", "a stage runs nothing", "a chunk runs nothing"],
)
def test_batches_may_leave_out_blocks_that_end_stages(ends, settings):
    x, pixels = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)).unbind()
    batches = [{"x": x, "pixels": pixels}, {"x": pixels}, {"x": pixels, "pixels": x}]
    common = {"criterion": mean_square, "num_microbatches": 2}
    expected = train(WithTower, batches, **common)
    found = train(WithTower, batches, split_points=dict.fromkeys(ends, "after"), **common, **settings)
    assert found["losses"] == expected["losses"] * settings["pp_size"]
    assert_same(found["weights"], expected["weights"])
