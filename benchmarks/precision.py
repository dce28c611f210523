"""How far half precision ends from fp32: 300 steps of a small ViT on scikit-learn's digits, and what a search costs.

    PYTHONPATH=.:plugins python benchmarks/precision.py

One process, one thread, the same weights and batches for each precision. "look" is one search for the first inf or NaN,
which runs the step again, as a multiple of a step; a step in which nothing happens does not search.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from hybridpp import Booster, HybridParallelPlugin

BATCH_SIZE = 32


def batches(num_steps: int) -> list[dict[str, Tensor]]:
    """Digits in a random order, again and again."""
    raw = load_digits()
    pixels = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(raw.target)
    order = torch.cat([torch.randperm(len(labels)) for _ in range(1 + num_steps * BATCH_SIZE // len(labels))])
    picks = order[: num_steps * BATCH_SIZE].view(num_steps, BATCH_SIZE)
    return [{"pixel_values": pixels[pick], "labels": labels[pick]} for pick in picks]


def vit() -> ViTForImageClassification:
    """16 patches, 4 blocks of width 32; the same weights each time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, intermediate_size=64, num_labels=10, initializer_range=0.15, **sizes
    )
    return ViTForImageClassification(config).train()


def train(precision: str, data: list[dict[str, Tensor]]) -> tuple[float, float, float, int]:
    """Mean loss of the last 50 steps, median milliseconds of a step and of a search, skipped steps."""
    model = vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plugin = HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=2, precision=precision)
    booster = Booster(plugin=plugin, device="cpu")
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses, times = [], []
    for batch in data:
        start = time.perf_counter()
        result = booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
        optimizer.step()
        times.append(time.perf_counter() - start)
        losses.append(result["loss"].item())
    searches = []
    examination = plugin._engine(model).examination
    examine = examination.examine

    def timed(*args: Any) -> str:
        start = time.perf_counter()
        text = examine(*args)
        searches.append(time.perf_counter() - start)
        return text

    examination.examine = timed
    skipped = optimizer.skipped_steps
    if precision == "fp16":
        for _ in range(3):
            optimizer.skipped_steps = 0
            handle = model.classifier.bias.register_hook(lambda gradient: gradient * float("inf"))
            booster.execute_pipeline(iter(data[:1]), model, lambda outputs, _: outputs.loss, optimizer)
            optimizer.step()
            handle.remove()
    look = statistics.median(searches) if searches else 0.0
    return statistics.mean(losses[-50:]), statistics.median(times) * 1e3, look * 1e3, skipped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    data = batches(args.steps)
    print("| precision | loss, last 50 steps | against fp32 | skipped | step (ms) | look (steps) |")
    print("|---|--:|--:|--:|--:|--:|")
    reference = None
    for precision in ("fp32", "bf16", "fp16"):
        loss, step_ms, look_ms, skipped = train(precision, data)
        reference = reference or loss
        look = f"{look_ms / step_ms:.1f}" if look_ms else "-"
        print(
            f"| {precision} | {loss:.4f} | {100 * (loss / reference - 1):+.2f} % | {skipped} | {step_ms:.0f} | {look} |"
        )


if __name__ == "__main__":
    main()
