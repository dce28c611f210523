"""Implementations of one pipeline step: this library, torch's pipelining, a hand-written loop, and one process."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from vit import HandCut, cross_entropy, make_vit

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.pipeline import ReadAheadIterator

Batch = dict[str, Tensor]
StepFunction = Callable[[], None]


def one_process(hidden: int, batch: Batch, num_microbatches: int) -> StepFunction:
    """Plain PyTorch with accumulation; runs on whoever calls it."""
    model = make_vit(hidden)
    parts = [
        dict(zip(batch, values, strict=True))
        for values in zip(*(tensor.chunk(num_microbatches) for tensor in batch.values()), strict=True)
    ]

    def step() -> None:
        model.zero_grad()
        for part in parts:
            (model(**part).loss / num_microbatches).backward()

    return step


def hybridpp(hidden: int, batch: Batch, num_microbatches: int, schedule: str) -> StepFunction:
    """``booster.execute_pipeline``."""
    plugin = HybridParallelPlugin(
        tp_size=1,
        pp_size=dist.get_world_size(),
        num_microbatches=num_microbatches,
        precision="fp32",
        schedule=schedule,
    )
    model = make_vit(hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    booster = Booster(plugin=plugin)
    boosted = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss, sample=batch)

    # As from the plugin's dataloader.
    batches = ReadAheadIterator(itertools.repeat(batch))

    def step() -> None:
        boosted.optimizer.zero_grad()
        booster.execute_pipeline(batches, boosted.model, boosted.criterion, boosted.optimizer)

    return step


def torch_pipelining(hidden: int, batch: Batch, num_microbatches: int, schedule: str) -> StepFunction:
    """``torch.distributed.pipelining``, its stages cut by hand."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    make: Any = getattr(pipelining, f"Schedule{schedule}")
    one_stage = schedule in ("GPipe", "1F1B")
    num_stages = num_ranks if one_stage else 2 * num_ranks
    mine = [rank] if one_stage else [rank, num_stages - 1 - rank if "ZBV" in schedule else rank + num_ranks]
    model = make_vit(hidden)
    modules = {stage: HandCut(model, stage, num_stages) for stage in mine}
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(module, stage, num_stages, device) for stage, module in modules.items()]
    runner = make(stages[0] if one_stage else stages, num_microbatches, loss_fn=cross_entropy)

    def step() -> None:
        for module in modules.values():
            module.zero_grad()
        images = [batch["pixel_values"]] if 0 in modules else []
        target = {"target": batch["labels"], "losses": []} if num_stages - 1 in modules else {}
        runner.step(*images, **target)

    return step


def bare_loop(hidden: int, batch: Batch, num_microbatches: int) -> StepFunction:
    """1F1B as one writes it in an afternoon, for one model and these sizes only."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    stage = HandCut(make_vit(hidden), rank, last + 1)
    images, labels = (batch[name].chunk(num_microbatches) for name in ("pixel_values", "labels"))
    shape = (images[0].shape[0], 65, hidden)
    down, up = dist.new_group(), dist.new_group()

    def receive(peer: int, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
        buffer = torch.empty(shape)
        return buffer, dist.irecv(buffer, peer, group=group)

    def step() -> None:
        stage.zero_grad()
        held: list[tuple[Tensor, Tensor]] = []
        sends: list[Any] = []

        def forward(number: int) -> None:
            x = images[number]
            if rank > 0:
                x, arrived = receive(rank - 1, down)
                arrived.wait()
                x.requires_grad_()
            y = stage(x)
            if rank < last:
                sends.append(dist.isend(y.detach(), rank + 1, group=down))
            else:
                y = cross_entropy(y, labels[number]) / num_microbatches
            held.append((x, y))

        def backward() -> None:
            x, y = held.pop(0)
            gradient = None
            if rank < last:
                gradient, arrived = receive(rank + 1, up)
                arrived.wait()
            y.backward(gradient)
            if rank > 0:
                sends.append(dist.isend(x.grad, rank - 1, group=up))

        warmup = min(last - rank, num_microbatches)
        for number in range(warmup):
            forward(number)
        for number in range(warmup, num_microbatches):
            forward(number)
            backward()
        for _ in range(warmup):
            backward()
        for send in sends:
            send.wait()

    return step
