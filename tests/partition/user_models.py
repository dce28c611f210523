"""Small models by what stages share: long skips, tied and shared weights, writes in place, frozen parts."""

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
    """Container code adds to the stream in place."""

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


# Uses of one parameter on several stages are added up in another order, and so is what comes back along a skip.
TO_ROUNDING = {TiedAutoencoder, TiedHead, OwnParameters, Shared, InPlaceResidual}
