"""ViT-L/16 in fp16 on one CUDA device: against plain PyTorch, launches per action, memory by number of micro-batches.

    PYTHONPATH=.:plugins python benchmarks/gpu/vit_large.py

The plain loop is what one writes by hand: fp16 weights, fp32 masters, a gradient scaler, accumulation, fused AdamW.
Steps alternate; medians over the rounds. ``--tiny --device cpu`` only shows that the script runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import ViTConfig, ViTForImageClassification

from hybridpp import Booster, HybridParallelPlugin

Step = Callable[[], None]
LR = 1e-4


def make_vit(tiny: bool) -> ViTForImageClassification:
    torch.manual_seed(0)
    if tiny:
        sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32}
    else:
        sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 224}
    config = ViTConfig(intermediate_size=4 * sizes["hidden_size"], patch_size=16, num_labels=10, **sizes)
    return ViTForImageClassification(config).train()


def make_batch(num_samples: int, tiny: bool, device: str) -> dict[str, Tensor]:
    image = 32 if tiny else 224
    return {
        "pixel_values": torch.randn(num_samples, 3, image, image, device=device),
        "labels": torch.randint(0, 10, (num_samples,), device=device),
    }


def plain(batch: dict[str, Tensor], num_microbatches: int, args: argparse.Namespace) -> Step:
    """An fp16 loop as one writes it by hand."""
    model = make_vit(args.tiny).to(args.device).half()
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)
    parts = [
        dict(zip(batch, values, strict=True))
        for values in zip(*(tensor.chunk(num_microbatches) for tensor in batch.values()), strict=True)
    ]
    scale = 4096.0

    def step() -> None:
        for master in masters:
            master.grad = None
        for part in parts:
            pixels = part["pixel_values"].half()
            loss = model(pixel_values=pixels, labels=part["labels"]).loss / num_microbatches
            (loss.float() * scale).backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None
        gradients = [master.grad for master in masters]
        torch._foreach_mul_(gradients, 1 / scale)
        norm = torch.nn.utils.clip_grad_norm_(masters, 1.0)
        if torch.isfinite(norm):
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), masters)

    return step


def boosted(batch: dict[str, Tensor], num_microbatches: int, args: argparse.Namespace) -> tuple[Step, Any, Any]:
    """The same by this library; also the booster and the model."""
    plugin = HybridParallelPlugin(
        tp_size=1, pp_size=1, num_microbatches=num_microbatches, precision="fp16", max_norm=1.0
    )
    model = make_vit(args.tiny)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    booster = Booster(plugin=plugin, device=args.device)
    parts = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss)

    def step() -> None:
        booster.execute_pipeline(iter([batch]), parts.model, parts.criterion, parts.optimizer)
        parts.optimizer.step()

    return step, booster, parts.model


def seconds(step: Step, device: str) -> float:
    """Time of a step, work of the device included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def launches(step: Step) -> int:
    """Kernels that a step starts."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
    return sum(event.count for event in profiler.key_averages() if event.key in ("cudaLaunchKernel", "cuLaunchKernel"))


def compare(args: argparse.Namespace) -> None:
    """Step times side by side, and launches."""
    batch = make_batch(args.batch, args.tiny, args.device)
    ours, _, _ = boosted(batch, args.microbatches, args)
    theirs = plain(batch, args.microbatches, args)
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(args.rounds + 3):
        times["ours"].append(seconds(ours, args.device))
        times["plain"].append(seconds(theirs, args.device))
    medians = {name: statistics.median(values[3:]) * 1e3 for name, values in times.items()}
    print("| | step (ms) | kernel launches per micro-batch |\n|---|--:|--:|")
    for name, step in (("ours", ours), ("plain", theirs)):
        count = launches(step) / args.microbatches if args.device == "cuda" else 0
        print(f"| {name} | {medians[name]:.1f} | {count:.0f} |", flush=True)
    print(f"\nplain / ours: {medians['plain'] / medians['ours']:.3f}\n")


def memory(args: argparse.Namespace) -> None:
    """Peak device memory by the number of micro-batches, of equal size."""
    print("| micro-batches | peak (MiB) |\n|--:|--:|")
    for num_microbatches in (4, 16, 64):
        # On the host: a micro-batch goes to the device when it is its turn.
        batch = make_batch(2 * num_microbatches, args.tiny, "cpu")
        step, *_ = boosted(batch, num_microbatches, args)
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        print(f"| {num_microbatches} | {torch.cuda.max_memory_allocated() / 2**20:.0f} |", flush=True)
        del step
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    compare(args)
    if args.device == "cuda":
        memory(args)


if __name__ == "__main__":
    main()
