"""Container code that indexes by masks of inputs, which are the same on every stage."""

import pytest
import torch
from support import assert_same, train, trained_alone
from torch import nn

WIDTH = 4
GENERATOR = torch.Generator().manual_seed(1)
# As many marks in each micro-batch, at other places.
MARKS = torch.cat([torch.arange(10), torch.arange(10).flip(0)]).view(4, 5) % 3
BATCHES = [{"x": torch.randn(4, 5, WIDTH, generator=GENERATOR), "marks": MARKS} for _ in range(1)]


class Deepstack(nn.Module):
    """What is computed of the marked places alone is added there again after every block, as Qwen3-VL does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x, marks):
        mask = marks == 1
        side = self.side(x[mask])
        for block in self.blocks:
            x = block(x).tanh().clone()
            x[mask, :] = x[mask, :] + side
        return x


class Selecting(Deepstack):
    def forward(self, x, marks):
        x = self.side(x)
        mask = (marks == 1)[..., None].expand_as(x)
        for block in self.blocks:
            x = block(x).tanh() + x.masked_select(mask).mean() + x[(marks == 2)[:, :, None].expand_as(x)].tanh().mean()
        return x.repeat_interleave(marks.flatten().sort().values[:5] + 1, dim=1)


def square(outputs, inputs):
    return outputs.square().mean()


# One sample's mean is added to others.
square.reduction = "mean"


@pytest.mark.parametrize("make_model", [Deepstack, Selecting])
def test_a_mask_of_inputs_selects_alike_on_every_stage(make_model):
    alone = trained_alone(make_model, BATCHES, num_microbatches=2, criterion=square)
    cut = train(make_model, BATCHES, num_microbatches=2, criterion=square, pp_size=2)
    assert_same(cut["gradients"], alone["gradients"])
    assert cut["losses"][0] == alone["losses"][0]
