"""Small models whose container code does what is hard to cut."""

import torch
from torch import nn


class Blocks(nn.Module):
    """Embedding, four linear blocks, head; subclasses say how they are joined."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.same = nn.Identity()
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class LongSkip(Blocks):
    """A value made on the first stage and needed on the last."""

    def forward(self, x):
        skip = h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h + skip)


class IdentitySkip(Blocks):
    """A unit returns its argument, and the old name is used again far behind."""

    def forward(self, x):
        skip = self.blocks[0](self.embed(x))
        h = self.blocks[1](self.same(skip))
        h = self.blocks[2](h) + skip
        return self.head(self.blocks[3](h) + skip)


class WrittenView(Blocks):
    """A buffer gets its values through a view."""

    def forward(self, x):
        buffer = torch.zeros(len(x), 4)
        buffer[:, :2].copy_(self.embed(x)[:, :2])
        h = self.blocks[1](self.blocks[0](x)) + buffer
        return self.head(self.blocks[3](self.blocks[2](h)) + buffer)


class WrittenOutput(Blocks):
    """Container code writes to what a unit returned, and needs it again far behind."""

    def forward(self, x):
        h = self.blocks[0](self.embed(x))
        h += 1
        late = self.blocks[2](self.blocks[1](h))
        late *= 2
        return self.head(self.blocks[3](late) + h)


class WritingUnit(Blocks):
    """A unit writes to its argument; the result is not looked at, only the argument."""

    def forward(self, x):
        h = self.blocks[0](self.embed(x))
        part = h[:, :2]
        self.relu(h)
        late = self.blocks[2](self.blocks[1](h)) + h
        return self.head(self.blocks[3](late) + part.sum())


class Halving(nn.Linear):
    """Writes to its argument and returns something else."""

    def forward(self, h):
        h.mul_(0.5)
        return super().forward(h)


class WritingBlock(Blocks):
    """As the unit above, but what is written to is not what is returned."""

    def __init__(self):
        super().__init__()
        self.blocks[1] = Halving(4, 4)

    def forward(self, x):
        h = self.blocks[0](self.embed(x)) * 1
        part = h[:, :2]
        late = self.blocks[2](self.blocks[1](h)) + h
        return self.head(self.blocks[3](late) + part.sum())


class WrittenInput(Blocks):
    """The model writes to its input, not only once per signature."""

    def forward(self, x):
        x = x.mul_(2)
        return super().forward(x) + x.sum()


class Repeated(Blocks):
    """One block called several times."""

    def forward(self, x):
        h = self.embed(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[3]):
            h = block(h)
        return self.head(h)


class Again(Blocks):
    """Its blocks are one module, called again and again."""

    def __init__(self):
        super().__init__()
        self.blocks = self.blocks[:1]

    def forward(self, x):
        h = self.embed(x)
        for _ in range(4):
            h = self.blocks[0](h)
        return self.head(h)


class LookingLoss(Blocks):
    """What follows the last unit looks at values, and uses one from the first stage."""

    def forward(self, x):
        first = h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        result = self.head(h)
        return result * result.max().item() + first.sum()


EVERY = [
    Blocks,
    LongSkip,
    IdentitySkip,
    WrittenView,
    WrittenOutput,
    WritingUnit,
    WritingBlock,
    WrittenInput,
    Repeated,
    Again,
    LookingLoss,
]
