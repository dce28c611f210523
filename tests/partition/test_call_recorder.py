"""What a trace records of each call of a unit."""

import pytest
import torch
from container_code_models import Blocks, IdentitySkip, LongSkip, Repeated, WritingBlock, WritingUnit, WrittenOutput
from partition.tracing import links, trace
from torch import nn

from hybridpp.partition.calls import TensorSpec


def test_flops_are_those_of_the_matrix_products():
    calls = trace(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7)), torch.ones(2, 3), count_flops=True).calls
    assert [call.flops for call in calls] == [2 * 2 * 3 * 5, 0, 2 * 2 * 5 * 7]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            LongSkip,
            [
                "embed < ",
                "blocks.0 < 0.0",
                "blocks.1 < 1.0",
                "blocks.2 < 2.0",
                "blocks.3 < 3.0",
                "head < 0.0 4.0",
                "5.0",
            ],
        ),
        (
            IdentitySkip,  # what it returns is its argument: no value of its own
            [
                *("embed < ", "blocks.0 < 0.0", "same < 1.0", "blocks.1 < 1.0", "blocks.2 < 3.0"),
                *("blocks.3 < 1.0 4.0", "head < 1.0 5.0", "6.0"),
            ],
        ),
        (
            WritingUnit,  # after the write, the argument is the unit's value
            [
                *("embed < ", "blocks.0 < 0.0", "relu < 1.0", "blocks.1 < 2.0", "blocks.2 < 3.0"),
                *("blocks.3 < 2.0 4.0", "head < 1.0 2.0 5.0", "6.0"),
            ],
        ),
        (
            WritingBlock,
            [
                *("embed < ", "blocks.0 < 0.0", "blocks.1 < 1.0", "blocks.2 < 2.0", "blocks.3 < 2.1 3.0"),
                *("head < 1.0 2.1 4.0", "5.0"),
            ],
        ),
    ],
)
def test_sources_of_each_call(model, expected):
    assert links(trace(model(), torch.ones(2, 4))) == expected


def test_leaves_that_are_written_to_later_are_marked():
    calls = trace(WrittenOutput(), torch.ones(2, 4)).calls
    assert [call.name for call in calls if call.written] == ["blocks.0", "blocks.2"]


def test_leaves_that_are_an_argument_are_marked():
    by_name = {call.name: call for call in trace(IdentitySkip(), torch.ones(2, 4)).calls}
    assert {name: call.arguments for name, call in by_name.items() if call.arguments} == {"same": {0: 0}}
    by_name = {call.name: call for call in trace(WritingBlock(), torch.ones(2, 4)).calls}
    assert {name: call.arguments for name, call in by_name.items() if call.arguments} == {"blocks.1": {1: 0}}
    assert len(by_name["blocks.1"].leaves) == by_name["blocks.1"].tree.num_leaves + 1


def test_repeated_calls_are_numbered():
    calls = trace(Repeated(), torch.ones(2, 4)).calls
    assert [(call.name, call.occurrence) for call in calls[1:5]] == [
        ("blocks.0", 0),
        ("blocks.1", 0),
        ("blocks.0", 1),
        ("blocks.3", 0),
    ]


class WithContainerParameter(Blocks):
    """A parameter of the container, and outputs in containers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks[1] = Structured()

    def forward(self, x):
        h = self.blocks[0](self.embed(x)) * self.scale
        out = self.blocks[1](h)
        return self.head(out["states"][0] + self.scale)


class Structured(nn.Linear):
    """Returns tensors and plain values in containers."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, h):
        return {"name": "x", "states": (super().forward(h), h.argmax(-1)), "none": None}


def test_parameters_used_by_container_code_and_outputs_in_containers():
    found = trace(WithContainerParameter(), torch.ones(2, 4))
    assert links(found) == ["embed < ", "blocks.0 < 0.0", "blocks.1 < 1.0 scale", "head < 2.1 scale", "3.0"]
    leaves = found.calls[2].leaves
    assert leaves[0] == "x"
    assert leaves[1:3] == (TensorSpec((2, 4), torch.float32, True), TensorSpec((2,), torch.int64, False))
