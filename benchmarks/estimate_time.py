"""Estimated against measured step times, where units were measured; and what a search among all layouts chooses.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 2 benchmarks/estimate_time.py

Every round measures the links and the units of the model, on both ranks at once, then steps of each layout; so both see
the same load. A row has the medians over the rounds, the median of each round's ratio, and the ratio of the shortest:
on a busy host that is the least disturbed. The layout with the shortest estimate is compared with the one that is
measured to be fastest.
"""

import argparse
import statistics
import time
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from vit import make_batch, make_vit

from hybridpp import Booster, HybridAdam, HybridParallelPlugin, launch_from_torch
from hybridpp.cluster import current_world
from hybridpp.config import Precision
from hybridpp.estimate import (
    DEVICES,
    DeviceProfile,
    EstimateInput,
    JobSizes,
    LayoutEstimator,
    measure_device,
    measure_links,
)

GLOBAL_BATCH, STEPS, LENGTH = 16, 3, 64
CPU = torch.device("cpu")
# Layouts of two ranks, with the size of a micro-batch.
LAYOUTS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"pp_size": 2}, 2),
    ({"pp_size": 2}, 4),
    ({"pp_size": 2, "schedule": "gpipe"}, 4),
    ({"pp_size": 2, "schedule": "zb-h1"}, 2),
    ({"pp_size": 2, "schedule": "zb-v"}, 2),
    ({"pp_size": 2, "schedule": "interleaved"}, 2),
    ({"pp_size": 2, "gradient_checkpoint_config": {}}, 4),
    ({}, 4),
    ({}, 8),
    ({"zero_stage": 1}, 4),
)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=256,
        n_layer=8,
        n_head=8,
        vocab_size=2000,
        n_positions=LENGTH,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLMLoss",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).train()


def tokens(num_samples: int) -> dict[str, Tensor]:
    ids = torch.full((num_samples, LENGTH), 3)
    return {"input_ids": ids, "labels": ids}


MODELS = {"ViT": (lambda: make_vit(256, 8, 4), make_batch), "GPT-2": (gpt2, tokens)}


class Job:
    """One layout, boosted."""

    def __init__(self, name: str, settings: dict[str, Any], size: int):
        make, batch_of = MODELS[name]
        self.settings = settings
        num_replicas = 2 // settings.get("pp_size", 1)
        self.sizes = JobSizes(world_size=2, microbatch_size=size, num_microbatches=GLOBAL_BATCH // num_replicas // size)
        self._batch = batch_of(GLOBAL_BATCH // num_replicas)
        model = make()
        plugin = HybridParallelPlugin(num_microbatches=self.sizes.num_microbatches, precision="fp32", **settings)
        self._booster = Booster(plugin=plugin)
        optimizer = HybridAdam(model.parameters(), lr=0.0)
        self._parts = self._booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=batch_of(2))
        self.measured_ms: list[float] = []
        self.shortest_ms = float("inf")
        self.estimated_ms: list[float] = []

    def step_ms(self) -> float:
        """The median of some steps."""
        times = []
        for _ in range(STEPS):
            dist.barrier()
            start = time.perf_counter()
            self._booster.execute_pipeline(
                iter([self._batch]), self._parts.model, self._parts.criterion, self._parts.optimizer
            )
            assert self._parts.optimizer is not None
            self._parts.optimizer.step()
            dist.barrier()
            times.append(1e3 * (time.perf_counter() - start))
        self.shortest_ms = min(self.shortest_ms, *times)
        return statistics.median(times)


def estimator_of(name: str) -> LayoutEstimator:
    """What estimates layouts of a model; its device is set for each round."""
    make, batch_of = MODELS[name]
    given = EstimateInput(
        precision=Precision.FP32,
        device=DEVICES["cpu"],
        sample=batch_of(2),
        criterion=lambda outputs, inputs: outputs.loss,
    )
    return HybridParallelPlugin.layout_estimator(make(), given)


def estimated_ms(estimator: Any, job: Job, profile: DeviceProfile) -> float:
    """The step of a layout, of units that are measured now, on all ranks at once."""
    times = estimator.measure_times(job.sizes, job.settings, CPU)
    # Each rank has a core, in so far as the host has two to spare: the others see the same load.
    estimator.given = replace(estimator.given, device=replace(profile, measured=(times,), cores=2))
    estimate = estimator.estimate(job.sizes, job.settings)
    assert estimate.is_measured
    return float(estimate.time.step_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    launch_from_torch(seed=0)
    is_first = dist.get_rank() == 0
    if is_first:
        print("| model | layout | micro-batches | measured (ms) | estimated | off by | shortest off by |")
        print("|---|---|---|--:|--:|--:|--:|", flush=True)
    for name in args.models:
        jobs = [Job(name, settings, size) for settings, size in LAYOUTS]
        for job in jobs:
            job.step_ms()
        estimator = estimator_of(name)
        for _ in range(args.rounds):
            profile = measure_links(measure_device(CPU), current_world())
            for job in jobs:
                job.estimated_ms.append(estimated_ms(estimator, job, profile))
                job.measured_ms.append(job.step_ms())
        if is_first:
            report(name, jobs)
    dist.destroy_process_group()


def report(name: str, jobs: list[Job]) -> None:
    """A row per layout, and the choice."""
    for job in jobs:
        measured, estimated = statistics.median(job.measured_ms), statistics.median(job.estimated_ms)
        ratio = statistics.median(e / m for e, m in zip(job.estimated_ms, job.measured_ms, strict=True))
        layout = ", ".join(f"{key}={value}" for key, value in job.settings.items()) or "two replicas"
        batches = f"{job.sizes.num_microbatches} of {job.sizes.microbatch_size}"
        shortest = min(job.estimated_ms) / job.shortest_ms
        off = f"{100 * (ratio - 1):+.1f} % | {100 * (shortest - 1):+.1f} %"
        cells = f"{batches} | {measured:.1f} | {estimated:.1f} | {off}"
        print(f"| {name} | {layout} | {cells} |", flush=True)
    best = min(jobs, key=lambda job: statistics.median(job.measured_ms))
    chosen = min(jobs, key=lambda job: statistics.median(job.estimated_ms))
    slower = statistics.median(c / b for c, b in zip(chosen.measured_ms, best.measured_ms, strict=True))
    print(f"\n{name}: chosen {chosen.settings}, best {best.settings}: {100 * (slower - 1):+.1f} %\n", flush=True)


if __name__ == "__main__":
    main()
