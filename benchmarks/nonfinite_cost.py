"""The cost of the search for the first inf or NaN in a step without any.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins python benchmarks/nonfinite_cost.py

Three variants of one model take turns, step by step, in one process and one thread: the library as it is; without the
checks of every step (of losses and norms); and with every value checked at every step, which the library avoids by
running a step again only if it failed. Times are processor time. Step times vary by far more than the cost, which
tests/plugins/test_nonfinite_report_cost.py counts.
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from hybridpp_plugins import step_epilogue
from hybridpp_plugins.nonfinite_report import NonFiniteDiagnosis
from hybridpp_plugins.nonfinite_steps import NonFiniteSteps
from transformers import ViTConfig, ViTForImageClassification

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.precision import NonFiniteDetector

BATCH_SIZE, NUM_MICROBATCHES = 16, 4


def start(hidden: int, precision: str) -> tuple[Booster, Any, Any]:
    """A booster with a boosted ViT of 12 layers and its optimizer."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": 3}
    model = ViTForImageClassification(ViTConfig(image_size=64, patch_size=8, num_labels=10, **sizes)).train()
    plugin = HybridParallelPlugin(
        tp_size=1, pp_size=1, num_microbatches=NUM_MICROBATCHES, precision=precision, max_norm=1.0
    )
    booster = Booster(plugin=plugin, device="cpu")
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    return booster, model, optimizer


class Bare:
    """Inside, nothing looks for what is not finite."""

    def __enter__(self) -> None:
        self._before = (step_epilogue._rank_loss, NonFiniteSteps.wants_search)
        step_epilogue._rank_loss = _unchecked
        NonFiniteSteps.wants_search = _never  # type: ignore[method-assign]  # for a measurement

    def __exit__(self, *_: object) -> None:
        step_epilogue._rank_loss, NonFiniteSteps.wants_search = self._before  # type: ignore[method-assign]


def _unchecked(batch: Any, result: Any, losses: list[float]) -> step_epilogue.RankLoss:
    shares = (microbatch.share for microbatch in batch.microbatches)
    total = math.fsum(value * share for value, share in zip(losses, shares, strict=True))
    return step_epilogue.RankLoss(total, 0.0, -1.0)


def _never(self: Any, norm: float | None) -> bool:
    return False


class Watching:
    """Inside, everything is looked at."""

    def __init__(self, diagnosis: NonFiniteDiagnosis):
        self._examination = diagnosis

    def __enter__(self) -> None:
        staged = self._examination._staged
        detector = NonFiniteDetector(staged.model, staged.units, dict, self._examination._where)
        self._contexts = [detector.hooks(), staged.watched(detector.unit)]
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *_: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[48, 192], help="(default: %(default)s)")
    parser.add_argument("--precision", default="fp32", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="(default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = {"pixel_values": torch.randn(BATCH_SIZE, 3, 64, 64), "labels": torch.arange(BATCH_SIZE) % 10}
    print("| hidden | variant | median (ms) | against without, median of the rounds | quartiles |")
    print("|--:|---|--:|--:|--:|")
    for hidden in args.hidden:
        times = measure(hidden, args.precision, batch, args.rounds)
        for name, values in times.items():
            ratios = [100 * (mine / bare - 1) for mine, bare in zip(values, times["without"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"| {hidden} | {name} | {1e3 * statistics.median(values):.1f} | {middle:+.2f} % | "
                f"{low:+.2f} to {high:+.2f} % |",
                flush=True,
            )


def measure(hidden: int, precision: str, batch: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of processor time of each variant's step in each round; the order in a round is drawn."""
    booster, model, optimizer = start(hidden, precision)
    diagnosis = booster.plugin._engine(model).diagnosis
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "without": Bare,
        "as it is": nullcontext,
        "watched at every step": lambda: Watching(diagnosis),
    }
    times: dict[str, list[float]] = {name: [] for name in contexts}
    for turn in range(rounds + 2):
        order = list(contexts)
        random.Random(turn).shuffle(order)
        for name in order:
            with contexts[name]():
                began = time.process_time()
                booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
                optimizer.step()
                spent = time.process_time() - began
            if turn >= 2:
                times[name].append(spent)
    return times


if __name__ == "__main__":
    main()
