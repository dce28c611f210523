"""A training step with compiled blocks, against the same model compiled the same way without this library.

    PYTHONPATH=.:plugins python benchmarks/compile_blocks.py --layers 12 --rounds 15

One process, one thread, fp32, a ViT of ``--hidden``. Four loops take turns, one step each per round: plain torch and
this library, uncompiled and compiled (``layer.compile()`` and ``compile_blocks=True``, inductor). Also the number of
graphs, and the largest difference of a parameter after all steps from plain torch uncompiled.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import ViTConfig, ViTForImageClassification

from hybridpp import Booster, HybridParallelPlugin

Step = Callable[[], None]


def vit(hidden: int, layers: int) -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=3,
        intermediate_size=4 * hidden,
        image_size=64,
        patch_size=8,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config).train()


def plain(model: ViTForImageClassification, batch: dict[str, Tensor]) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def boosted(model: ViTForImageClassification, batch: dict[str, Tensor], compiles: bool) -> Step:
    booster = Booster(plugin=HybridParallelPlugin(compile_blocks=compiles), device="cpu")
    parts = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.01), sample=batch)

    def step() -> None:
        booster.execute_pipeline(iter([batch]), parts.model, lambda outputs, inputs: outputs.loss, parts.optimizer)
        parts.optimizer.step()

    return step


def graphs(step: Step) -> tuple[int, int, float]:
    """Graphs and breaks in two steps, and their time in seconds."""
    counters.clear()
    start = time.perf_counter()
    step()
    step()
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    batch = {
        "pixel_values": torch.randn(4, 3, 64, 64, generator=generator),
        "labels": torch.randint(0, 10, (4,), generator=generator),
    }
    models = [vit(args.hidden, args.layers) for _ in range(4)]
    for layer in models[1].vit.layers:
        layer.compile()
    names = ("plain", "plain compiled", "hybridpp", "ours compiled")
    steps = (
        plain(models[0], batch),
        plain(models[1], batch),
        boosted(models[2], batch, False),
        boosted(models[3], batch, True),
    )
    counted = []
    for step in steps:
        torch._dynamo.reset()
        counted.append(graphs(step))
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(args.rounds):
        for step, taken in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
    print("loop           | graphs | breaks | 2 steps s | step ms | of plain | largest difference")
    medians = [statistics.median(taken) for taken in seconds]
    for place, name in enumerate(names):
        ratio = statistics.median(a / b for a, b in zip(seconds[place], seconds[0], strict=True))
        pairs = zip(models[place].parameters(), models[0].parameters(), strict=True)
        off = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
        made, broken, first = counted[place]
        print(
            f"{name:14} | {made:6} | {broken:6} | {first:9.1f} | {1e3 * medians[place]:7.1f} | {ratio:8.3f} | {off:.1e}"
        )


if __name__ == "__main__":
    main()
