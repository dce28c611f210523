"""Compiled blocks leave the weight gradients of their linear layers to W."""

import pytest
import torch
from compiled_blocks import Blocks, run, run_compiled
from refusals import refused
from support import assert_near
from torch import nn
from torch.func import functional_call

from hybridpp.module_adapter import ModuleAdapter
from hybridpp.pipeline import WeightGradients, compile_keywords, makes_cuda_graphs

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Sums:
    """A sink that keeps what it is told."""

    def __init__(self):
        self.added, self.deferred = {}, []

    def defer(self, names):
        self.deferred += names

    def mark_reached(self, names):
        pass

    def add(self, name, gradient):
        self.added[name] = self.added.get(name, 0) + gradient

    def takes_products(self, name):
        return False

    def mark_complete(self, name):
        pass


def separable(model, sums):
    weights = WeightGradients(ModuleAdapter(model), compiled=set(model.modules()))
    weights.attach_sink(sums)
    weights.begin(splits=True)
    return weights


@pytest.mark.covering
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (3,)])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_leaves_weight_gradients_to_w(bias, shape, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4, bias), nn.Tanh(), nn.Linear(4, 2, bias)), torch.randn(shape)
    x.requires_grad_()
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    sums = Sums()
    weights = separable(model, sums)
    compiled = torch.compile(lambda x: model(x), backend=backend, fullgraph=True)
    with weights.recording_forward(splits=True):
        loss = compiled(x).square().sum()
    with weights.input_backward(splits=True) as tasks:
        loss.backward()
    assert sums.added == {}
    if len(shape) > 1:
        assert sorted(sums.deferred) == sorted(name for name, _ in model.named_parameters())
        assert all(parameter.grad is None for parameter in model.parameters())
    weights.add(tasks, final=True)
    sums.added |= {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    torch.testing.assert_close(x.grad, expected[0])
    for (name, _), gradient in zip(model.named_parameters(), expected[1:], strict=True):
        torch.testing.assert_close(sums.added[name], gradient)


class Substituted(nn.Module):
    """Runs its layer with a computed tensor, or with another parameter, in the weight's place."""

    def __init__(self, computes):
        super().__init__()
        self.first, self.layer = nn.Linear(3, 3), nn.Linear(3, 3)
        self.change, self.computes = nn.Parameter(torch.ones(3, 3)), computes

    def forward(self, x):
        weight = self.layer.weight * self.change if self.computes else self.change
        return functional_call(self.layer, {"weight": weight}, (self.first(x),))


@pytest.mark.parametrize("computes", [True, False])
def test_a_weight_that_a_call_puts_in_anothers_place_gets_its_gradient(computes):
    torch._dynamo.reset()
    model, x = Substituted(computes), torch.randn(5, 3, requires_grad=True)
    names = [name for name, _ in model.named_parameters()]
    expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()], materialize_grads=True)
    weights = separable(model, sums := Sums())
    compiled = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
    with weights.recording_forward(splits=True):
        loss = compiled(x).square().sum()
    with weights.input_backward(splits=True) as tasks:
        loss.backward()
    weights.add(tasks, final=True)
    assert sorted(sums.added) == ["first.bias", "first.weight"]
    for name, gradient in zip(names, expected, strict=True):
        own = model.get_parameter(name).grad
        torch.testing.assert_close(sums.added.get(name, torch.zeros_like(gradient) if own is None else own), gradient)


def test_an_input_without_a_gradient_leaves_its_layer_to_autograd():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    sums = Sums()
    weights = separable(model, sums)
    with weights.recording_forward(splits=True):
        loss = model(x).square().sum()
    with weights.input_backward(splits=True) as tasks:
        loss.backward()
    assert sums.deferred == ["1.weight", "1.bias"]
    assert model[0].weight.grad is not None
    weights.add(tasks)


def test_a_backward_pass_that_is_not_the_schedules_adds_at_once():
    model, x = nn.Sequential(nn.Linear(3, 4)), torch.randn(5, 3, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    sums = Sums()
    weights = separable(model, sums)
    with weights.recording_forward(splits=True):
        loss = model(x).square().sum()
    loss.backward()
    torch.testing.assert_close(sums.added["0.weight"], expected[0])
    torch.testing.assert_close(sums.added["0.bias"], expected[1])


def test_w_of_a_zero_bubble_schedule_computes_compiled_blocks(caplog):
    expected = run(lambda: Blocks(4), pp_size=2)
    actual, _ = run_compiled(lambda: Blocks(4), pp_size=2, schedule="zb-h2")
    assert actual["losses"] == expected["losses"]
    assert_near(actual["gradients"], expected["gradients"])


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_inductor_must_not_write_to_what_w_needs():
    assert compile_keywords({"fullgraph": True, "options": {"epilogue_fusion": True}}) == {
        "fullgraph": True,
        "options": {"epilogue_fusion": True, "allow_buffer_reuse": False, "inplace_buffers": False},
    }
    assert compile_keywords({"backend": "eager"}) == {"backend": "eager"}
    # Options that inductor does not know are an error of torch's.
    torch.compile(lambda x: x, **compile_keywords({}))
    given = {"mode": "reduce-overhead"}
    with refused(
        "compile_blocks under a schedule that splits backward passes keeps tensors of compiled code for W, which needs "
        f"inductor without CUDA graphs and without a mode: got compile_blocks={given!r}. Leave these keywords out, or "
        "use a schedule that splits nothing, such as '1f1b'."
    ):
        compile_keywords(given)


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, False),
        ({"backend": "inductor", "options": {"epilogue_fusion": True}}, False),
        ({"mode": "reduce-overhead"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"backend": "cudagraphs"}, True),
    ],
)
def test_keywords_that_ask_for_cuda_graphs(keywords, expected):
    assert makes_cuda_graphs(keywords) is expected
