"""An evaluation after every epoch of a loop of one's own: each held-out sample counts once, on every rank.

    torchrun --standalone --nproc-per-node 4 docs/recipes/evaluate_in_the_loop.py

``outputs_on="all"`` gives the outputs of the last stage to every rank of the pipeline. Where the replicas do not divide
the samples, the last step repeats some: ``dataloader.repeats`` tells which, as the Trainer asks it. ``num_items``
is what the loss of a batch is a mean over, such as tokens that are not padding: the mean does not depend on batches.
"""

import torch
import torch.distributed as dist
from torch import nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch


def samples(count: int, seed: int) -> list[tuple[torch.Tensor, int]]:
    rows = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return [(row, int(row[:3].argmax())) for row in rows]


def evaluate(booster: Booster, model: nn.Module, criterion: nn.Module, dataloader: object) -> tuple[float, float]:
    """The mean loss and the accuracy over all replicas. Collective: every rank."""
    was_training = model.training
    model.eval()
    totals = torch.zeros(4, dtype=torch.float64)
    with torch.no_grad():
        for step, batch in enumerate(dataloader):
            # One micro-batch: an evaluation has no backward pass to overlap with.
            result = booster.execute_pipeline(
                iter([batch]), model, criterion, return_outputs=True, outputs_on="all", num_microbatches=1
            )
            if dataloader.repeats(step):
                continue
            labels = batch[1]
            right = (result["outputs"].argmax(-1).cpu() == labels).sum()
            num_items = result["num_items"]
            totals += torch.stack([result["loss"].cpu() * num_items, num_items, right, torch.tensor(len(labels))])
    model.train(was_training)
    dist.all_reduce(totals, group=booster.plugin.dp_group)
    loss, num_items, right, count = totals.tolist()
    return loss / num_items, right / count


def main(pp_size: int = 2, epochs: int = 3, num_held_out: int = 21) -> list[tuple[float, float]]:
    launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    plugin = HybridParallelPlugin(pp_size=pp_size, num_microbatches=2)
    dataloader = plugin.prepare_dataloader(samples(64, seed=0), batch_size=8, shuffle=True)
    held_out = plugin.prepare_dataloader(samples(num_held_out, seed=1), batch_size=5)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss(), dataloader)
    scores = []
    for epoch in range(epochs):
        data_iter = iter(dataloader)
        for _ in range(len(dataloader)):
            booster.execute_pipeline(data_iter, model, criterion, optimizer)
            optimizer.step()
        scores.append(evaluate(booster, model, criterion, held_out))
        coordinator.print_on_master("epoch {}: held-out loss {:.3f}, accuracy {:.1%}".format(epoch, *scores[-1]))
    booster.save_model(model, "outputs/evaluated.safetensors")
    return scores


if __name__ == "__main__":
    main()
