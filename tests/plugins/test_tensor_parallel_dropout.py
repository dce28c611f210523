"""Dropout on divided layers: whole activations draw alike on all ranks, divided ones apart, and both reproducibly."""

import pytest
import torch
from support import assert_near, assert_same, train
from torch import nn
from torch.nn import functional

PLAN = {"*.up": "column", "*.down": "row"}


class Block(nn.Module):
    """A block that drops numbers of whole activations and, inside, of divided ones."""

    def __init__(self, outside, inside):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.outside, self.inside = outside, inside

    def forward(self, x):
        inner = functional.dropout(self.up(x), self.inside, self.training)
        return x + functional.dropout(self.down(inner), self.outside, self.training)


class Net(nn.Module):
    def __init__(self, outside, inside):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(outside, inside) for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def squares(outputs, inputs):
    return outputs.square().mean()


BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def run(outside, inside, **layout):
    plan = {} if layout.get("tp_size", 1) == 1 else {"tensor_parallel_plan": PLAN}
    options = {"criterion": squares, "num_microbatches": 2, **plan, **layout}
    return train(lambda: Net(outside, inside), BATCHES, **options)


def test_whole_activations_draw_the_mask_of_one_process():
    whole = run(0.5, 0.0)
    for layout in ({"tp_size": 2}, {"tp_size": 4}, {"tp_size": 2, "pp_size": 2}):
        divided = run(0.5, 0.0, **layout)
        assert_near(divided["gradients"], whole["gradients"])
        assert_near(divided["weights"], whole["weights"])


LAYOUTS = [
    {"pp_size": 2},
    {"pp_size": 4},
    {"pp_size": 2, "schedule": "zb-h1"},
    {"pp_size": 2, "schedule": "interleaved", "num_model_chunks": 2},
    {"gradient_checkpoint_config": {}},
    {"pp_size": 2, "gradient_checkpoint_config": {}},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_masks_of_divided_activations_do_not_depend_on_stages_and_schedule(layout):
    expected = run(0.3, 0.3, tp_size=2)
    divided = run(0.3, 0.3, tp_size=2, **layout)
    assert divided["losses"][0] == expected["losses"][0]
    assert_same(divided["gradients"], expected["gradients"])


def test_divided_activations_draw_masks_of_their_own():
    class Seen(Block):
        def forward(self, x):
            ones = functional.dropout(self.up(x) * 0 + 1, 0.5, self.training)
            masks.append((self.up.weight.shape[0], (ones > 0).flatten().tolist()))
            return self.down(ones) + x

    class Single(Net):
        def __init__(self):
            super().__init__(0.0, 0.0)
            self.blocks = nn.ModuleList([Seen(0.0, 0.0)])

    masks = []
    train(Single, BATCHES[:1], criterion=squares, tp_size=2, num_microbatches=1, tensor_parallel_plan=PLAN)
    (width, first), (_, second) = masks
    assert width == 8
    assert first != second
