"""A hundred and twenty steps on digits end where fp32 ends, from the same seed."""

import functools

import pytest
import torch
from support import model_loss, tiny_vit

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.optim import CosineAnnealingWarmupLR

STEPS, BATCH_SIZE, LAST = 120, 16, 25


def digits():
    from sklearn.datasets import load_digits  # brings scipy and pandas

    raw = load_digits(n_class=5)
    pixels = torch.tensor(raw.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 8 - 1
    labels = torch.tensor(raw.target)
    picks = torch.randint(0, len(labels), (STEPS, BATCH_SIZE), generator=torch.Generator().manual_seed(0))
    return iter([{"pixel_values": pixels[pick], "labels": labels[pick]} for pick in picks])


@functools.cache
def final_loss(precision):
    """The mean of the last steps, as the example trains: a warm-up, then down to a learning rate of 0."""

    def run():
        model = tiny_vit(num_layers=1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        lr_scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=STEPS, warmup_steps=STEPS // 10)
        plugin = HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=1, precision=precision, max_norm=1.0)
        booster = Booster(plugin=plugin, device="cpu")
        model, optimizer, _, _, lr_scheduler = booster.boost(model, optimizer, lr_scheduler=lr_scheduler)
        data, losses = digits(), []
        for _ in range(STEPS):
            losses.append(booster.execute_pipeline(data, model, model_loss, optimizer)["loss"].item())
            optimizer.step()
            lr_scheduler.step()
        assert losses[0] > 5 * sum(losses[-LAST:]) / LAST, "it has learnt"
        return sum(losses[-LAST:]) / LAST

    return Loopback(1).run(run)[0]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_final_loss_is_that_of_fp32(precision):
    assert final_loss(precision) == pytest.approx(final_loss("fp32"), rel=0.01)
