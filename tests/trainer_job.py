"""A small classifier, boosted, and data for it: what tests of the trainer run."""

import torch
from support import sgd
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.optim import LinearWarmupLR

WIDTH, NUM_CLASSES = 6, 5


def classifier():
    """Two blocks and a head, the same at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


def samples(count):
    """Pairs of a row and its class."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, WIDTH, generator=generator)
    return list(zip(rows, torch.randint(0, NUM_CLASSES, (count,), generator=generator), strict=True))


def job(count=10, batch_size=2, shuffle=True, **settings):
    """A booster, what it boosted, and a loader of seven samples to evaluate on."""
    plugin = HybridParallelPlugin(num_microbatches=2, **settings)
    booster, model = Booster(plugin=plugin, device="cpu"), classifier()
    optimizer = sgd(model.parameters())
    loader = plugin.prepare_dataloader(samples(count), batch_size, shuffle=shuffle)
    scheduler = LinearWarmupLR(optimizer, total_steps=20, warmup_steps=4)
    parts = booster.boost(model, optimizer, nn.CrossEntropyLoss(), loader, scheduler)
    return booster, parts, plugin.prepare_dataloader(samples(7), batch_size)


def on_ranks(run, dp_size=1, pp_size=1):
    """``run(pp_size=...)`` on in-process ranks."""
    return Loopback(dp_size * pp_size).run(lambda: run(pp_size=pp_size))
