"""ViT-B/16 and ViT-L/16 in fp16 on one CUDA device, beside a plain loop with torch.amp: time, memory, host waits.

    PYTHONPATH=.:plugins python benchmarks/gpu/fp16.py

The plain loop is torch's recipe: fp32 weights under fp16 autocast, a ``GradScaler``, accumulation over micro-batches,
clipping, fused AdamW. The aims: a step takes at most 2 % longer, its peak of memory is not higher, and the host waits
for the device once. Steps alternate; medians over the rounds. ``--sizes tiny --device cpu`` only shows that it runs.
"""

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from hybridpp import Booster, HybridParallelPlugin

Step = Callable[[], None]
LR, MAX_NORM = 1e-4, 1.0
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 224},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 224},
}


def make_vit(size: str) -> ViTForImageClassification:
    """The same weights at every call."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES[size]
    config = ViTConfig(intermediate_size=4 * sizes["hidden_size"], patch_size=16, num_labels=10, **sizes)
    return ViTForImageClassification(config).train()


def make_batch(size: str, num_samples: int, device: str) -> dict[str, Tensor]:
    """Random images, on the device."""
    image = SIZES[size]["image_size"]
    return {
        "pixel_values": torch.randn(num_samples, 3, image, image, device=device),
        "labels": torch.randint(0, 10, (num_samples,), device=device),
    }


def by_torch(size: str, batch: dict[str, Tensor], args: argparse.Namespace) -> Step:
    """A loop with torch.amp."""
    model = make_vit(size).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    scaler = torch.amp.GradScaler(args.device)
    keys = list(batch)
    parts = [
        dict(zip(keys, values, strict=True))
        for values in zip(*(batch[key].chunk(args.microbatches) for key in keys), strict=True)
    ]

    def step() -> None:
        for part in parts:
            with torch.autocast(args.device, torch.float16):
                loss = model(**part).loss / len(parts)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def by_hybridpp(size: str, batch: dict[str, Tensor], args: argparse.Namespace) -> Step:
    """The same by this library."""
    settings = {"num_microbatches": args.microbatches, "precision": "fp16", "max_norm": MAX_NORM}
    plugin = HybridParallelPlugin(tp_size=1, pp_size=1, **settings)
    model = make_vit(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    booster = Booster(plugin=plugin, device=args.device)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss)

    def step() -> None:
        booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        optimizer.step()

    return step


CONTESTANTS = {"hybridpp": by_hybridpp, "torch.amp": by_torch}


def milliseconds(step: Step, on_cuda: bool) -> float:
    """Of a step, the work of the device included."""
    if on_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if on_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def host_waits(step: Step) -> int:
    """How often the host waits for the device in a step, as far as torch sees it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(wait.message) for wait in waits)


def peak_mib(make: Callable[[], Step]) -> float:
    """Most memory that tensors take in a step, with nothing else on the device."""
    step = make()
    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / 2**20


def compare(size: str, args: argparse.Namespace) -> None:
    """A row for each contestant."""
    on_cuda = args.device == "cuda"
    batch = make_batch(size, args.batch, args.device)
    peaks = dict.fromkeys(CONTESTANTS, float("nan"))
    for name, make in CONTESTANTS.items() if on_cuda else ():
        peaks[name] = peak_mib(lambda make=make: make(size, batch, args))
        gc.collect()
        torch.cuda.empty_cache()
    steps = {name: make(size, batch, args) for name, make in CONTESTANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds + 3):
        for name, step in steps.items():
            times[name].append(milliseconds(step, on_cuda))
    medians = {name: statistics.median(values[3:]) for name, values in times.items()}
    for name, step in steps.items():
        waits = str(host_waits(step)) if on_cuda else ""
        against = f"{100 * (medians[name] / medians['torch.amp'] - 1):+.1f} %"
        print(f"| {size} | {name} | {medians[name]:.1f} | {against} | {peaks[name]:.0f} | {waits} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["base", "large"])
    parser.add_argument("--batch", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="(default: %(default)s)")
    args = parser.parse_args()
    print("| ViT | | step (ms) | against torch.amp | peak (MiB) | host waits |\n|---|---|--:|--:|--:|--:|")
    for size in args.sizes:
        compare(size, args)


if __name__ == "__main__":
    main()
