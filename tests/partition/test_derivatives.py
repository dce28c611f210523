"""A forward that computes derivatives (forces, gradient penalties) gives the numbers of one process, or is refused."""

import re

import pytest
import torch
from support import assert_near, train, trained_alone
from torch import nn

from hybridpp.errors import PartitionError

# Torch hides it; the filter that makes warnings errors comes before.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

WIDTH = 6


class Block(nn.Module):
    """A norm and two layers; they are replicated and sharded layers, between which sequences are shards."""

    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return x + self.narrow(self.wide(self.norm(x)).tanh())


class Forces(nn.Module):
    """An energy and its derivatives with respect to positions, in container code."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.options = options

    def forward(self, positions):
        positions = positions.detach().requires_grad_()
        with torch.enable_grad():
            x = self.first(positions)
            for block in self.blocks:
                x = block(x)
            energy = self.last(x).sum((1, 2))
            (forces,) = torch.autograd.grad(energy.sum(), positions, create_graph=True, **self.options)
        return energy, forces


def of_both(outputs, inputs):
    return outputs[0].square().mean() + outputs[1].square().mean()


BATCHES = [{"positions": torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(n))} for n in range(2)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_sequence_parallelism": True},
        {"enable_sequence_parallelism": True, "schedule": "zb-h1", "gradient_checkpoint_config": {}},
    ],
)
def test_sharded_layers_have_the_gradients_of_gradients_of_one_process(settings):
    alone = trained_alone(Forces, BATCHES, criterion=of_both)
    together = train(Forces, BATCHES, criterion=of_both, tp_size=2, **settings)
    assert_near(together["gradients"], alone["gradients"], 3e-6)
    assert_near(together["weights"], alone["weights"], 3e-6)


@pytest.mark.parametrize("options", [{}, {"allow_unused": True, "materialize_grads": True}])
def test_a_derivative_that_a_cut_divides_is_refused_at_boost(options):
    text = "goes back through 'first' of stage 0, but it runs on stage 1: autograd has the graph of one stage only"
    with pytest.raises(PartitionError, match=re.escape(text)):
        train(lambda: Forces(**options), BATCHES, criterion=of_both, pp_size=2)


class Transformed(Forces):
    """The derivatives by a transform of torch.func, or by a whole backward pass."""

    def forward(self, positions):
        if self.options["by"] == "func":
            return self.energy(positions), torch.func.grad(self.energy)(positions)
        torch.autograd.backward(self.energy(positions.detach().requires_grad_()))
        return self.energy(positions), positions

    def energy(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).sum()


@pytest.mark.parametrize(
    ("by", "text"),
    [("func", "unit 'first' is called inside a transform of torch.func"), ("backward", "goes back to what this stage")],
)
def test_other_backward_passes_inside_a_forward_that_is_cut_are_refused(by, text):
    with pytest.raises(PartitionError, match=re.escape(text)):
        train(lambda: Transformed(by=by), BATCHES, criterion=of_both, pp_size=2)


class Inner(Block):
    """A block that adds the derivative of its own energy, and of one that it was given the inputs of."""

    def forward(self, x, positions=None):
        energy = super().forward(x).square().sum()
        of = x if positions is None else positions
        (slope,) = torch.autograd.grad(energy, of, create_graph=True, allow_unused=True, materialize_grads=True)
        return x + 0.1 * (slope if positions is None else slope.sum())


class WithInner(nn.Module):
    """Blocks with derivatives of their own; container code has one of the last block."""

    def __init__(self, gives_inputs=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gives_inputs = nn.Linear(3, WIDTH), gives_inputs
        self.blocks, self.last = nn.ModuleList(Inner() for _ in range(4)), nn.Linear(WIDTH, 1)

    def forward(self, positions):
        x = self.first(positions.requires_grad_() if self.gives_inputs else positions)
        for block in self.blocks:
            x = block(x)
        y = block(x, positions) if self.gives_inputs else block(x)
        energy = self.last(y).sum((1, 2))
        (slope,) = torch.autograd.grad(energy.sum(), y, create_graph=True)
        return energy, slope


def test_derivatives_within_one_stage_have_the_numbers_of_one_process():
    alone = trained_alone(WithInner, BATCHES, criterion=of_both)
    together = train(WithInner, BATCHES, criterion=of_both, pp_size=2)
    assert_near(together["weights"], alone["weights"], 3e-6)


def test_a_block_that_differentiates_other_stages_is_refused_at_boost():
    with pytest.raises(PartitionError, match=re.escape("unit 'blocks.3' computes a derivative inside the forward")):
        train(lambda: WithInner(gives_inputs=True), BATCHES, criterion=of_both, pp_size=2)
