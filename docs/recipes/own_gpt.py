"""A GPT in plain PyTorch, in pipeline stages.

    torchrun --standalone --nproc-per-node 2 docs/recipes/own_gpt.py

The model is ordinary code: embeddings whose weight is the head's, too, blocks in a list, a causal mask. Nothing in it
knows of stages. ``boost`` traces one forward, finds the blocks and cuts between them; the tied weight is held by the
first and the last stage, and its gradients are added.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridpp import Booster, DistCoordinator, HybridAdam, HybridParallelPlugin, launch_from_torch

TEXT = "a schedule is data: it is made by a pure function, checked, printed, and run by one executor. " * 40
LENGTH, WIDTH, HEADS, LAYERS = 32, 64, 4, 4


class Block(nn.Module):
    """Attention and a feed-forward network, each with a way around it."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A language model over bytes."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def samples() -> list[tuple[Tensor, Tensor]]:
    """Pairs of the bytes of a piece of text, and those one further."""
    data = torch.tensor(list(TEXT.encode()))
    starts = range(0, len(data) - LENGTH - 1, LENGTH)
    return [(data[at : at + LENGTH], data[at + 1 : at + LENGTH + 1]) for at in starts]


def criterion(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def main(pp_size: int | None = None, epochs: int = 3) -> list[float]:
    launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    plugin = HybridParallelPlugin(pp_size=pp_size or coordinator.world_size, num_microbatches=4, max_norm=1.0)
    dataloader = plugin.prepare_dataloader(samples(), batch_size=8, shuffle=True)
    model = GPT()
    optimizer = HybridAdam(model.parameters(), lr=3e-3)

    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, _ = booster.boost(model, optimizer, criterion, dataloader)
    losses = []
    for epoch in range(epochs):
        data_iter = iter(dataloader)
        for _ in range(len(dataloader)):
            losses.append(booster.execute_pipeline(data_iter, model, criterion, optimizer)["loss"].item())
            optimizer.step()
        coordinator.print_on_master(f"epoch {epoch}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
