"""A residual network as an execution sequence, trained by the Trainer: 2 ranks, 4 micro-batches."""

import torch
from networks import SEQUENCE, ResNet
from torch import nn

import hybridpp
from hybridpp import Booster, HybridParallelPlugin
from hybridpp.optim import LinearWarmupLR
from hybridpp.partition import set_execution_sequence
from hybridpp.trainer import Hook, Trainer, hooks

BATCH_SIZE, NUM_EPOCHS, NUM_CLASSES = 8, 2, 3


class Losses(Hook):
    """The loss of every step."""

    def __init__(self):
        self.values = []

    def after_step(self, trainer):
        self.values.append(trainer.result["loss"].item())


def make_model():
    model = ResNet()
    set_execution_sequence(model, SEQUENCE)
    return model


def samples(count):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 8, 8, generator=generator), index % NUM_CLASSES) for index in range(count)]


def main(pp_size=2, num_chunks=1):
    hybridpp.launch_from_torch(seed=42)
    model = make_model()
    plugin = HybridParallelPlugin(pp_size=pp_size, num_microbatches=4, num_model_chunks=num_chunks)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    lr_scheduler = LinearWarmupLR(optimizer, total_steps=NUM_EPOCHS, warmup_steps=1)
    train_dataloader = plugin.prepare_dataloader(samples(16), batch_size=BATCH_SIZE)
    test_dataloader = plugin.prepare_dataloader(samples(8), batch_size=BATCH_SIZE)

    booster = Booster(plugin=plugin, device="cpu")
    parts = booster.boost(model, optimizer, nn.CrossEntropyLoss(), train_dataloader, lr_scheduler)
    trainer, losses = Trainer(booster, parts), Losses()
    trainer.fit(
        epochs=NUM_EPOCHS,
        test_dataloader=test_dataloader,
        test_interval=1,
        hooks=[
            losses,
            hooks.LossHook(),
            hooks.AccuracyHook(),
            hooks.LogMetricByEpochHook(),
            hooks.LRSchedulerHook(by_epoch=True),
        ],
    )
    return losses.values, trainer.metrics["test/accuracy"]


if __name__ == "__main__":
    main()
