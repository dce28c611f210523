"""The cost of sharding layers over two ranks, compared with torch's DTensor and with the necessary work alone.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins torchrun --standalone --nproc-per-node 2 benchmarks/tensor_parallel.py

Forward and backward of a ViT (12 layers of 6 heads, 65 tokens, fp32, batch of 4), gloo, one thread per rank. Queries,
keys, values and the MLP's first layer are sharded by columns, the layers after them by rows. Every round runs each
variant once, in turn. The necessary work is the layers' computation on a rank's shard, without communication (with
wrong results), and the 48 all-reduces of activations that belong to it, one after the other on existing tensors; both
are measured like the rest. Under sequence parallelism an all-gather and a reduce-scatter of half the size replace each
all-reduce, two more all-gathers per layer gather the saved shards, two more are at the ends, and the work of norms,
residuals and dropouts is halved.
"""

import argparse
import os
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from baselines import Batch, StepFunction
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from vit import make_batch, make_vit

from hybridpp import Booster, HybridParallelPlugin, launch_from_torch
from hybridpp.cluster import current_world
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.sharding_plan import plan_from_patterns
from hybridpp.tensor_parallel import shard

NUM_SAMPLES, NUM_LAYERS, NUM_HEADS, NUM_TOKENS = 4, 12, 6, 65
# Per layer: two sums forwards, two backwards.
NUM_COLLECTIVES = 4 * NUM_LAYERS
PLAN = {
    "*.q_proj": "column",
    "*.k_proj": "column",
    "*.v_proj": "column",
    "*.o_proj": "row",
    "*.fc1": "column",
    "*.fc2": "row",
}
PIPELINE, ALONE, DTENSOR = "hybridpp, `execute_pipeline`", "hybridpp, the divided model", "torch DTensor"
ONE, LAYERS, COLLECTIVES = "one process", "the layers alone", "the collectives alone"
SHARDS, OF_SHARDS = "hybridpp on shards, `execute_pipeline`", "the collectives of shards alone"


def make_model(hidden: int) -> nn.Module:
    return make_vit(hidden, NUM_LAYERS, NUM_HEADS)


def plain(model: nn.Module, batch: Batch) -> StepFunction:
    """Whatever the model is made of."""

    def step() -> None:
        model.zero_grad()
        model(**batch).loss.backward()

    return step


def pipeline(hidden: int, batch: Batch, shards: bool = False, num_microbatches: int = 1) -> StepFunction:
    """``booster.execute_pipeline``; with sequence parallelism or without."""
    plugin = HybridParallelPlugin(
        tp_size=2,
        pp_size=1,
        num_microbatches=num_microbatches,
        precision="fp32",
        tensor_parallel_plan=PLAN,
        enable_sequence_parallelism=shards,
    )
    model = make_model(hidden)
    booster = Booster(plugin=plugin, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    boosted = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=batch)

    def step() -> None:
        boosted.optimizer.zero_grad()
        booster.execute_pipeline(iter([batch]), boosted.model, boosted.criterion, boosted.optimizer)

    return step


def divided(hidden: int) -> nn.Module:
    """The model with this library's layers."""
    model, group = make_model(hidden), current_world().split([[0, 1]])
    assert group is not None
    shard(ModuleAdapter(model), plan_from_patterns(model, PLAN, 2).spec, group)
    return model


def without_collectives(hidden: int) -> nn.Module:
    """The same layers as plain ones that know of no other rank."""
    model = divided(hidden)
    for module in model.modules():
        vars(module).pop("forward", None)
    return model


def dtensor(hidden: int) -> nn.Module:
    """The model with torch's layers."""
    model = make_model(hidden)
    styles = {name: ColwiseParallel() if style == "column" else RowwiseParallel() for name, style in PLAN.items()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), styles)


def collectives(hidden: int) -> StepFunction:
    """The sums of activations, and nothing else."""
    activations = [torch.zeros(NUM_SAMPLES, NUM_TOKENS, hidden) for _ in range(NUM_COLLECTIVES)]

    def step() -> None:
        for activation in activations:
            dist.all_reduce(activation)

    return step


def collectives_of_shards(hidden: int) -> StepFunction:
    """What stands for each sum where sequences are divided, and nothing else."""
    group = current_world().split([[0, 1]])
    assert group is not None
    shards = [torch.zeros(NUM_SAMPLES, (NUM_TOKENS + 1) // 2, hidden) for _ in range(NUM_COLLECTIVES)]
    wholes = [torch.zeros(NUM_SAMPLES, NUM_TOKENS + 1, hidden) for _ in range(NUM_COLLECTIVES)]

    def step() -> None:
        for number, (shard_, whole) in enumerate(zip(shards, wholes, strict=True)):
            group.all_gather(shard_)
            group.reduce_scatter(whole, 1)
            if number % 2:
                group.all_gather(shard_)

    return step


def variants(hidden: int) -> dict[str, StepFunction]:
    """All of them; those that compute the model agree on its loss."""
    batch = make_batch(NUM_SAMPLES)
    models = {ALONE: divided(hidden), DTENSOR: dtensor(hidden), ONE: make_model(hidden)}
    losses = {name: model(**batch).loss.item() for name, model in models.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-5, losses
    steps = {name: plain(model, batch) for name, model in models.items()}
    bare = plain(without_collectives(hidden), batch)
    return {
        PIPELINE: pipeline(hidden, batch),
        SHARDS: pipeline(hidden, batch, shards=True),
        **steps,
        LAYERS: bare,
        COLLECTIVES: collectives(hidden),
        OF_SHARDS: collectives_of_shards(hidden),
    }


def measure(steps: dict[str, StepFunction], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step, by variant; the first two rounds are left out."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            if name != ONE or dist.get_rank() == 0:
                step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[2:] for name, times in seconds.items()}


def lower_quartile(times: list[float]) -> float:
    """Tells more of the variants than of what else the machine does."""
    return statistics.quantiles(times, n=4)[0]


def table(seconds: dict[str, list[float]]) -> str:
    """All variants, and how this library stands to them."""
    rows = {name: [statistics.median(times), lower_quartile(times)] for name, times in seconds.items()}
    rows["layers + collectives"] = [sum(both) for both in zip(rows[LAYERS], rows[COLLECTIVES], strict=True)]
    lines = [
        "| | median (ms) | lower quartile (ms) | of `execute_pipeline`'s | of its quartile |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, (median, quartile) in rows.items():
        ratios = median / rows[PIPELINE][0], quartile / rows[PIPELINE][1]
        lines.append(f"| {name} | {median * 1e3:.1f} | {quartile * 1e3:.1f} | {ratios[0]:.3f} | {ratios[1]:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[192, 384])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    launch_from_torch(seed=0)
    for hidden in args.hidden:
        seconds = measure(variants(hidden), args.rounds)
        if dist.get_rank() == 0:
            print(
                f"\nhidden {hidden}, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}\n\n{table(seconds)}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
