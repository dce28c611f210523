"""A model whose blocks are compiled in a moment, trained with compiled blocks."""

from typing import Any

import torch
from support import train
from torch import Tensor, nn

ROWS = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Norm, two layers, dropout, residual."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(torch.relu(self.dropout(self.wide(self.norm(x))))))


class Blocks(nn.Module):
    """Equal blocks between two layers."""

    def __init__(self, number: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(number))
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def mean_square(outputs: Tensor, inputs: Any) -> Tensor:
    """A criterion."""
    return outputs.float().square().mean()


def run(make_model: Any = Blocks, batches: Any = None, **settings: Any) -> dict[str, Any]:
    """Two steps on in-process ranks."""
    return train(make_model, batches or [ROWS, ROWS], criterion=mean_square, num_microbatches=2, **settings)


def run_compiled(
    make_model: Any = Blocks, backend: str = "eager", batches: Any = None, **settings: Any
) -> tuple[dict[str, Any], list[Any]]:
    """The same with compiled blocks, from an empty compiler; and the graphs that were made, on all ranks."""
    # Not on top: it takes 0.3 s.
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    result = run(make_model, batches, compile_blocks={"backend": counter}, **settings)
    return result, counter.graphs
