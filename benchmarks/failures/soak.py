"""3,000 steps at two stages of two tensor-parallel ranks, whose batches change their shape: does anything grow?

    PYTHONPATH=.:plugins python -m hybridpp run --nproc-per-node 4 benchmarks/failures/soak.py

A small causal language model. Eight of ten batches have one of 16 shapes, the others one of 1,200 (rows, tokens): in
micro-batches of two rows, 60 shapes of these in up to 20 numbers. A watchdog looks on; weights are compared every 50
steps; every 250 steps there is an evaluation and an asynchronous save. Every 500 steps each rank counts its memory,
threads, descriptors, objects and the entries of containers that the library's objects hold; rank 0 prints the largest
of the ranks.
"""

import argparse
import functools
import gc
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch
from hybridpp.cluster import current_world, gather_objects

NUM_WORDS = 64
PLAIN = [(2 * rows, 8 * tokens) for rows in (1, 2, 3, 4) for tokens in (1, 2, 3, 4)]
COLUMNS = ("rss_mib", "uss_mib", "threads", "descriptors", "children", "files", "objects", "entries")
EVERY = 500
# Rows in which caches fill.
SETTLED_ROWS = 2
# Growth per row that is not flat.
LIMITS = {
    "rss_mib": 1.0,
    "uss_mib": 1.0,
    "threads": 0.2,
    "descriptors": 0.2,
    "children": 0.2,
    "objects": 500,
    "entries": 50,
}
CACHED = type(functools.cache(print))


def shapes(seed: int) -> Iterator[tuple[int, int]]:
    """Rows and tokens of every batch, the same on all ranks."""
    numbers = random.Random(seed)
    while True:
        yield numbers.choice(PLAIN) if numbers.random() < 0.8 else (numbers.randint(1, 40), numbers.randint(3, 32))


def batches(seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of words."""
    generator = torch.Generator().manual_seed(seed)
    for rows, tokens in shapes(seed):
        words = torch.randint(0, NUM_WORDS, (rows, tokens), generator=generator)
        yield {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}


def containers() -> Counter[str]:
    """The entries of every container that an object of the library holds, and of every cached function of it."""
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        # By type: isinstance asks the object, and some answer by importing a module.
        kind = type(each)
        module = str(getattr(each, "__module__", "") if kind is CACHED else kind.__module__)
        if not module.startswith("hybridpp"):
            continue
        if kind is CACHED:
            found[f"{module}.{each.__qualname__}()"] += each.cache_info().currsize
            continue
        slots = {name: getattr(each, name, None) for name in getattr(kind, "__slots__", ())}
        for name, value in (*getattr(each, "__dict__", {}).items(), *slots.items()):
            if isinstance(value, dict | list | set | deque | WeakKeyDictionary):
                found[f"{module}.{kind.__qualname__}.{name}"] += len(value)
    return found


def count() -> dict[str, float]:
    """What this rank holds now."""
    gc.collect()
    process = psutil.Process()
    memory = process.memory_full_info()
    folders = [folder for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())) if folder.is_dir()]
    return {
        "rss_mib": memory.rss / 2**20,
        "uss_mib": memory.uss / 2**20,
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "children": len(process.children(recursive=True)),
        "files": sum(len(list(folder.iterdir())) for folder in folders),
        "objects": len(gc.get_objects()),
        **containers(),
    }


class Table:
    """A row of every count, and at the end whether it is flat."""

    def __init__(self, is_master: bool):
        self.rows: list[dict[str, float]] = []
        self._is_master = is_master
        self._start = time.monotonic()

    def add(self, step: int) -> float:
        """Count on all ranks; the seconds until now, of rank 0. Collective."""
        passed: float = gather_objects(current_world().control(), "a row's time", time.monotonic() - self._start)[0]
        of_ranks = gather_objects(current_world().control(), "a row of the table", count())
        names = {name for row in of_ranks for name in row}
        row = {name: max(one.get(name, 0) for one in of_ranks) for name in names}
        row["entries"] = max(sum(one[name] for name in one if name not in COLUMNS) for one in of_ranks)
        self.rows.append(row)
        if self._is_master:
            if len(self.rows) == 1:
                print(f"{'step':>6} {'s':>6} " + " ".join(f"{name:>11}" for name in COLUMNS), flush=True)
            numbers = " ".join(f"{row[name]:11.1f}" if "mib" in name else f"{row[name]:11.0f}" for name in COLUMNS)
            print(f"{step:6} {passed:6.0f} {numbers}", flush=True)
        return passed

    def verdict(self) -> bool:
        """Whether all is flat, printed with what is not."""
        rows = self.rows[SETTLED_ROWS:]
        growth = {name: slope([row.get(name, 0) for row in rows]) for name in {name for row in rows for name in row}}
        for name in COLUMNS:
            print(f"{name}: {growth[name]:+.2f} per {EVERY} steps, at most {max(row[name] for row in rows):.0f}")
        grown = sorted((name for name in growth if name not in COLUMNS), key=lambda name: -growth[name])
        for name in grown[:8]:
            counts = ", ".join(f"{row.get(name, 0):.0f}" for row in self.rows)
            print(f"  {name}: {growth[name]:+.2f} ({counts})")
        is_flat = all(growth[name] <= limit for name, limit in LIMITS.items())
        print("flat" if is_flat else f"NOT FLAT (more than {LIMITS} per {EVERY} steps)", flush=True)
        return is_flat


def slope(values: Sequence[float]) -> float:
    """Growth per row."""
    return statistics.linear_regression(range(len(values)), values).slope if len(values) > 1 else 0.0


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=NUM_WORDS, max_position_embeddings=64, **sizes)).train()


def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
    return outputs.loss


def run(num_steps: int, seconds: float) -> bool:
    launch_from_torch(backend="gloo", watchdog_s={"step": 300})
    coordinator = DistCoordinator()
    plugin = HybridParallelPlugin(tp_size=2, pp_size=2, microbatch_size=2, max_norm=1.0, check_weights_every=50)
    booster, model = Booster(plugin=plugin, device="cpu"), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, *_ = booster.boost(model, optimizer)
    train, test = batches(1), batches(2)
    table = Table(coordinator.is_master())
    folder = gather_objects(
        current_world().control(),
        "making a folder",
        tempfile.mkdtemp(prefix="soak-") if coordinator.is_master() else None,
    )[0]
    for step in range(1, num_steps + 1):
        booster.execute_pipeline(train, model, criterion, optimizer)
        optimizer.step()
        if step % (EVERY // 2) == 0:
            model.eval()
            with torch.no_grad():
                booster.execute_pipeline(test, model, criterion)
            model.train()
            booster.save(Path(folder, "checkpoints"), step=step, keep_last=2, asynchronous=True)
        if step % EVERY == 0:
            booster.wait_for_save()
            if table.add(step) > seconds:
                break
    is_flat = not coordinator.is_master() or table.verdict()
    coordinator.block_all()
    if coordinator.is_master():
        shutil.rmtree(folder)
    coordinator.destroy()
    return is_flat


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=int, default=EVERY, help="steps between two rows")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no step after the row at which these are over")
    options = parser.parse_args()
    EVERY = options.every
    sys.exit(not run(options.steps, options.seconds))
