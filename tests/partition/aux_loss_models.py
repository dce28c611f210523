"""Models whose blocks leave tensors on themselves, as mixtures of experts leave their auxiliary losses."""

import torch
from partition.user_models import Base
from torch import nn


class Gate(nn.Module):
    """Deep in a block, with a value to begin with."""

    def __init__(self):
        super().__init__()
        self.aux_loss = torch.zeros(())
        self.register_buffer("load", torch.zeros(4), persistent=False)

    def forward(self, x):
        probabilities = torch.dropout(x, 0.3, self.training).softmax(-1)
        self.aux_loss = probabilities.square().mean()
        self.load = probabilities.reshape(-1, 4).mean(0)
        return x * probabilities


class Routed(nn.Module):
    """A gate and a layer; something for the container code on both."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.gate, self.linear, self.last = Gate(), nn.Linear(inputs, outputs), None

    def forward(self, x):
        x = self.linear(self.gate(x))
        self.last = {"mean": x.mean(), "parts": (x, x.sum())}
        return x


class AuxiliaryLosses(Base):
    """Container code sums up at the end what all blocks left."""

    def __init__(self):
        super().__init__(Routed)

    def forward(self, x):
        x = super().forward(x)
        for block in self.blocks:
            x = x + block.gate.aux_loss + block.gate.load.max() + block.last["mean"] * block.last["parts"][1].tanh()
        return x + sum(part.aux_loss for part in self.modules() if isinstance(part, Gate))


class InBetween(Base):
    """Container code reads each right after its block, and the first one later; some it never reads."""

    def __init__(self):
        super().__init__(Routed)

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 2:
                x = x + block.gate.aux_loss
        return self.head(x) * self.blocks[0].last["mean"]


class Peeking(nn.Linear):
    """Looks at values, so that the trace must run it on made-up ones; leaves its loss in a list of its own."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.aux_loss, self.losses = 0.0, []

    def forward(self, x):
        h = super().forward(x)
        self.aux_loss = h.mean() if h.sum() > 1e9 else h.square().mean()
        self.losses.append(h.abs().mean())
        return h


class OwnLists(Base):
    """The lists are emptied before."""

    def __init__(self):
        super().__init__(Peeking)

    def forward(self, x):
        for block in self.blocks:
            block.losses.clear()
        x = super().forward(x)
        return x + sum(block.aux_loss * sum(block.losses) for block in self.blocks)


class Appending(nn.Linear):
    """Adds to a list that it was given when it was made."""

    losses = None

    def forward(self, x):
        self.losses.append(super().forward(x).mean())
        return super().forward(x)


class OneList(Base):
    """Of all blocks."""

    def __init__(self):
        super().__init__(Appending)
        self.losses = []
        for block in self.blocks:
            block.losses = self.losses

    def forward(self, x):
        self.losses.clear()
        x = super().forward(x)
        return x + sum(loss * number for number, loss in enumerate(self.losses, 1))


class Norming(nn.LayerNorm):
    """Keeps a mask that it makes once, and says how large its input was."""

    mask, size = None, 0.0

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(4)
        self.size = x.abs().mean()
        return super().forward(x) * self.mask


class SharedUnit(Base):
    """Every stage calls it, and container code reads what each call left."""

    def __init__(self):
        super().__init__()
        self.norm = Norming(4)

    def forward(self, x):
        sizes = []
        for block in self.blocks:
            x = self.norm(block(x))
            sizes.append(self.norm.size)
        return self.head(x) * torch.stack(sizes).sum()


TO_ROUNDING = {AuxiliaryLosses, InBetween, OwnLists, OneList, SharedUnit}
