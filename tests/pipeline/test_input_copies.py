"""Inputs of micro-batches on the device of a stage."""

from collections import namedtuple
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from support import assert_same, image_batch, tiny_vit, train
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hybridpp.cluster import current_world
from hybridpp.nn.deferred_tensor import DeferredTensor
from hybridpp.pipeline import Microbatch, input_copies
from hybridpp.pipeline.input_copies import InputCopies, StepInputs, copy_to

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


def step(copies, *batches, is_cut=True):
    return StepInputs(copies, [Microbatch(batch, 1, 1.0) for batch in batches], training=True, is_cut=is_cut)


@pytest.mark.parametrize("is_cut", [False, True])
def test_inputs_are_moved_with_their_structure(is_cut):
    batch = {"a": torch.zeros(2), "b": (1, torch.tensor(2.0)), "c": [Pair(torch.ones(1), None)], "d": "text"}
    moved = step(InputCopies(torch.device("meta")), batch, is_cut=is_cut).take(0, 0)
    assert (moved["a"].device.type, moved["b"][0], moved["b"][1].device.type) == ("meta", 1, "meta")
    assert (type(moved["c"][0]), moved["c"][0].left.device.type, moved["d"]) == (Pair, "meta", "text")


def test_what_a_model_writes_to_its_inputs_stays_in_the_microbatch():
    batch = torch.ones(4)
    weight = torch.ones(2, requires_grad=True)
    inputs = step(InputCopies(CPU), *batch.split(2))
    losses = [(inputs.take(0, number).mul_(3) * weight).sum() for number in range(2)]
    sum(losses).backward()
    assert weight.grad.tolist() == [6, 6]
    assert batch.tolist() == [1, 1, 1, 1]


def test_what_was_read_once_is_copied_beforehand_by_stage_and_mode():
    copies, batch = InputCopies(CPU), {"x": torch.ones(2), "nested": [torch.ones(2), torch.ones(2)]}
    inputs = step(copies, batch, batch)
    first = inputs.take(0, 0)
    assert all(isinstance(leaf, DeferredTensor) for leaf in (first["x"], *first["nested"]))
    first["nested"][1].sum()
    second = inputs.take(0, 1)
    lazy = [isinstance(leaf, DeferredTensor) for leaf in (second["x"], *second["nested"])]
    assert lazy == [True, True, False]
    assert isinstance(inputs.take(1, 0)["nested"][1], DeferredTensor)
    evaluation = StepInputs(copies, [Microbatch(batch, 1, 1.0)], training=False, is_cut=True)
    assert isinstance(evaluation.take(0, 0)["nested"][1], DeferredTensor)


@pytest.mark.parametrize(
    "leaf",
    [torch.ones(2, requires_grad=True), torch.ones(2).to_sparse(), nn.Parameter(torch.ones(2))],
    ids=["gradient", "sparse", "parameter"],
)
def test_only_plain_tensors_are_deferred(leaf):
    assert not isinstance(step(InputCopies(CPU), leaf).take(0, 0), DeferredTensor)


class Event(NamedTuple):
    what: str
    detail: object = None


class Recorded:
    """A side stream that notes what is asked of it."""

    def __init__(self):
        self.events = []

    @contextmanager
    def active(self):
        self.events.append(Event("copy"))
        yield

    def wait_for_current(self):
        self.events.append(Event("wait for current"))

    def mark(self):
        self.events.append(Event("mark", len(self.events)))
        return len(self.events) - 1

    def hand_over(self, mark, tensors):
        assert self.events[mark] == Event("mark", mark)
        self.events.append(Event("hand over", [tensor.tolist() for tensor in tensors]))


def test_the_next_inputs_are_copied_on_a_side_stream_while_a_stage_runs():
    side = Recorded()
    inputs = step(InputCopies(CPU, side), *(torch.full((1,), float(number)) for number in range(3)), is_cut=False)
    inputs.expect([(0, 0), (0, 1), (0, 2)])
    taken = []
    for number in range(3):
        taken.append(inputs.take(0, number).item())
        side.events.append(Event("run", number))
    assert taken == [0, 1, 2]
    assert [(event.what, event.detail) for event in side.events if event.what != "mark"] == [
        ("copy", None),
        ("hand over", [[0.0]]),
        ("copy", None),
        ("run", 0),
        ("hand over", [[1.0]]),
        ("copy", None),
        ("run", 1),
        ("hand over", [[2.0]]),
        ("run", 2),
    ]


def test_a_batch_on_the_device_is_copied_after_what_makes_it():
    side = Recorded()
    step(InputCopies(torch.device("meta"), side), torch.ones(1, device="meta"), is_cut=False)._copy((0, 0))
    assert [event.what for event in side.events] == ["wait for current", "copy", "mark"]


@pytest.fixture
def sizes(monkeypatch):
    """The bytes of what each stage copied, by its place in the batch; taken by the first dimensions."""
    found = {}

    def counting(leaf, device):
        rank = current_world().rank
        found.setdefault(rank, []).append(tuple(leaf.shape))
        return copy_to(leaf, device)

    monkeypatch.setattr(input_copies, "copy_to", counting)
    return found


def test_stages_of_a_vit_copy_only_what_they_read(sizes):
    batches = [image_batch(4, seed=seed) for seed in range(2)]
    expected = train(tiny_vit, batches, num_microbatches=2)
    sizes.clear()
    found = train(tiny_vit, batches, num_microbatches=2, pp_size=2)
    images, labels = (2, 3, 8, 8), (2,)
    assert sizes == {0: [images] * 4, 1: [labels] * 4}
    assert_same(found["weights"], expected["weights"])


def test_stages_of_a_language_model_copy_only_what_they_read(sizes):
    def make():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=32,
            use_cache=False,
        )
        return LlamaForCausalLM(config).train()

    generator = torch.Generator().manual_seed(0)
    batch = {
        "input_ids": torch.randint(0, 32, (2, 4), generator=generator),
        "labels": torch.randint(0, 32, (2, 6), generator=generator)[:, :4],
    }
    expected = train(make, [batch, batch], num_microbatches=2)
    sizes.clear()
    found = train(make, [batch, batch], num_microbatches=2, pp_size=2)
    assert {rank: len(copies) for rank, copies in sizes.items()} == {0: 4, 1: 4}
    assert_same(found["weights"], expected["weights"])


def test_a_criterion_reads_what_no_model_does(sizes):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    batch = {"x": torch.randn(4, 4), "y": torch.randn(4, 4, 1), "text": torch.zeros(4, 9)}

    def criterion(outputs, inputs):
        return ((outputs - inputs["y"][..., 0]) ** 2).mean()

    criterion.reduction = "mean"
    settings = {"num_microbatches": 2, "criterion": criterion}
    expected = train(Net, [batch, batch], **settings)
    sizes.clear()
    found = train(Net, [batch, batch], pp_size=2, **settings)
    assert sizes == {0: [(2, 4)] * 4, 1: [(2, 4, 1)] * 4}
    assert_same(found["weights"], expected["weights"])
