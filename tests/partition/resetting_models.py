"""Models that keep something during a forward and throw it away at its end; and some that do not."""

import torch
from partition.user_models import Base
from torch import nn


class Causal(nn.Linear):
    """Mixes in the last of what it saw before, as a causal convolution that is given a film piece by piece."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.previous = None

    def forward(self, x):
        previous = x[:, :1] if self.previous is None else self.previous
        self.previous = x[:, -1:].clone()
        return super().forward(x + previous)


class Asking(Causal):
    """Only asks whether there was a piece before."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.first = None

    def forward(self, x):
        if self.first is None:
            self.first = x
        else:
            x = x * 0.5
        return super().forward(x)

    def __delattr__(self, name):
        super().__delattr__(name)
        if name == "previous":
            self.first = None


class Pieces(Base):
    """Runs all blocks on each third of the sequence."""

    def __init__(self):
        super().__init__(Asking)

    def forward(self, x):
        pieces = [super(Pieces, self).forward(piece) for piece in x.chunk(3, dim=1)]
        for block in self.blocks:
            del block.previous
            block.previous = None
        return torch.cat(pieces, dim=1)


class Once(Causal):
    """Keeps it in a buffer, and knows by a flag whether there is one."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        del self.previous
        self.register_buffer("previous", None, persistent=False)
        self.fresh = True

    def forward(self, x):
        if not self.fresh:
            x = x * 2
        self.fresh = False
        return super().forward(x)


class Flags(Base):
    """Each block runs once; the next forward must find none of it."""

    def __init__(self):
        super().__init__(Once)

    def forward(self, x):
        x = super().forward(x)
        for block in self.blocks:
            block.previous, block.fresh = None, True
        return x


class Adding(nn.Linear):
    """Adds to a list, and takes what is in it."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.seen = []

    def forward(self, x):
        self.seen.append(super().forward(x))
        return sum(self.seen)


class Lists(Base):
    """Lists of the blocks, and one of the model's own: one is emptied, the others are new each time."""

    def __init__(self):
        super().__init__(Adding)
        self.hidden = []

    def forward(self, x):
        for block in self.blocks:
            self.hidden.append(x)
            x = block(x) + self.hidden[0]
        x = self.head(x + self.hidden[0])
        self.hidden.clear()
        for block in self.blocks:
            block.seen = []
        return x


class ByContainerCode(Base):
    """Keeps the first block's result on itself: at first there is no such attribute, and later there is None."""

    start = None

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.start is None:
                self.start = x
            x = x + self.start
        self.start = None
        return self.head(x)


class Staying(nn.Linear):
    """Goes on where the micro-batch before ended: a memory, a count and a running mean."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.memory, self.passing, self.calls, self.sizes = None, None, 0, []
        self.register_buffer("mean", torch.zeros(outputs))

    def forward(self, x):
        h = super().forward(x)
        if self.memory is not None:
            h = h + self.memory * self.calls * len(self.sizes)
        self.memory = h.detach().mean(0, keepdim=True)
        self.mean = 0.9 * self.mean + 0.1 * self.memory.flatten(0, -2).mean(0)
        self.calls += 1
        self.sizes.append(len(x))
        self.passing = h
        return h + self.mean


class Memories(Base):
    """Of what its blocks keep, container code throws away one thing only."""

    def __init__(self):
        super().__init__(Staying)

    def forward(self, x):
        x = super().forward(x)
        for block in self.blocks:
            block.passing = None
        return x


class Detached(nn.Linear):
    """Keeps a state."""

    state = None

    def forward(self, x):
        self.state = super().forward(x if self.state is None else x + self.state)
        return self.state


class Replaced(Base):
    """Container code makes something else of the states that the blocks keep."""

    def __init__(self):
        super().__init__(Detached)

    def forward(self, x):
        x = super().forward(x)
        for block in self.blocks:
            block.state = block.state.detach()
        return x
