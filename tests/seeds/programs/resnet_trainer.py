"""ResNet as an execution sequence, trained by the Trainer: 2 pipeline stages, 4 micro-batches, plain or interleaved.

Lines, names and their order are those of the tutorial; imports, what they import and sizes are changed.
"""

import torch
import torch.nn as nn

import hybridpp
from hybridpp import Booster, HybridParallelPlugin, disable_existing_loggers, get_dist_logger
from hybridpp.optim import LinearWarmupLR
from hybridpp.partition import set_execution_sequence
from hybridpp.trainer import Accuracy, Hook, Trainer, hooks

# Define some config
BATCH_SIZE = 8
NUM_EPOCHS = 2
NUM_CHUNKS = 1
CONFIG = {"num_microbatches": 4, "pp_size": 2}


class Bottleneck(nn.Module):
    """A block of torchvision's, small."""

    def __init__(self, inplanes, planes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes // 2, 1, bias=False), nn.BatchNorm2d(planes // 2)
        self.conv2, self.bn2 = nn.Conv2d(planes // 2, planes, 3, padding=1, bias=False), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(inplanes, planes, 1)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + self.downsample(x))


class ResNet(nn.Module):
    """Has the names of torchvision's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(3, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1, self.layer2 = nn.Sequential(Bottleneck(4, 4)), nn.Sequential(Bottleneck(4, 8), Bottleneck(8, 8))
        self.layer3, self.layer4 = nn.Sequential(Bottleneck(8, 8)), nn.Sequential(Bottleneck(8, 8))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer4(self.layer3(self.layer2(self.layer1(x)))))
        return self.fc(torch.flatten(x, 1))


def resnet50():
    return ResNet()


def samples(count):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 8, 8, generator=generator), index % 3) for index in range(count)]


def build_cifar(plugin, batch_size):
    return (
        plugin.prepare_dataloader(samples(16), batch_size=batch_size),
        plugin.prepare_dataloader(samples(8), batch_size=batch_size),
    )


class Losses(Hook):
    """Keeps the loss of every step for the test."""

    def __init__(self):
        self.values = []

    def after_step(self, trainer):
        self.values.append(trainer.result["loss"].item())


def main(num_chunks=NUM_CHUNKS):
    # Train
    disable_existing_loggers()
    hybridpp.launch_from_torch()
    logger = get_dist_logger()
    plugin = HybridParallelPlugin(**CONFIG, num_model_chunks=num_chunks)

    # build model
    model = resnet50()

    exec_seq = [
        *("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool"),
        (lambda x: torch.flatten(x, 1), "behind"),
        "fc",
    ]
    set_execution_sequence(model, exec_seq)

    # build criterion
    criterion = nn.CrossEntropyLoss()

    # optimizer
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    # build dataloader
    train_dataloader, test_dataloader = build_cifar(plugin, BATCH_SIZE)

    lr_scheduler = LinearWarmupLR(optimizer, NUM_EPOCHS, warmup_steps=1)
    booster = Booster(plugin=plugin, device="cpu")
    parts = booster.boost(model, optimizer, criterion, train_dataloader, lr_scheduler)

    trainer = Trainer(booster, parts)

    losses = Losses()
    hook_list = [
        hooks.LossHook(),
        hooks.AccuracyHook(Accuracy()),
        hooks.LogMetricByEpochHook(logger),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
        losses,
    ]

    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=NUM_EPOCHS,
        test_dataloader=test_dataloader,
        test_interval=1,
        hooks=hook_list,
        display_progress=True,
    )
    return losses.values, trainer.metrics


if __name__ == "__main__":
    main()
