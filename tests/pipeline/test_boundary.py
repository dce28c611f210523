import weakref
from typing import NamedTuple

import pytest
import torch
from support import train
from torch import nn

from hybridpp.pipeline.boundary import StageInput, StageOutput


class Spec(NamedTuple):
    """What a trace knows of a value."""

    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True


def arrive(*tensors, specs=None, training=True):
    return StageInput(list(tensors), specs or [Spec(tuple(tensor.shape), tensor.dtype) for tensor in tensors], training)


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
    arrived, alive = [], []

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
    assert alive == [0] * 4
