"""Small models and batches for sequence parallelism."""

import pytest
import torch
from copies import copied
from support import assert_near
from torch import nn
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification

SHARDS = {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}


@copied
def vit(image=64, patch=8, num_layers=2, dropout=0.0):
    """65 tokens of width 16, or, from images of 56 in patches of 4, 197."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=image,
        patch_size=patch,
        num_labels=5,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = ViTForImageClassification(config).train()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


def images(num_samples=4, size=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(num_samples, 3, size, size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (num_samples,), generator=generator)}


class Block(nn.Module):
    """Drops whole places' numbers between the layers, and numbers inside."""

    def __init__(self, outside=0.0, inside=0.0, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.outside, self.inside = outside, inside

    def forward(self, x):
        inner = functional.dropout(self.up(self.norm(x)), self.inside, self.training)
        return x + functional.dropout(self.down(inner), self.outside, self.training)


class Net(nn.Module):
    def __init__(self, make_block, num_blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([make_block() for _ in range(num_blocks)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def squares(outputs, inputs):
    return outputs.square().mean()


def sequences(num_places, seed=0):
    """A batch of 4, of width 8."""
    return torch.randn(4, num_places, 8, generator=torch.Generator().manual_seed(seed))


def assert_equal(run, expected, tolerance=1e-6):
    for losses in run["losses"]:
        assert losses == pytest.approx(expected["losses"][0], abs=tolerance)
    assert_near(run["gradients"], expected["gradients"], tolerance)
    assert_near(run["weights"], expected["weights"], tolerance)
