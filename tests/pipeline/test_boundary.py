"""What comes into a stage and leaves it: values of other stages, with their gradients, and inputs of the batch."""

import weakref
from array import array
from collections import namedtuple
from typing import NamedTuple

import pytest
import torch
from support import assert_same, image_batch, tiny_vit, train
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hybridpp.cluster import current_world
from hybridpp.nn.deferred_tensor import DeferredTensor
from hybridpp.pipeline import Microbatch, boundary
from hybridpp.pipeline.boundary import InputCopies, StageInput, StageOutput, StepInputs, copy_to

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


class Spec(NamedTuple):
    """What a trace knows of a value."""

    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True


def arrive(*tensors, specs=None, training=True):
    specs = specs or [Spec(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    stage_input = StageInput(list(tensors), specs, training)
    stage_input.expect_gradients()
    return stage_input


def test_gradients_of_what_arrived():
    stage_input = arrive(torch.ones(2), torch.full((3,), 2.0))
    first, second = stage_input.take_values()
    (first.sum() * second.square().sum()).backward()
    assert [gradient.tolist() for gradient in stage_input.gradients()] == [[12.0] * 2, [8.0] * 3]


def test_the_stage_may_write_to_what_arrived():
    sent = torch.tensor([-1.0, 3.0])
    stage_input = arrive(sent, torch.ones(2))
    value, other = stage_input.take_values()
    value.mul_(5)
    nn.functional.relu(value, inplace=True)
    other[0] = value[1]
    (value.sum() + other.sum()).backward()
    assert value.tolist() == [0.0, 15.0]
    assert [gradient.tolist() for gradient in stage_input.gradients()] == [[0.0, 10.0], [0.0, 1.0]]


def test_values_nothing_depends_on_have_zero_gradients():
    stage_input = arrive(torch.ones(2), torch.ones(3, dtype=torch.bfloat16))
    stage_input.take_values()[0].sum().backward()
    used, unused = stage_input.gradients()
    assert used.tolist() == [1, 1]
    assert (unused.tolist(), unused.dtype) == ([0, 0, 0], torch.bfloat16)


def test_without_a_backward_pass_every_gradient_is_zero():
    stage_input = arrive(torch.ones(2), torch.ones(3))
    assert [gradient.tolist() for gradient in stage_input.gradients()] == [[0, 0], [0, 0, 0]]


def test_only_what_was_traced_as_differentiable_has_a_gradient():
    mask, ids = torch.ones(2, dtype=torch.bool), torch.ones(2)
    specs = [Spec(dtype=torch.bool, requires_grad=False), Spec(), Spec(requires_grad=False)]
    stage_input = arrive(mask, torch.ones(2), ids, specs=specs)
    values = stage_input.take_values()
    assert values[0] is mask
    assert values[2] is ids
    assert [value.requires_grad for value in values] == [False, True, False]
    (values[1] * mask * ids).sum().backward()
    assert [gradient.tolist() for gradient in stage_input.gradients()] == [[1, 1]]


def test_in_evaluation_values_are_plain():
    tensor = torch.ones(2)
    stage_input = arrive(tensor, training=False)
    assert stage_input.take_values()[0] is tensor
    assert not tensor.requires_grad
    assert stage_input.gradients() == []


def test_nothing_arrives_at_the_first_stage():
    stage_input = arrive()
    assert (stage_input.take_values(), stage_input.gradients()) == ([], [])


def two_stages(values, middle, end):
    """Gradients of ``end(middle(values))``, where ``middle`` is a stage of its own."""
    stage_input = arrive(*values)
    outgoing = middle(*stage_input.take_values())
    specs = [Spec(tuple(tensor.shape), tensor.dtype) for tensor in outgoing]
    stage_output = StageOutput(list(outgoing), specs)
    next_arrival = arrive(*(tensor.detach().clone() for tensor in outgoing), specs=specs)
    del outgoing
    end(*next_arrival.take_values()).backward()
    stage_output.backward(next_arrival.gradients())
    return stage_input.gradients()


@pytest.mark.parametrize(
    ("middle", "end"),
    [
        (lambda a, b: (a * b, b.exp()), lambda x, y: (x * y).sum()),
        (lambda a, b: (a * b, a), lambda x, y: (x * y).sum()),  # one value is passed on as it came
        (lambda a, b: (a, b), lambda x, y: (x * y).sum()),
        (lambda a, b: (a * 2, a * b), lambda x, y: x.sum() + 0 * y.sum()),
        (lambda a, b: (a.mul(3).t(), b), lambda x, y: (x.t() * y).sum()),
    ],
)
def test_two_stages_give_the_gradient_of_one_graph(middle, end):
    torch.manual_seed(0)
    values = [torch.rand(2, 2), torch.rand(2, 2)]
    whole = [value.clone().requires_grad_() for value in values]
    end(*middle(*whole)).backward()
    for found, value in zip(two_stages(values, middle, end), whole, strict=True):
        expected = torch.zeros_like(value) if value.grad is None else value.grad
        torch.testing.assert_close(found, expected)


def test_a_departed_value_may_be_freed_and_written_to():
    weight = nn.Parameter(torch.full((2,), 3.0))
    tensor = weight * 2
    stage_output = StageOutput([tensor], [Spec()])
    tensor.detach().zero_()
    del tensor
    stage_output.backward([torch.ones(2)])
    assert weight.grad.tolist() == [2, 2]


def test_gradients_go_to_the_values_they_belong_to():
    weight = nn.Parameter(torch.ones(2))
    with torch.no_grad():
        constant = weight * 1
    mask = torch.ones(2, dtype=torch.bool)
    specs = [Spec(), Spec(dtype=torch.bool, requires_grad=False), Spec()]
    # The first was traced as differentiable and is not; the second has no gradient at all.
    StageOutput([constant, mask, weight * 5], specs).backward([torch.full((2,), 100.0), torch.ones(2)])
    assert weight.grad.tolist() == [5, 5]


def test_a_stage_without_differentiable_results_has_no_way_back():
    weight = nn.Parameter(torch.ones(2))
    StageOutput([weight * 1], [Spec(requires_grad=False)]).backward([])
    StageOutput([weight.detach() * 1], [Spec()]).backward([torch.ones(2)])
    assert weight.grad is None


class Shift(nn.Module):
    """A block whose backward pass needs nothing of its input."""

    def __init__(self, arrived=None):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.arrived = arrived

    def forward(self, x):
        if self.arrived is not None and type(x) is torch.Tensor:
            self.arrived.append(weakref.ref(x))
        return x + self.shift


def test_what_arrived_is_freed_unless_autograd_keeps_it():
    arrived, alive = [], array("i")  # a list would be put back after calls that only look at the loss

    def criterion(outputs, inputs):
        alive.append(sum(reference() is not None for reference in arrived[:-1]))
        return outputs.mean()

    criterion.reduction = "mean"

    def make():
        torch.manual_seed(0)
        blocks = nn.Linear(4, 4), Shift(arrived), Shift()
        return nn.Sequential(*map(nn.Sequential, blocks))

    settings = {"num_microbatches": 4, "pp_size": 2, "schedule": "gpipe", "layers_per_stage": [1, 2]}
    train(make, [(torch.randn(8, 4),)], criterion=criterion, **settings)
    assert len(arrived) >= 4
    assert [*alive] == [0] * 8  # the criterion is called four times more for a look at the first loss


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


@pytest.fixture
def sizes(monkeypatch):
    """The bytes of what each stage copied, by its place in the batch; taken by the first dimensions."""
    found = {}

    def counting(leaf, device):
        rank = current_world().rank
        found.setdefault(rank, []).append(tuple(leaf.shape))
        return copy_to(leaf, device)

    monkeypatch.setattr(boundary, "copy_to", counting)
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
