"""The time to trace a new kind of input, and to look up a known one.

    PYTHONPATH=.:plugins python benchmarks/retrace.py

One thread. Each row is the median over sequence lengths or batch sizes that the model has not seen. The models are made
with random weights, narrow where width does not count (a trace computes nothing).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from hybridpp.module_adapter import ModuleAdapter
from hybridpp.partition import StagedModel

Inputs = dict[str, Tensor]


def vit_large() -> tuple[nn.Module, Callable[[int], Inputs]]:
    """ViT-L/16, another batch size each time."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    model = ViTForImageClassification(ViTConfig(intermediate_size=4096, **sizes))
    return model, lambda step: {"pixel_values": torch.zeros(1 + step, 3, 224, 224)}


def llama_32() -> tuple[nn.Module, Callable[[int], Inputs]]:
    """A Llama of 32 layers, another sequence length each time."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32, vocab_size=1000, **sizes))

    def inputs(step: int) -> Inputs:
        ids = torch.zeros(2, 16 * (1 + step), dtype=torch.long)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    return model, inputs


def milliseconds(staged: StagedModel, inputs: Inputs) -> float:
    """Time to plan a stage for such inputs."""
    start = time.perf_counter()
    staged.plans((), inputs)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="new kinds of input per model (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | boost (ms) | new input (ms) | known input (µs) |")
    print("|---|--:|--:|--:|")
    for name, make in (("ViT-L/16, 24 layers", vit_large), ("Llama, 32 layers", llama_32)):
        model, inputs = make()
        start = time.perf_counter()
        staged = StagedModel(ModuleAdapter(model), 4, [1], device=torch.device("cpu"), samples=[((), inputs(0))])
        boost = (time.perf_counter() - start) * 1e3
        batches = [inputs(step) for step in range(1, args.repeats + 1)]
        new = [milliseconds(staged, batch) for batch in batches]
        known = [milliseconds(staged, batch) * 1e3 for batch in batches]
        print(f"| {name} | {boost:.0f} | {statistics.median(new):.0f} | {statistics.median(known):.0f} |")


if __name__ == "__main__":
    main()
