"""A residual network for small images, with the names of torchvision's, and the order in which its parts run."""

import torch
from torch import Tensor, nn

from hybridpp.partition import set_execution_sequence

SEQUENCE = [
    *("conv1", "bn1", "relu", "layer1", "layer2", "layer3", "avgpool"),
    (lambda x: torch.flatten(x, 1), "behind"),
    "fc",
]


class Bottleneck(nn.Module):
    """Three convolutions, the middle one narrow, and a way around them."""

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__()
        width = out_channels // 4
        self.body = nn.Sequential(
            *(nn.Conv2d(in_channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)),
        )
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.downsample(x))


class ResNet(nn.Module):
    """Parts without a forward: the order in which they run is :data:`SEQUENCE`."""

    def __init__(self, num_classes: int, num_blocks: int, width: int = 32):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.layer1 = _layer(width, width, num_blocks, stride=1)
        self.layer2 = _layer(width, 2 * width, num_blocks, stride=2)
        self.layer3 = _layer(2 * width, 4 * width, num_blocks, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, num_classes)


def _layer(in_channels: int, out_channels: int, num_blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(in_channels, out_channels, stride)
    return nn.Sequential(first, *(Bottleneck(out_channels, out_channels, 1) for _ in range(num_blocks - 1)))


def build_model(num_classes: int, num_blocks: int) -> ResNet:
    """A model that can be called, whose parts a pipeline runs in the order of :data:`SEQUENCE`."""
    model = ResNet(num_classes, num_blocks)
    set_execution_sequence(model, SEQUENCE)
    return model
