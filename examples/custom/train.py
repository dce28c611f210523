"""Train a module of one's own, whose layers have stage numbers: two stages, and a replica on every further two ranks.

    torchrun --standalone --nproc-per-node 8 examples/custom/train.py

is two stages and four replicas. The network is plain PyTorch: the numbers are attributes of its layers, its forward
knows nothing of stages, and the same script runs on one process (where the numbers have no effect).
"""

from argparse import ArgumentParser, Namespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch

NUM_FEATURES, NUM_CLASSES = 16, 4


class Residual(nn.Module):
    """Two linear layers, and a way around them."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """A head, four layers, a classifier; the numbers say which stage runs what."""

    def __init__(self, width: int):
        super().__init__()
        self.head = nn.Linear(NUM_FEATURES, width)
        self.layer1, self.layer2 = Residual(width), Residual(width)
        self.layer3, self.layer4 = Residual(width), Residual(width)
        self.fc = nn.Linear(width, NUM_CLASSES)

        # pipeline parallel config
        self.head.pipeline_stage = 0
        self.layer1.pipeline_stage = 0
        self.layer2.pipeline_stage = 0
        self.layer3.pipeline_stage = 1
        self.layer4.pipeline_stage = 1
        self.fc.pipeline_stage = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.head(x)))
        scale = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        return self.fc(self.layer4(self.layer3(x * scale)))


class Rows(torch.utils.data.Dataset):
    """Random rows; the class of each is the largest of its first numbers."""

    def __init__(self, num_samples: int, seed: int):
        self.rows = torch.randn(num_samples, NUM_FEATURES, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.rows[index, :NUM_CLASSES].argmax()


def criterion(logits: Tensor, batch: Any) -> Tensor:
    """The mean loss of a micro-batch; what the model does not take of a batch is here, too."""
    return F.cross_entropy(logits, batch[1])


def evaluate(booster: Booster, model: nn.Module, dataloader: Any, coordinator: DistCoordinator) -> float:
    """The share of right predictions of this pipeline's rows. Collective: all ranks.

    ``outputs_on="all"``: every rank of a pipeline gets the outputs of its last stage.
    """
    model.eval()
    num_right = num_rows = 0
    with torch.no_grad():
        for batch in dataloader:
            result = booster.execute_pipeline(
                iter([batch]), model, return_loss=False, return_outputs=True, outputs_on="all"
            )
            num_right += int((result["outputs"].argmax(-1).cpu() == batch[1]).sum())
            num_rows += len(batch[1])
    return num_right / num_rows


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="per replica (default: %(default)s)")
    parser.add_argument("--num-samples", type=int, default=2048, help="to train on (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--pp-size", type=int, choices=(1, 2), help="default: 2 on 2, 4, ... processes, else 1")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def train(args: Namespace, coordinator: DistCoordinator) -> None:
    """The whole job."""
    pp_size = args.pp_size or (1 if coordinator.world_size % 2 else 2)
    plugin = HybridParallelPlugin(pp_size=pp_size, num_microbatches=2)
    booster = Booster(plugin=plugin)
    model = Network(args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    dataloader = plugin.prepare_dataloader(
        Rows(args.num_samples, args.seed), args.batch_size, shuffle=True, seed=args.seed
    )
    held_out = plugin.prepare_dataloader(Rows(256, args.seed + 1), args.batch_size)

    boosted = booster.boost(model, optimizer, criterion, dataloader)
    print(
        f"rank {coordinator.rank}: stage {plugin.stage_manager.stage} of {pp_size}, "
        f"replica {coordinator.rank // pp_size} of {plugin.dp_size}: "
        f"{', '.join(dict.fromkeys(name.partition('.')[0] for name, _ in boosted.model.named_parameters()))}"
    )

    for epoch in range(args.epochs):
        model.train()
        data_iter = iter(dataloader)
        for _ in range(len(dataloader)):
            loss = booster.execute_pipeline(data_iter, model, criterion, boosted.optimizer)["loss"]
            boosted.optimizer.step()
        accuracy = evaluate(booster, model, held_out, coordinator)
        coordinator.print_on_master(f"Epoch [{epoch + 1}]: loss {loss.item():.4f}, accuracy {accuracy:.2%}")


def main() -> None:
    args = parse_args()
    launch_from_torch(seed=args.seed)
    coordinator = DistCoordinator()
    try:
        train(args, coordinator)
    finally:
        coordinator.destroy()


if __name__ == "__main__":
    main()
