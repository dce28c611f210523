"""A backward pass in two parts gives what autograd gives."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from hybridpp.module_adapter import ModuleAdapter
from hybridpp.pipeline import WeightGradients


class Sums:
    """Gradients by name, as the plugin keeps them: views that ``parameter.grad`` shows."""

    def __init__(self, model, dtype=None):
        self.gradients = {name: torch.zeros_like(p, dtype=dtype) for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            if dtype in (None, parameter.dtype):
                parameter.grad = self.gradients[name]
        self.log = []

    def defer(self, names):
        self.log.extend(("postponed", name) for name in names)

    def mark_reached(self, names):
        self.log.extend(("reached", name) for name in names)

    def add(self, name, gradient):
        self.gradients[name].add_(gradient)

    def takes_products(self, name):
        return False

    def mark_complete(self, name):
        self.log.append(("completed", name))


def separated(model, x, how, loss=lambda y: y.square().sum(), passes=2):
    """Gradients after some passes, and what was reported."""
    model = copy.deepcopy(model)
    weights = WeightGradients(ModuleAdapter(model))
    sums = Sums(model)
    weights.attach_sink(sums)
    weights.begin(splits=True)
    for _ in range(passes):
        with weights.recording_forward(splits=how == "later"):
            value = loss(model(x))
        weights.begin_at([value.grad_fn])
        if how == "at once":
            with weights.full_backward():
                value.backward()
        else:
            with weights.input_backward(splits=True) as tasks:
                value.backward()
            weights.add(tasks, final=True)
            assert tasks == []
    return sums


def plain(model, x, loss=lambda y: y.square().sum(), passes=2):
    model = copy.deepcopy(model)
    for _ in range(passes):
        loss(model(x)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class Tied(nn.Module):
    """An embedding whose weight is the head's too, and is used by container code as well."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x).tanh()) + functional.linear(self.embedding(x), self.embedding.weight)


class Added(nn.Module):
    """Embeddings that are added up in place, and a view of a layer's output that is written to."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions, self.layer = nn.Embedding(11, 6), nn.Embedding(11, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = self.tokens(x)
        h += self.positions(x)
        y = self.layer(h)
        y[..., :2] *= 2
        return y


class Substituted(nn.Module):
    """Calls of layers with other tensors in their weights' places: computed ones, and another layer's."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.masked = nn.Linear(6, 6)
        self.masked.register_forward_pre_hook(self._mask)
        self.masked.register_forward_hook(self._restore)

    def _mask(self, layer, args):
        self.__dict__["_kept"] = layer._parameters["weight"]
        layer._parameters["weight"] = self._kept * self.scale

    def _restore(self, layer, args, output):
        layer._parameters["weight"] = self.__dict__.pop("_kept")

    def forward(self, x):
        x = functional_call(self.layer, {"weight": self.layer.weight.tril() * self.scale}, (x,)).tanh()
        x = functional_call(self.layer, {"weight": self.other.weight, "bias": self.other.bias}, (x,)).tanh()
        return self.masked(self.other(self.layer(x)))


class Checkpointed(nn.Module):
    """A layer that is run again in the backward pass."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.layer = nn.Linear(6, 6), nn.Linear(6, 6)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(lambda h: self.layer(h).tanh(), self.first(x), use_reentrant=self.use_reentrant)


class InnerDerivative(nn.Module):
    """A layer that is run again in the backward pass, and whose code runs a backward pass itself before."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return checkpoint(self._run, self.layer(x), use_reentrant=False)

    def _run(self, x):
        probe = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.layer(probe).square().sum(), probe)
        return self.layer(x).tanh() * slope


IDS = torch.tensor([[1, 2, 2], [3, 1, 10]])
MODELS = {
    "linear": (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)), torch.randn(2, 4, 6)),
    "linear, one sample": (nn.Linear(6, 5), torch.randn(6)),
    "linear, frozen bias": (nn.Linear(6, 5), torch.randn(2, 6)),
    "conv1d": (nn.Sequential(Conv1D(5, 6), nn.Tanh(), Conv1D(3, 5)), torch.randn(2, 4, 6)),
    "conv2d": (
        nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 2, groups=2, dilation=2)),
        torch.randn(2, 3, 12, 12),
    ),
    "conv2d, same": (nn.Conv2d(3, 4, 3, padding="same"), torch.randn(2, 3, 8, 8)),
    "conv2d, reflected": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), torch.randn(2, 3, 8, 8)),
    "conv2d, one sample": (nn.Conv2d(3, 4, 3), torch.randn(3, 8, 8)),
    "embedding": (nn.Sequential(nn.Embedding(11, 6, padding_idx=1), nn.Linear(6, 2)), IDS),
    "embedding, by frequency": (nn.Embedding(11, 6, scale_grad_by_freq=True), IDS),
    "embedding, renormed": (nn.Embedding(11, 6, max_norm=1.0), IDS),
    "norm": (nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), torch.randn(2, 6)),
    "twice": (Twice(), torch.randn(2, 6)),
    "tied": (Tied(), IDS),
    "added": (Added(), IDS),
    "substituted": (Substituted(), torch.randn(2, 6)),
    "checkpointed": (Checkpointed(use_reentrant=False), torch.randn(2, 6)),
    "checkpointed, reentrant": (Checkpointed(use_reentrant=True), torch.randn(2, 6)),
    "inner derivative": (InnerDerivative(), torch.randn(2, 6)),
    "parametrized": (parametrizations.weight_norm(nn.Linear(6, 5)), torch.randn(2, 6)),
    "attention": (nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), torch.randn(2, 4, 6)),
}
MODELS["linear, frozen bias"][0].bias.requires_grad_(False)


