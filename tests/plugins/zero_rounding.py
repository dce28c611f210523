"""How far weights in fp32 get from those in float64 when sums of gradients are added in another order.

PYTHONPATH=.:plugins:tests python tests/plugins/zero_rounding.py [--seeds 9]

The steps of the matrix (AdamW, clipping, a last batch that is ragged), without dropout. torch alone trains in one
process, with whole batches and with micro-batches, and with DDP on two gloo processes, which reduces once per step or
after every micro-batch; the plugin trains with each stage of ZeRO. All start from the same weights and see the same
samples. What they differ by from the same training in float64 is rounding, and so is what they differ by from another.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from plugins.zero_matrix import BATCH, NUM_STEPS, RAGGED, MatrixModel
from plugins.zero_models import LENGTH, SAMPLE, VOCABULARY, two_groups, weights_of
from processes import run_ranks
from support import replica_part
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import current_world

MAX_NORM = 0.5


def make_model():
    model = MatrixModel()
    for block in model.blocks:
        block.drop.p = 0.0
    return model


def sum_of_losses(logits, tokens):
    """Summed over samples, in the logits' own format."""
    targets = (tokens.flatten() + 1) % VOCABULARY
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / LENGTH


def mean_of_losses(logits, tokens):
    return sum_of_losses(logits, tokens) / len(tokens)


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(NUM_STEPS)]
    return [*made[:-1], made[-1][:RAGGED]]


def with_torch(seed, *, dtype=torch.float32, size=BATCH, backwards=False, ranks=1, each=False):
    """torch's own loop: ``size`` samples per pass; ``each``: DDP reduces after every pass, else in the last one."""
    model = make_model().to(dtype)
    optimizer = two_groups(model.parameters())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    called = DistributedDataParallel(model, find_unused_parameters=True) if ranks > 1 else model
    for batch in batches(seed):
        parts = replica_part(batch, current_world().rank, ranks).split(size) if ranks > 1 else batch.split(size)
        parts = parts[::-1] if backwards else parts
        most = math.ceil(len(batch) / ranks)  # samples of a replica
        num_passes = math.ceil(most / size)
        for number in range(num_passes):
            is_last = number == num_passes - 1
            # A replica with fewer samples takes part with a pass that counts nothing.
            part, weight = (parts[number], 1.0) if number < len(parts) else (parts[-1], 0.0)
            with called.no_sync() if ranks > 1 and not (each or is_last) else nullcontext():
                (weight * ranks / len(batch) * sum_of_losses(called(part), part)).backward()
        nn.utils.clip_grad_norm_(trained, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def with_the_plugin(seed, **settings):
    given = {"pp_size": 1, "microbatch_size": 1, "num_microbatches": None, "max_norm": MAX_NORM}
    booster, model = Booster(plugin=HybridParallelPlugin(**given, **settings)), make_model()
    parts = booster.boost(model, two_groups(model.parameters()), criterion=mean_of_losses, sample=SAMPLE)
    for batch in batches(seed):
        part = replica_part(batch, booster.plugin.layout.here.dp, booster.plugin.dp_size)
        booster.execute_pipeline(iter([part]), parts.model, mean_of_losses, parts.optimizer)
        parts.optimizer.step()
    with booster.unsharded(parts.model):
        return weights_of(parts.model)


Run = tuple[int, Callable[[int], dict[str, torch.Tensor]]]
RUNS: dict[str, Run] = {
    "torch, whole batches": (1, with_torch),
    "torch, passes of 6": (1, partial(with_torch, size=6)),
    "torch, passes of 1": (1, partial(with_torch, size=1)),
    "torch, passes of 1, last sample first": (1, partial(with_torch, size=1, backwards=True)),
    "torch DDP, 2 replicas, passes of 1, one reduction": (2, partial(with_torch, size=1, ranks=2)),
    "torch DDP, 2 replicas, a reduction after each pass": (2, partial(with_torch, size=1, ranks=2, each=True)),
    "hybridpp, 2 replicas, `zero_stage=0`": (2, with_the_plugin),
    "hybridpp, 2 replicas, `zero_stage=2`": (2, partial(with_the_plugin, zero_stage=2)),
    "hybridpp, 2 replicas, `zero_stage=3`": (2, partial(with_the_plugin, zero_stage=3)),
}
# What each of the last is compared with beside float64: the same sums, reduced once.
ONCE = {
    "torch, passes of 6": "torch, whole batches",
    "torch, passes of 1": "torch, whole batches",
    "torch, passes of 1, last sample first": "torch, passes of 1",
    "torch DDP, 2 replicas, passes of 1, one reduction": "torch, whole batches",
    "torch DDP, 2 replicas, a reduction after each pass": "torch DDP, 2 replicas, passes of 1, one reduction",
    "hybridpp, 2 replicas, `zero_stage=0`": "torch, whole batches",
    "hybridpp, 2 replicas, `zero_stage=2`": "hybridpp, 2 replicas, `zero_stage=0`",
    "hybridpp, 2 replicas, `zero_stage=3`": "hybridpp, 2 replicas, `zero_stage=0`",
}


def flat(weights):
    return torch.cat([weight.double().flatten() for _, weight in sorted(weights.items())])


def compared(runs):
    """Medians over runs: the largest difference, elements that differ by more than 1e-6, the norm of differences."""
    off = [(one - other).abs() for one, other in runs]
    norms = [(difference.norm() / other.norm()).item() for difference, (_, other) in zip(off, runs, strict=True)]
    largest = [difference.max().item() for difference in off]
    many = statistics.median((difference > 1e-6).sum().item() for difference in off)
    return f"{statistics.median(largest):.1e} ({max(largest):.1e}) | {many:.0f} | {statistics.median(norms):.1e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=9, help="runs, each on other samples")
    seeds = range(1, parser.parse_args().seeds + 1)
    torch.set_num_threads(1)
    exact = {seed: flat(with_torch(seed, dtype=torch.float64)) for seed in seeds}
    found = {
        name: {seed: flat(run_ranks(partial(run, seed), ranks)[0]) for seed in seeds}
        for name, (ranks, run) in RUNS.items()
    }
    print(f"{len(exact[1]):,} elements, medians of {len(seeds)} runs (the worst of all runs)\n")
    header = "largest | > 1e-6 | norm"
    print(f"| | from float64: {header} | from | {header} |\n|---|--:|--:|--:|---|--:|--:|--:|")
    for name, by_seed in found.items():
        cells = compared([(by_seed[seed], exact[seed]) for seed in seeds])
        base = ONCE.get(name)
        beside = "" if base is None else compared([(by_seed[seed], found[base][seed]) for seed in seeds])
        print(f"| {name} | {cells} | {base or ''} | {beside or ' | | '} |", flush=True)


if __name__ == "__main__":
    main()
