import re
from dataclasses import dataclass

import pytest
import torch
from container_code_models import Blocks, LookingLoss
from partition.tracing import links, trace, tracer
from support import image_batch, tiny_vit
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridpp.errors import PartitionError
from hybridpp.partition.calls import TensorSpec
from hybridpp.partition.taint import Value


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
    """Raises in its container code."""

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
    """Looks at computed values in its container code."""

    def forward(self, x):
        h = self.blocks[0](self.embed(x))
        return self.blocks[1](h) if h.sum() > 0 else self.head(h)


def test_container_code_that_looks_at_values_is_refused():
    text = "the forward of Branching branches on a computed value after unit 'blocks.0' ("
    with pytest.raises(PartitionError, match=f"^{re.escape(text)}.*Move that branch into a block, or use pp_size=1"):
        trace(Branching(), torch.ones(2, 4))


def test_torchs_caches_are_not_searched_where_container_code_reads_values(monkeypatch):
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
