"""A Llama of 0.7 billion parameters in bf16 on one device, beside a plain loop: autocast and fused AdamW.

    PYTHONPATH=.:plugins python benchmarks/gpu/llama.py
    PYTHONPATH=.:plugins python benchmarks/gpu/llama.py --compile

Time of a step and peak of memory, one line of JSON per contestant. The plain loop has weights in fp32; this library has
them in bf16, with fp32 masters. With ``--compile``, blocks are compiled (``compile_blocks``) in one contestant only.
``--device cpu --tiny`` only shows that it runs.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jobs import Measure, add_arguments, run_cases
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hybridpp import Booster, HybridParallelPlugin

LR, MAX_NORM, NUM_MICROBATCHES = 1e-4, 1.0, 4
WARM_UP, NUM_STEPS = 3, 10
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "0.7B": {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 12},
}
PipelineStep = Callable[[], Any]


def make_model(size: str) -> nn.Module:
    """On the host, the same weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32000 if size != "tiny" else 64, use_cache=False, **SIZES[size])
    return LlamaForCausalLM(config).train()


def make_batch(model: nn.Module, length: int, device: str) -> dict[str, Tensor]:
    """Random tokens, one sequence per micro-batch."""
    tokens = torch.randint(0, model.config.vocab_size, (NUM_MICROBATCHES, length), device=device)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def with_hybridpp(size: str, length: int, device: str, **settings: Any) -> PipelineStep:
    """This library."""
    model = make_model(size)
    batch = make_batch(model, length, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    settings = {"num_microbatches": NUM_MICROBATCHES, "precision": "bf16", "max_norm": MAX_NORM} | settings
    booster = Booster(plugin=HybridParallelPlugin(**settings), device=device)
    boosted = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss)

    def step() -> float:
        result = booster.execute_pipeline(iter([batch]), boosted.model, boosted.criterion, boosted.optimizer)
        boosted.optimizer.step()
        return result["loss"].item()

    return step


def with_autocast(size: str, length: int, device: str) -> PipelineStep:
    """Torch's recipe: fp32 weights under autocast, accumulation, clipping, fused AdamW."""
    model = make_model(size).to(device)
    batch = make_batch(model, length, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> float:
        total = 0.0
        for place in range(NUM_MICROBATCHES):
            part = {name: tensor[place : place + 1] for name, tensor in batch.items()}
            with torch.autocast(device, torch.bfloat16):
                loss = model(**part).loss / NUM_MICROBATCHES
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def measured(make: Callable[[], PipelineStep], device: str, length: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds of a step, tokens per second, and peak in MiB, with nothing else on the device."""
    on_cuda = device == "cuda"
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = make()
    times = []
    for _ in range(WARM_UP + num_steps):
        start = time.perf_counter()
        loss = step()
        if on_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    took = statistics.median(times[WARM_UP:])
    return {
        "step (ms)": round(1e3 * took, 2),
        "tokens per second": round(NUM_MICROBATCHES * length / took),
        "peak (MiB)": round(torch.cuda.max_memory_allocated() / 2**20) if on_cuda else None,
        "first step (s)": round(times[0], 2),
        "loss": loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, short sequences, two steps")
    parser.add_argument("--compile", action="store_true", help="compare compiled blocks with others")
    args = parser.parse_args()
    size, length, num_steps = ("tiny", 16, 2) if args.tiny else ("0.7B", 4096, NUM_STEPS)
    # Inductor needs a C++ compiler on a CPU, and minutes.
    compiled: dict[str, Any] = {"compile_blocks": {"backend": "eager"} if args.device == "cpu" else True}
    baselines: dict[str, Callable[[], PipelineStep]] = {"hybridpp": partial(with_hybridpp, size, length, args.device)}
    if args.compile:
        baselines["compiled blocks"] = partial(with_hybridpp, size, length, args.device, **compiled)
    else:
        baselines["autocast"] = partial(with_autocast, size, length, args.device)
    cases: dict[str, Measure] = {
        f"{size}, {name}": partial(measured, make, args.device, length, num_steps) for name, make in baselines.items()
    }
    run_cases("compile" if args.compile else "llama", cases, args)


if __name__ == "__main__":
    main()
