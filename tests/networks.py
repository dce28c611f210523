"""Small networks that users write by hand, and how they are cut through the plugin."""

import re
from itertools import pairwise

import pytest
import torch
from support import assert_same, train
from torch import nn

IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def wide_images():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, 64, 64, generator=generator)


def squares(outputs, inputs):
    return outputs.square().mean()


class Residual(nn.Module):
    """A convolution with a way around it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x):
        return torch.relu(self.conv(x) + self.shortcut(x))


class Network(nn.Module):
    """Head, four layers of blocks, pooling by hand, a classifier: the small network of a well-known tutorial."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Conv2d(3, 4, 3)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 6), Residual(6, 6))
        self.layer3 = nn.Sequential(Residual(6, 8), Residual(8, 8))
        self.layer4 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.head(x))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3), keepdim=True).flatten(1))


class Chain(nn.Module):
    """Layers that are attributes, called by their number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for number, (inputs, outputs) in enumerate([(4, 4), (4, 8), (8, 2)]):
            setattr(self, f"layer{number}", nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU()))

    def forward(self, x):
        for number in range(3):
            x = getattr(self, f"layer{number}")(x)
        return x


class ResNet(nn.Module):
    """Parts without a forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 8))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 3)


SEQUENCE = [
    "conv1",
    "bn1",
    "relu",
    "maxpool",
    "layer1",
    "layer2",
    "avgpool",
    (lambda x: torch.flatten(x, 1), "behind"),
    "fc",
]


class Convolutions(nn.Module):
    """Wide images and few channels at first, as ResNet: most FLOPs early, nearly all parameters late."""

    def __init__(self, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        widths = [3, 4, 4, 4, 8, 8, 16, 32, 64]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, stride=1 if a == b else 2), nn.ReLU())
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def cut(make_model, batch, pp_size, criterion=squares, compare=assert_same, **settings):
    """The modules of which each rank holds parameters, after a check of losses and gradients against one process."""
    options = {"num_microbatches": 2, "criterion": criterion}
    whole = train(make_model, [batch], **options)
    result = train(make_model, [batch], pp_size=pp_size, **options, **settings)
    assert result["losses"][0] == whole["losses"][0]
    compare(result["gradients"], whole["gradients"])
    return [" ".join(sorted({name.rpartition(".")[0] for name in names})) for names in result["names"]]


def refused(error, text, make_model, batch, pp_size, **settings):
    """Every rank refuses, with this very text."""
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        train(make_model, [batch], pp_size=pp_size, num_microbatches=2, criterion=squares, **settings)
