"""The model of the speed benchmarks, complete and cut by hand."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification

NUM_LABELS, IMAGE = 10, 64


def make_vit(hidden: int, num_layers: int = 12, num_heads: int | None = None) -> ViTForImageClassification:
    """A ViT of 65 tokens without dropout, the same at every call; of heads of width 64 unless told otherwise."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads or hidden // 64,
        intermediate_size=4 * hidden,
        image_size=IMAGE,
        patch_size=8,
        num_labels=NUM_LABELS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config).train()


def make_batch(num_samples: int) -> dict[str, Tensor]:
    """Random images with labels, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(num_samples, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(0, NUM_LABELS, (num_samples,), generator=generator),
    }


class HandCut(nn.Module):
    """A stage as one writes it by hand, for systems that want stages: tensors in, a tensor out."""

    def __init__(self, model: ViTForImageClassification, stage: int, num_stages: int):
        super().__init__()
        layers = list(model.vit.layers)
        first, last = len(layers) * stage // num_stages, len(layers) * (stage + 1) // num_stages
        self.embeddings = model.vit.embeddings if stage == 0 else None
        self.layers = nn.ModuleList(layers[first:last])
        self.norm = model.vit.layernorm if stage == num_stages - 1 else None
        self.head = model.classifier if stage == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embeddings is not None:
            x = self.embeddings(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x)[:, 0])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of a micro-batch."""
    return functional.cross_entropy(logits, labels)