@pytest.mark.parametrize("name", MODELS)
def test_both_ways_give_the_gradients_of_autograd(name):
    model, x = MODELS[name]
    expected = plain(model, x)
    full_backward, input_backward = (separated(model, x, how).gradients for how in ("at once", "later"))
    for parameter, gradient in expected.items():
        gradient = torch.zeros_like(full_backward[parameter]) if gradient is None else gradient
        assert torch.equal(full_backward[parameter], gradient), f"{parameter}: not what autograd gives"
        # Other code uses a weight too: what it adds comes before what is left for later.
        if name in ("tied", "substituted"):
            torch.testing.assert_close(input_backward[parameter], gradient)
        else:
            assert torch.equal(input_backward[parameter], gradient), f"{parameter}: not what autograd gives"


def names_of(log, kind):
    return [name for what, name in log if what == kind]


def test_what_is_left_for_later_is_announced_and_completed_once():
    log = separated(Twice(), torch.randn(2, 6), "later", passes=1).log
    assert names_of(log, "postponed") == ["layer.weight", "layer.bias"] * 2
    assert names_of(log, "reached") == ["layer.weight", "layer.bias"]
    assert names_of(log, "completed") == ["layer.weight", "layer.bias"]


@pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d", "embedding"])
def test_these_layers_are_left_for_later(name):
    model, x = MODELS[name]
    log = separated(model, x, "later", passes=1).log
    assert set(names_of(log, "completed")) == {name for name, _ in model.named_parameters()}


def hooked(model):
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    return model


def test_hooks_on_parameters_are_obeyed():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    x = torch.randn(2, 6)
    expected = plain(model, x)
    weights = WeightGradients(ModuleAdapter(hooked(model)))
    weights.attach_sink(sums := Sums(model))
    weights.begin(splits=True)
    for _ in range(2):
        with weights.recording_forward(splits=True):
            value = model(x).square().sum()
        with weights.input_backward(splits=True) as tasks:
            value.backward()
        weights.add(tasks)
    torch.testing.assert_close(sums.gradients["0.weight"], 2 * expected["0.weight"])
    assert "0.weight" not in names_of(sums.log, "reached")
    assert "1.weight" in names_of(sums.log, "reached")


def test_a_gradient_inside_the_loss_is_autograds_own():
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)), torch.randn(3, 6, requires_grad=True)

    def penalty(y):
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.sum() + slope.square().sum()

    expected = plain(model, x, penalty)
    for how in ("at once", "later"):
        gradients = separated(model, x, how, penalty).gradients
        for name, gradient in expected.items():
            torch.testing.assert_close(
                gradients[name], torch.zeros_like(gradients[name]) if gradient is None else gradient
            )


def test_half_precision_adds_up_in_the_format_of_the_sum():
    model, x = nn.Linear(6, 5).bfloat16(), torch.randn(2, 4, 6).bfloat16()
    weights = WeightGradients(ModuleAdapter(model))
    weights.attach_sink(sums := Sums(model, torch.float32))
    weights.begin(splits=True)
    with weights.recording_forward(splits=True):
        value = model(x).float().square().sum()
    with weights.input_backward(splits=True) as tasks:
        value.backward()
    weights.add(tasks)
    expected = plain(model, x, lambda y: y.float().square().sum(), passes=1)
    for name, total in sums.gradients.items():
        assert total.dtype == torch.float32
        torch.testing.assert_close(total.bfloat16(), expected[name], atol=0.1, rtol=0.02)
    assert model.weight.grad is None


def test_outside_of_a_schedule_layers_run_as_ever():
    model, x = nn.Linear(6, 5), torch.randn(2, 6)
    weights = WeightGradients(ModuleAdapter(model))
    weights.attach_sink(sums := Sums(model))
    model.zero_grad()
    model(x).sum().backward()
    assert model.weight.grad is not None
    assert sums.log == []
    twin = copy.deepcopy(model)
    twin(x).sum().backward()
    weights.begin(splits=True)
    with torch.autocast("cpu", torch.bfloat16), weights.recording_forward(splits=True):
        assert model(x).dtype is torch.bfloat16
