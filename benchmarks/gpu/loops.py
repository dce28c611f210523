"""A ViT in fp16 on one device, trained by this library and by two loops as one writes them by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from hybridpp import Booster, HybridParallelPlugin

PipelineStep = Callable[[], None]
LR, MAX_NORM = 1e-4, 1.0
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 32},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 224},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 224},
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained.

    Attributes:
        size: of the ViT, patches of 16 by 16.
        num_samples: in a batch.
        num_microbatches: parts of it.
        device: where.
    """

    size: str
    num_samples: int
    num_microbatches: int
    device: str

    def model(self) -> ViTForImageClassification:
        """On the host, the same weights at every call."""
        torch.manual_seed(0)
        sizes: dict[str, Any] = SIZES[self.size]
        config = ViTConfig(intermediate_size=4 * sizes["hidden_size"], patch_size=16, num_labels=10, **sizes)
        return ViTForImageClassification(config).train()

    def batch(self, device: str) -> dict[str, Tensor]:
        """Random images."""
        image = SIZES[self.size]["image_size"]
        return {
            "pixel_values": torch.randn(self.num_samples, 3, image, image, device=device),
            "labels": torch.randint(0, 10, (self.num_samples,), device=device),
        }

    def microbatches(self) -> list[dict[str, Tensor]]:
        """Parts of a batch on the device."""
        batch = self.batch(self.device)
        parts = [tensor.chunk(self.num_microbatches) for tensor in batch.values()]
        return [dict(zip(batch, values, strict=True)) for values in zip(*parts, strict=True)]


def _unmarked(mark: str) -> None:
    return


@dataclass(frozen=True)
class Hybridpp:
    """Trained by this library.

    Attributes:
        step: runs one step.
        booster: the booster.
        model: the model.
    """

    step: PipelineStep
    booster: Booster
    model: nn.Module

    @classmethod
    def create(cls, job: Job, data_on: str, **settings: Any) -> "Hybridpp":
        """Boost a new model; its batch is on ``data_on``, and every micro-batch is copied when it is its turn."""
        settings = {"tp_size": 1, "pp_size": 1, "precision": "fp16", "max_norm": MAX_NORM} | settings
        plugin = HybridParallelPlugin(num_microbatches=job.num_microbatches, **settings)
        model = job.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        booster = Booster(plugin=plugin, device=job.device)
        boosted = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss)
        batch = job.batch(data_on)

        def step() -> None:
            booster.execute_pipeline(iter([batch]), boosted.model, boosted.criterion, boosted.optimizer)
            boosted.optimizer.step()

        return cls(step, booster, boosted.model)


def with_hybridpp(job: Job) -> PipelineStep:
    """This library."""
    return Hybridpp.create(job, job.device).step


def with_amp(job: Job) -> PipelineStep:
    """Torch's recipe: fp32 weights under autocast, a gradient scaler, accumulation, clipping, fused AdamW."""
    model = job.model().to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    scaler = torch.amp.GradScaler(job.device)
    parts = job.microbatches()

    def step() -> None:
        for part in parts:
            with torch.autocast(job.device, torch.float16):
                loss = model(**part).loss / len(parts)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def by_hand(job: Job, mark: Callable[[str], None] = _unmarked) -> PipelineStep:
    """fp16 weights, fp32 masters and gradients, a loss scale, accumulation, clipping, fused AdamW.

    ``mark`` is called at the start of a forward or backward pass with "start" and behind it with "F" or "B".
    """
    model = job.model().to(job.device)
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    model.half()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)
    parts = job.microbatches()
    scale = 4096.0

    def accumulate() -> None:
        gradients = [weight.grad for weight in weights]
        if masters[0].grad is None:
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient.float()
        else:
            torch._foreach_add_([master.grad for master in masters], [gradient.float() for gradient in gradients])
        for weight in weights:
            weight.grad = None

    def step() -> None:
        for part in parts:
            mark("start")
            loss = model(pixel_values=part["pixel_values"].half(), labels=part["labels"]).loss
            mark("F")
            mark("start")
            (loss.float() * (scale / len(parts))).backward()
            accumulate()
            mark("B")
        torch._foreach_mul_([master.grad for master in masters], 1 / scale)
        norm = torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        if torch.isfinite(norm):
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        optimizer.zero_grad()

    return step
