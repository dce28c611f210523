"""Small models whose layers are attributes, one level down or more: wrappers, towers, a backbone and a head."""

import torch
from torch import nn


class _Block(nn.Module):
    """Two linear layers and dropout."""

    def __init__(self, width=4):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(width, 8), nn.Dropout(0.2), nn.Linear(8, width)

    def forward(self, x):
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class _Net(nn.Module):
    """Layers as attributes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three, self.four = (_Block() for _ in range(4))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.four(self.three(self.two(self.one(x)))))


class _Mixed(nn.Module):
    """Layers of different kinds as attributes, and a head in a list."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 9), nn.LayerNorm(9), nn.Linear(9, 4)
        self.third = _Block()
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x):
        return self.head(self.third(self.second(self.norm(self.first(x)))))


class WithLoss(nn.Module):
    """Returns a loss, made by a module without parameters."""

    make = _Net

    def __init__(self):
        super().__init__()
        self.model, self.loss = self.make(), nn.MSELoss()

    def forward(self, x):
        return self.loss(self.model(x), x)


class OfMixed(WithLoss):
    """Around layers of different kinds."""

    make = _Mixed

    def forward(self, x):
        return self.loss(self.model(x), x[..., :2])


class Distributed(nn.Module):
    """Around a wrapper, as data parallel ones are."""

    def __init__(self):
        super().__init__()
        self.module = WithLoss()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class Lightning(nn.Module):
    """Its forward is one of several methods that use the network."""

    def __init__(self):
        super().__init__()
        self.net = _Net()
        self.scale = nn.Parameter(torch.ones(4))

    def step(self, x):
        return self.net(x) * self.scale

    def forward(self, x):
        return self.step(x)


class Chained(nn.Sequential):
    """A backbone and a head."""

    def __init__(self):
        super().__init__(_Net(), nn.Linear(4, 2))


class _Encoder(_Net):
    """Another class."""


class Towers(nn.Module):
    """Two parts that hold as much."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = _Encoder(), _Net()

    def forward(self, x):
        memory = self.encoder(x)
        return self.decoder(memory + x)


class Reaching(nn.Module):
    """Calls the layers of a module that it never calls."""

    def __init__(self):
        super().__init__()
        self.net, self.head = _Net(), nn.Linear(4, 2)

    def forward(self, x):
        for layer in (self.net.one, self.net.two, self.net.three, self.net.four):
            x = layer(x)
        return self.head(x)


class Between(nn.Module):
    """Calls the layers of two modules in turn."""

    def __init__(self):
        super().__init__()
        self.left, self.right = _Encoder(), _Net()

    def forward(self, x):
        for left, right in zip(self.left.children(), self.right.children(), strict=True):
            x = right(left(x))
        return x


MODELS = (WithLoss, OfMixed, Distributed, Lightning, Chained, Towers, Reaching, Between)
TO_ROUNDING = {Lightning}
