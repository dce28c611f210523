"""The difference between half precision and fp32 after 300 steps of a small ViT on scikit-learn's digits.

    PYTHONPATH=.:plugins python benchmarks/precision.py --seeds 0 1 2 3

One process, one thread. For each seed (of weights and batches), the mean loss of the last 50 steps against that of fp32
from the same seed. "off by" are runs in fp32 whose initial weights differ by that relative amount: by fp32's rounding,
and by bf16's. Their difference from fp32 is random, and so is a difference of half precision within that range.
"torch.autocast" is a plain loop without this library: fp32 weights, norms, softmax and residuals.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.optim import ConstantWarmupLR, CosineAnnealingWarmupLR

BATCH_SIZE = 32


class Run(NamedTuple):
    """One way to train."""

    name: str
    precision: str
    off_by: float = 0.0
    settings: Mapping[str, Any] = MappingProxyType({})
    by_torch: bool = False


RUNS = (
    Run("fp32", "fp32"),
    Run("fp32, off by 1e-7", "fp32", off_by=1e-7),
    Run("fp32, off by 2e-3", "fp32", off_by=2e-3),
    Run("bf16", "bf16"),
    Run("bf16, losses in bf16", "bf16", settings={"fp32_losses": False}),
    Run("bf16, norms in bf16", "bf16", settings={"fp32_norms": False}),
    Run("bf16 by torch.autocast", "bf16", by_torch=True),
    Run("fp16", "fp16"),
)
NUM_MICROBATCHES, KEYS = 2, ("pixel_values", "labels")
PipelineStep = Callable[[dict[str, Tensor]], float]
Schedule = Callable[[Any], Any]
SCHEDULES: dict[str, Schedule] = {
    "cosine": functools.partial(CosineAnnealingWarmupLR, warmup_steps=30),
    "constant": ConstantWarmupLR,
}


def batches(num_steps: int) -> list[dict[str, Tensor]]:
    """Digits in a random order, again and again."""
    raw = load_digits()
    pixels = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(raw.target)
    order = torch.cat([torch.randperm(len(labels)) for _ in range(1 + num_steps * BATCH_SIZE // len(labels))])
    picks = order[: num_steps * BATCH_SIZE].view(num_steps, BATCH_SIZE)
    return [{"pixel_values": pixels[pick], "labels": labels[pick]} for pick in picks]


def vit(seed: int, off_by: float) -> ViTForImageClassification:
    """16 patches, 4 blocks of width 32."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, intermediate_size=64, num_labels=10, initializer_range=0.15, **sizes
    )
    model = ViTForImageClassification(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + off_by * torch.randn_like(parameter))
    return model


def own_loss(outputs: Any, inputs: Any) -> Tensor:
    """What the model computed."""
    loss: Tensor = outputs.loss
    return loss


def start(run: Run, seed: int, schedule: Schedule) -> tuple[Booster, Any, Any, Any]:
    """A booster with the boosted model, optimizer and schedule of learning rates."""
    model = vit(seed, run.off_by)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"num_microbatches": NUM_MICROBATCHES, "precision": run.precision, **run.settings}
    plugin = HybridParallelPlugin(tp_size=1, pp_size=1, **settings)
    booster = Booster(plugin=plugin, device="cpu")
    model, optimizer, _, _, lr_scheduler = booster.boost(model, optimizer, lr_scheduler=schedule(optimizer))
    return booster, model, optimizer, lr_scheduler


def train(run: Run, seed: int, data: list[dict[str, Tensor]], schedule: Schedule) -> tuple[float, float, int]:
    """Mean loss of the last 50 steps, median milliseconds of a step, skipped steps."""
    step, optimizer = plain(seed, schedule) if run.by_torch else ours(run, seed, schedule)
    losses, times = [], []
    for batch in data:
        began = time.perf_counter()
        losses.append(step(batch))
        times.append(time.perf_counter() - began)
    return statistics.mean(losses[-50:]), statistics.median(times) * 1e3, getattr(optimizer, "skipped_steps", 0)


def ours(run: Run, seed: int, schedule: Schedule) -> tuple[PipelineStep, Any]:
    """A step by this library, which gives the loss."""
    booster, model, optimizer, lr_scheduler = start(run, seed, schedule)

    def step(batch: dict[str, Tensor]) -> float:
        loss = booster.execute_pipeline(iter([batch]), model, own_loss, optimizer)["loss"]
        optimizer.step()
        lr_scheduler.step()
        return float(loss)

    return step, optimizer


def plain(seed: int, schedule: Schedule) -> tuple[PipelineStep, Any]:
    """The same by torch alone, under bf16 autocast."""
    model = vit(seed, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = schedule(optimizer)

    def step(batch: dict[str, Tensor]) -> float:
        optimizer.zero_grad()
        loss = 0.0
        for pixels, labels in zip(*(batch[key].chunk(NUM_MICROBATCHES) for key in KEYS), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                part = model(pixel_values=pixels, labels=labels).loss / NUM_MICROBATCHES
            part.backward()
            loss += part.item()
        optimizer.step()
        lr_scheduler.step()
        return loss

    return step, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="(default: %(default)s)")
    parser.add_argument(
        "--schedule",
        choices=["cosine", "constant"],
        default="cosine",
        help="of learning rates: after a warm-up of 30 steps down to 0, as in the example, or 1e-3 throughout",
    )
    parser.add_argument("--runs", nargs="+", default=[run.name for run in RUNS], help="(default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    schedule = functools.partial(SCHEDULES[args.schedule], total_steps=args.steps)
    runs = [run for run in RUNS if run.name in args.runs]
    off: dict[str, list[float]] = {run.name: [] for run in runs}
    print("| seed | run | loss, last 50 steps | against fp32 | skipped | step (ms) |\n|--:|---|--:|--:|--:|--:|")
    for seed in args.seeds:
        torch.manual_seed(seed + 1)
        data = batches(args.steps)
        reference = None
        for run in runs:
            loss, step_ms, skipped = train(run, seed, data, schedule)
            reference = reference or loss
            off[run.name].append(100 * (loss / reference - 1))
            print(
                f"| {seed} | {run.name} | {loss:.4f} | {off[run.name][-1]:+.2f} % | {skipped} | {step_ms:.0f} |",
                flush=True,
            )
    print("\n| run | against fp32, mean | largest |\n|---|--:|--:|")
    for name, values in off.items():
        print(f"| {name} | {statistics.mean(values):+.2f} % | {max(values, key=abs):+.2f} % |")


if __name__ == "__main__":
    main()
