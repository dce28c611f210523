"""A network with a stage number on each layer: 2 stages on 8 processes, so 4 replicas; losses that are summed.

Lines, names and their order are those of the tutorial; imports, what they import and sizes are changed.
"""

import torch
from networks import Residual
from torch import nn

import hybridpp
from hybridpp import Booster, HybridParallelPlugin
from hybridpp.trainer import Hook, Trainer


class ResNet(nn.Module):
    """ResNet"""

    def __init__(self, block, num_classes=100, batch_size=32):
        """init"""
        super().__init__()
        self.batch_size = batch_size
        self.num_classes = num_classes

        self.head = nn.Conv2d(3, 4, 3)
        self.layer1 = nn.Sequential(block(4, 4), block(4, 4))
        self.layer2 = nn.Sequential(block(4, 6), block(6, 6))
        self.layer3 = nn.Sequential(block(6, 8), block(8, 8))
        self.layer4 = nn.Sequential(block(8, 8), block(8, 8))

        self.fc = nn.Linear(8, num_classes)

        # pipeline parallel config
        self.head.pipeline_stage = 0
        self.layer1.pipeline_stage = 0
        self.layer2.pipeline_stage = 0
        self.layer3.pipeline_stage = 1
        self.layer4.pipeline_stage = 1
        self.fc.pipeline_stage = 1

    def forward(self, x):
        """construct"""
        x = self.head(x)

        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)

        x = x.mean((2, 3), keepdim=True)
        x = x.squeeze((2, 3))
        x = self.fc(x)
        return x


def resnet50(batch_size, num_classes):
    torch.manual_seed(0)
    return ResNet(Residual, num_classes, batch_size)


def samples(count=32):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 8, 8, generator=generator), index % 3) for index in range(count)]


class LossMonitor(Hook):
    """Keeps the losses of this pipeline: sums over its micro-batches."""

    def __init__(self):
        self.losses = []

    def after_step(self, trainer):
        self.losses.append(trainer.result["loss"].item())


def train_cifar(epoch_size=1):
    hybridpp.launch_from_torch()
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2)
    loss_cb = LossMonitor()
    batch_size = 4
    num_classes = 3
    dataset = plugin.prepare_dataloader(samples(), batch_size)
    net = resnet50(batch_size, num_classes)
    loss = nn.CrossEntropyLoss(reduction="sum")
    opt = torch.optim.SGD(net.parameters(), 0.01, 0.9)
    booster = Booster(plugin=plugin, device="cpu")
    model = Trainer(booster, booster.boost(net, opt, loss, dataset))
    model.fit(dataset, epoch_size, hooks=[loss_cb])
    return loss_cb.losses, {name: weight.detach().clone() for name, weight in net.named_parameters()}


if __name__ == "__main__":
    train_cifar()
