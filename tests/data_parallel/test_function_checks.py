"""Autograd functions that add gradients of their own are found; all others run as if nothing looked at them."""

import pytest
import torch
from support import boosted, sgd
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from hybridpp.cluster import Loopback
from hybridpp.data_parallel.function_checks import FunctionChecks
from hybridpp.data_parallel.hook_checks import GradientFactor
from hybridpp.errors import ConfigError

DATA = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class WithLoss(Function):
    """Passes ``x`` on, and adds ``read()`` times the gradient of a scalar loss."""

    @staticmethod
    def forward(ctx, x, loss, read):
        ctx.save_for_backward(loss)
        ctx.read = read
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones_like(*ctx.saved_tensors) * ctx.read(), None


class Penalty(Function):
    """Adds the gradient of the sum of absolute values, over a number."""

    @staticmethod
    def forward(ctx, x, over_number):
        ctx.save_for_backward(x)
        ctx.over_number = over_number
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient + 0.1 * x.sign() / (x.numel() if ctx.over_number else 1), None


class Decayed(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0) + 0.01 * weight


class Quantised(Function):
    """Rounds gradients by chance, on a scale that is none for zeros."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        scale = gradient.abs().max() / 7
        return (gradient / scale + torch.rand_like(gradient) - 0.5).round() * scale


class SavesItsGradient(Function):
    """Computes its gradient in the forward, and scales that in place; it lets go of what it has kept."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(2 * x)
        ctx.module, ctx.kept = module, 3 * x
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)
        return x * x, index, 3 * x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, of_index, of_third):
        assert of_third is None
        ctx.module.calls.append(gradient)
        del ctx.kept
        return ctx.saved_tensors[0].data.mul_(gradient), None


class RunsBackward(Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layer(x).backward(gradient)
        return x.grad, None


class Block(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.calls = []
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))
        self.call, self.factor = call, GradientFactor()

    def forward(self, x):
        return self.call(self, self.first(x)).square().mean()


CALLS = {
    "loss": lambda block, x: WithLoss.apply(x, x.mean().square(), lambda: 1.0),
    "loss with the factor": lambda block, x: WithLoss.apply(x, x.mean().square(), block.factor.read),
    "mean": lambda block, x: Penalty.apply(x, True),
    "sum": lambda block, x: Penalty.apply(x, False),
    "decay": lambda block, x: Decayed.apply(x, block.weight),
    "quantised": lambda block, x: Quantised.apply(3 * x),
    "in place": lambda block, x: SavesItsGradient.apply(x, block)[0],
    "backward inside": lambda block, x: RunsBackward.apply(x, block.second),
}
ADDING = {"loss": "WithLoss", "mean": "Penalty", "decay": "Decayed"}


def passed(call, *, checked, recomputed=False):
    """What the checks find in a backward pass, gradients after it, and what it leaves."""
    torch.manual_seed(0)
    block = Block(call)
    loss = checkpoint(block, DATA, use_reentrant=False) if recomputed else block(DATA)
    checks = FunctionChecks(block.factor)
    with checks.trying([loss.grad_fn] if checked else []):
        loss.backward()
    kept = [parameter.grad for parameter in block.parameters() if parameter.grad is not None]
    return checks.found, [*kept, torch.rand(2), torch.tensor(len(block.calls))]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("kind", CALLS)
def test_only_functions_that_add_gradients_without_the_factor_are_found(kind, recomputed):
    found, kept = passed(CALLS[kind], checked=True, recomputed=recomputed)
    _, plain = passed(CALLS[kind], checked=False, recomputed=recomputed)
    assert all(map(torch.equal, kept, plain))
    assert len(kept) == len(plain)
    words = f"backward pass of the autograd function '{ADDING.get(kind)}' adds a gradient of its own"
    assert (words in found) if kind in ADDING else not found


def test_where_the_script_has_read_the_factor_elsewhere_nothing_is_found():
    def call(block, x):
        kept = block.factor.read()
        return WithLoss.apply(x, x.mean().square(), lambda: kept)

    assert not passed(call, checked=True)[0]


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return WithLoss.apply(self.layer(x), self.weight * 1.0, lambda: 1.0)


def refusals(num_ranks, *, own=False, **settings):
    """What each rank raises in a step of a model that adds gradients; where none is raised, the gradient."""

    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Adding())
        booster, model, optimizer = boosted(model, sgd, DATA[:1], **settings)
        part = DATA.chunk(booster.plugin.dp_size)[booster.plugin.layout.here.dp]

        def criterion(outputs, _=None):
            return outputs.float().square().mean()

        try:
            if own:
                booster.backward(criterion(model(part)), optimizer)
            else:
                booster.execute_pipeline(iter([part]), model, criterion, optimizer)
        except ConfigError as error:
            return str(error)
        return float(model[3].weight.grad)

    return Loopback(num_ranks).run(run)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (1, {"num_microbatches": 2, "precision": "bf16", "gradient_checkpoint_config": {}}),
        (2, {}),
        (2, {"own": True, "zero_stage": 1}),
        (2, {"pp_size": 2, "num_microbatches": 2}),
    ],
    ids=str,
)
def test_an_added_gradient_without_the_factor_is_refused_on_every_rank(num_ranks, settings):
    found = refusals(num_ranks, **settings)
    assert len(set(found)) == 1
    assert "'WithLoss' adds a gradient of its own" in found[0]
    assert "Multiply what it adds by booster.gradient_scale" in found[0]


def test_an_added_gradient_runs_in_a_whole_batch():
    assert refusals(1) == [1.0]
