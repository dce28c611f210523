"""Small models by the way they run their blocks: tables that grow, keywords, branches, other orders, folds, states."""

import functools

import torch
from partition.user_models import Base
from torch import nn


class CachedTable(Base):
    """A table is made at the first forward, and made again where it is too short."""

    def __init__(self):
        super().__init__()
        self.table, self.length = None, 0
        self.register_buffer("turns", torch.zeros(0), persistent=False)

    def forward(self, x):
        if self.table is None or x.shape[1] > self.length:
            self.length = x.shape[1]
            self.table = torch.cos(torch.arange(self.length).float())[:, None]
            self.turns = torch.sin(torch.arange(self.length).float())[:, None]
        for block in self.blocks:
            x = block(x * self.table[: x.shape[1]]) + self.turns[: x.shape[1]]
        return self.head(x)


class Masking(nn.Linear):
    """Keeps a mask."""

    mask = None

    def forward(self, x):
        length = x.shape[1]
        if self.mask is None or len(self.mask) < length:
            self.mask = torch.tril(torch.ones(length, length))
        return self.mask[:length, :length] @ super().forward(x) + x


class ByKeyword(nn.Linear):
    """Takes keywords only."""

    def forward(self, *, hidden, mask=None, scale=1.0):
        hidden = super().forward(hidden) * scale
        return hidden if mask is None else hidden * mask


class Keywords(Base):
    """Other keywords for each block, out of a list."""

    def __init__(self):
        super().__init__(ByKeyword)

    def forward(self, x, mask=None):
        settings = [{"scale": 0.5}, {"mask": x[..., :1]}, {}, {"mask": mask, "scale": 2.0}]
        for block, keywords in zip(self.blocks, settings, strict=True):
            x = block(hidden=x, **keywords)
        return self.head(x)


class Flow(Base):
    """Branches on a shape, on what is missing, on a bool, and on values of an input."""

    def forward(self, x, mask=None, double=False):
        if x.shape[1] > 4:
            x = x[:, :4]
        if mask is None:
            mask = torch.ones(len(x), 1)
        first = self.blocks[0](x)
        h = self.blocks[2](self.blocks[1](first * mask))
        if double:
            h = h + first
        if mask.sum() > 0:
            h = h * 2
        return self.head(self.blocks[3](h))


class Order(Base):
    """An input says in which order the blocks run."""

    def forward(self, x, order):
        for number in order[0].tolist():
            x = torch.tanh(self.blocks[number](x))
        return self.head(x)


class Skipping(Base):
    """Leaves a block out for odd lengths, never all of a stage."""

    def __init__(self):
        super().__init__(number=8)

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if number != 2 or x.shape[1] % 2 == 0:
                x = block(x) + x
        return self.head(x)


class WithMask(nn.Linear):
    """Returns the mask that it makes of the inputs, too."""

    def forward(self, x, mask):
        return super().forward(x), mask > 0


class MasksBetween(Base):
    """Code between the blocks skips a mask that lets all through."""

    def __init__(self):
        super().__init__(ByKeyword)
        self.first = WithMask(4, 4)

    def forward(self, x, mask):
        x, mask = self.first(x, mask)
        scale = None if mask.all() else mask * 0.5
        for block in self.blocks:
            x = block(hidden=x, mask=scale)
        return self.head(x)


class TwoTowers(nn.Module):
    """Two inputs, two bodies, one score for each pair."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 5))
        self.right = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)], nn.Linear(3, 5))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, left, right):
        left, right = (nn.functional.normalize(part, dim=-1) for part in (self.left(left), self.right(right)))
        return left @ right.T * self.temperature.exp()


class InDict(nn.Module):
    """Blocks by name, called in another order than they were registered."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleDict({name: nn.Linear(4, 4) for name in "acbd"})
        self.head = nn.Sequential(nn.Linear(4, 2))

    def forward(self, x):
        for name in sorted(self.blocks):
            x = torch.tanh(self.blocks[name](x))
        return self.head(x)


class Backwards(Base):
    """From the last block to the first, out of a generator."""

    def forward(self, x):
        def chain():
            yield from enumerate(reversed(self.blocks))

        for number, block in chain():
            x = block(x) * (number + 1)
        return self.head(x)


class Reduced(Base):
    """A fold over the blocks."""

    def forward(self, x):
        return self.head(functools.reduce(lambda h, block: block(h) + h, self.blocks, x))


class Recurrent(nn.Module):
    """Blocks hand on a tuple of states."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.LSTM(4, 4, batch_first=True) for _ in range(4)])

    def forward(self, x):
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
        return x + state[0].mean()


TO_ROUNDING = {Skipping, Reduced, CachedTable, Flow, Order}
