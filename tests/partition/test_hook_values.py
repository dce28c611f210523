"""What forward hooks of modules inside of blocks collect for the model's own forward, on whichever stage it is used."""

from contextvars import ContextVar

import pytest
import torch
from support import assert_same, train, trained_alone
from torch import nn

COLLECTED: ContextVar[dict[str, list[torch.Tensor]] | None] = ContextVar("collected", default=None)
ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.linear = nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x) * self.router(x).softmax(-1)[:, :1]


class ByContext(nn.Module):
    """Its hooks find the lists in a context variable, as transformers' do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(4)]), nn.Linear(4, 2)

        def collect(module, args, output):
            COLLECTED.get()["logits"].append(output)

        for block in self.blocks:
            block.router.register_forward_hook(collect)

    def forward(self, x):
        token = COLLECTED.set(found := {"logits": []})
        try:
            for block in self.blocks:
                x = block(x)
        finally:
            COLLECTED.reset(token)
        # Products of means, as a loss that balances experts has: each layer counts differently.
        balance = sum((1 + n) * logits.softmax(-1).mean(0).square().sum() for n, logits in enumerate(found["logits"]))
        return self.head(x), balance


class Lazily(ByContext):
    """Its first forward registers its hooks, and says so in a new attribute, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.hooks = [next(iter(block.router._forward_hooks.values())) for block in self.blocks]
        for block in self.blocks:
            block.router._forward_hooks.clear()

    def forward(self, x):
        if not getattr(self, "is_hooked", False):
            for block, hook in zip(self.blocks, self.hooks, strict=True):
                block.router.register_forward_hook(hook)
            self.is_hooked = True
        return super().forward(x)


class ByList(ByContext):
    """Its hooks append to a list that is an attribute of the model, a new one in each forward."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.router._forward_hooks.clear()
            block.router.register_forward_hook(lambda module, args, output: self.logits.append(output))

    def forward(self, x):
        self.logits = []
        for block in self.blocks:
            x = block(x)
        return self.head(x), sum((1 + n) * logits.square().mean() for n, logits in enumerate(self.logits))


def loss(outputs, inputs):
    return outputs[0].square().mean() + outputs[1]


loss.reduction = "mean"  # of what micro-batches give: products of means couple samples


# A loss that balances experts is no mean over items.
loss.reduction = "mean"


@pytest.mark.parametrize("make_model", [ByContext, Lazily, ByList])
@pytest.mark.parametrize(
    "layout", [{"pp_size": 2}, {"pp_size": 2, "schedule": "zb-v", "num_model_chunks": 2}], ids=["pp2", "zb-v"]
)
def test_what_hooks_inside_blocks_collect_is_used_on_the_last_stage(make_model, layout):
    alone = trained_alone(make_model, [ROWS, ROWS], num_microbatches=2, criterion=loss)
    cut = train(make_model, [ROWS, ROWS], num_microbatches=2, criterion=loss, **layout)
    assert_same(cut["gradients"], alone["gradients"])
    assert_same(cut["weights"], alone["weights"])
    assert cut["losses"][0] == alone["losses"][0]
