"""Small models as users write them: long skips, shared weights, caches, frozen parts, lists in many forms."""

import functools

import torch
from torch import nn


class Base(nn.Module):
    """Four linear blocks in a row and a head; subclasses say how they are joined."""

    def __init__(self, block=nn.Linear, number=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block(4, 4) for _ in range(number)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Conv(nn.Module):
    """A convolution with a norm."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(1, outputs)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Each way up takes what the way down left, in reverse."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.downs = nn.ModuleList([Conv(3, 4), Conv(4, 6), Conv(6, 8)])
        self.middle = Conv(8, 8)
        self.ups = nn.ModuleList([Conv(16, 6), Conv(12, 4), Conv(8, 4)])
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up in self.ups:
            skip = skips.pop()
            x = nn.functional.interpolate(x, size=skip.shape[-2:])
            x = up(torch.cat([x, skip], 1))
        return self.out(x)


class Pyramid(nn.Module):
    """What every block gave is used once more, from the last to the first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList([Conv(3, 4), Conv(4, 4), Conv(4, 4), Conv(4, 4)])
        self.lateral = nn.ModuleList([nn.Conv2d(4, 3, 1) for _ in range(4)])

    def forward(self, x):
        levels = []
        for block in self.body:
            x = block(x)
            levels.append(x)
            x = nn.functional.avg_pool2d(x, 2) if x.shape[-1] > 1 else x
        out = None
        for level, lateral in zip(reversed(levels), reversed(self.lateral), strict=True):
            here = lateral(level)
            out = here if out is None else here + nn.functional.interpolate(out, size=here.shape[-2:])
        return out


class TiedAutoencoder(Base):
    """The decoder uses the encoder's weights transposed."""

    def forward(self, x):
        x = super().forward(x) @ self.head.weight
        for block in reversed(self.blocks):
            x = torch.tanh(x @ block.weight)
        return x


class TiedHead(nn.Module):
    """The embedding's weight gives the scores."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.linear(x, self.embed.weight)


class OwnParameters(Base):
    """The model's forward uses parameters of its own: in front, between blocks, and of a list."""

    def __init__(self):
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, 4))
        self.position = nn.Parameter(torch.randn(1, 9, 4))
        self.gain = nn.ParameterList([nn.Parameter(torch.rand(4)) for _ in range(4)])

    def forward(self, x):
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        x = x + self.position[:, : x.shape[1]]
        for block, gain in zip(self.blocks, self.gain, strict=True):
            x = x + block(x) * gain
        return self.head(x[:, 0])


class Shared(Base):
    """Modules that every stage calls."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = self.norm(x + self.mix(block(x)))
        return self.head(x)


class InPlaceResidual(Base):
    """Glue adds to the stream in place."""

    def forward(self, x):
        x = x.clone()
        for block in self.blocks:
            x += block(x * 2)
        return self.head(x)


class AddsToItsInput(nn.Linear):
    """Writes to its input, and returns it."""

    def forward(self, x):
        return x.add_(super().forward(x.clone()))


class InPlaceBlocks(Base):
    """Blocks write to their input; whoever holds it from before sees that."""

    def __init__(self):
        super().__init__(AddsToItsInput)
        self.embed = nn.Linear(4, 4)

    def forward(self, x):
        first = h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h) + first.sum()


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


class FrozenEmbedding(Base):
    """Nothing that requires a gradient enters the first block."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4).requires_grad_(False)

    def forward(self, ids):
        return super().forward(self.embed(ids))


class FrozenStages(Base):
    """All of some stages is frozen: the first, and one in the middle."""

    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


class Adapter(nn.Module):
    """A frozen layer with a small trainable way around it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inputs) * 0.1)
        self.up = nn.Parameter(torch.randn(outputs, 2) * 0.1)

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


class Normed(nn.Module):
    """With running statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            *[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)) for _ in range(4)]
        )

    def forward(self, x):
        return self.body(x)


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


# Uses of one parameter on several stages are added up in another order, and so is what comes back along a skip.
TO_ROUNDING = {
    Skipping,
    TiedAutoencoder,
    TiedHead,
    OwnParameters,
    Shared,
    Reduced,
    InPlaceResidual,
    CachedTable,
    Flow,
    Order,
}
