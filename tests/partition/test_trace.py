import re
from dataclasses import dataclass

import pytest
import torch
from container_code_models import (
    Blocks,
    IdentitySkip,
    LongSkip,
    LookingLoss,
    Repeated,
    WritingBlock,
    WritingUnit,
    WrittenOutput,
)
from support import image_batch, tiny_vit
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridpp.errors import PartitionError
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.partition import Tracer, find_units
from hybridpp.partition.blocks import finest_units
from hybridpp.partition.calls import TensorSpec
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.taint import Value

CPU = torch.device("cpu")


def tracer(model, dtype=None):
    dtypes = {} if dtype is None else {id(tensor): dtype for tensor in model.parameters()}
    finest = Interceptor(ModuleAdapter(model), AdapterLayer.UNIT_RNG, finest_units(model))
    return Tracer(
        model, Interceptor(ModuleAdapter(model), AdapterLayer.STAGE, find_units(model, 2).units), finest, CPU, dtypes
    )


def trace(model, *args, count_flops=False, **kwargs):
    return tracer(model).trace(args, kwargs, count_flops=count_flops)


def links(found):
    """Each call as ``name < what its arguments stem from``."""
    names = [call.name for call in found.calls]

    def text(sources):
        labels = [source if isinstance(source, str) else f"{source.call}.{source.leaf}" for source in sources]
        return " ".join(sorted(labels))

    return [
        *(f"{n} < {text(call.sources)}" for n, call in zip(names, found.calls, strict=True)),
        text(found.result_sources),
    ]


def test_a_vits_calls_in_order_and_what_each_needs():
    assert links(trace(tiny_vit(num_layers=2), **image_batch(3))) == [
        "vit.embeddings < ",
        "vit.layers.0 < 0.0",
        "vit.layers.1 < 1.0",
        "vit.layernorm < 2.0",
        "classifier < 3.0",
        "4.0",
    ]


def test_leaves_and_parameters_of_a_vit():
    model = tiny_vit(num_layers=2)
    calls = trace(model, **image_batch(3)).calls
    hidden = TensorSpec((3, 5, 16), torch.float32, True)
    assert [call.leaves for call in calls] == [(hidden,)] * 4 + [(TensorSpec((3, 5), torch.float32, True),)]
    assert [name for call in calls for name in call.parameters] == [name for name, _ in model.named_parameters()]


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


class WithGlueParameter(Blocks):
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


def test_parameters_used_by_glue_and_outputs_in_containers():
    found = trace(WithGlueParameter(), torch.ones(2, 4))
    assert links(found) == ["embed < ", "blocks.0 < 0.0", "blocks.1 < 1.0 scale", "head < 2.1 scale", "3.0"]
    leaves = found.calls[2].leaves
    assert leaves[0] == "x"
    assert leaves[1:3] == (TensorSpec((2, 4), torch.float32, True), TensorSpec((2,), torch.int64, False))


def state(model):
    return {name: (id(tensor), tensor._version, tensor.detach().clone()) for name, tensor in tensors(model).items()}


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Normed(Blocks):
    """With running statistics and dropout."""

    def __init__(self):
        super().__init__()
        self.blocks[1] = nn.BatchNorm1d(4)
        self.same = nn.Dropout()

    def forward(self, x):
        return super().forward(self.same(x)) + torch.rand(1)


class Failing(Normed):
    """Raises in its glue."""

    def forward(self, x):
        super().forward(x)
        raise KeyError("mine")


@pytest.mark.parametrize("cls", [Normed, Failing])
def test_a_trace_changes_neither_model_nor_buffers_nor_the_generator(cls):
    model, x = cls(), torch.ones(2, 4)
    found = tracer(model)
    before, generator, training = state(model), torch.get_rng_state(), [module.training for module in model.modules()]
    try:
        found.trace((x,), {})
    except KeyError:
        assert cls is Failing
    after = state(model)
    assert list(after) == list(before)
    for name, (identity, version, value) in before.items():
        assert after[name][:2] == (identity, version)
        assert torch.equal(after[name][2], value)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [module.training for module in model.modules()] == training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_on_the_meta_device_is_traced_as_if_it_were_there():
    with torch.device("meta"):
        model = Blocks()
    found = trace(model, torch.ones(2, 4))
    assert found.calls[0].leaves == (TensorSpec((2, 4), torch.float32, True),)


def test_the_dtype_asked_for_is_that_of_the_trace():
    found = tracer(Blocks(), torch.bfloat16).trace((torch.ones(2, 4, dtype=torch.bfloat16),), {})
    assert {call.leaves[0].dtype for call in found.calls} == {torch.bfloat16}


class Routing(nn.Linear):
    """Looks at computed values, as a router of experts does."""

    def forward(self, h):
        return super().forward(h) * 2 if h.sum().item() > 0 else super().forward(h)


def test_a_block_that_reads_values_is_assumed_to_return_its_argument_shape():
    model = Blocks()
    model.blocks[1] = Routing(4, 4)
    calls = trace(model, torch.ones(2, 4)).calls
    assert calls[2].leaves == (TensorSpec((2, 4), torch.float32, True),)
    assert calls[3].sources == {Value(2, 0)}


class Branching(Blocks):
    """Looks at computed values in its glue."""

    def forward(self, x):
        h = self.blocks[0](self.embed(x))
        return self.blocks[1](h) if h.sum() > 0 else self.head(h)


def test_glue_that_looks_at_values_is_refused():
    text = "the forward of Branching branches on a computed value after unit 'blocks.0' ("
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}.*Move that branch into a block, or use pp_size=1"):
        trace(Branching(), torch.ones(2, 4))


def test_what_torch_caches_is_not_searched_where_glue_looks_at_values(monkeypatch):
    """It grows with all that was ever traced: late in a long run, a trace took seconds."""
    searched = []

    @dataclass(init=False)
    class Cached:
        value: int

        def __getattr__(self, name):
            searched.append(name)
            raise AttributeError(name)

    monkeypatch.setitem(FakeTensorMode.cache, "some other operation", Cached())
    assert Value(0, 0) in trace(LookingLoss(), torch.ones(2, 4)).result_sources
    assert not searched
