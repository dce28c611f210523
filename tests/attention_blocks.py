"""Blocks that nobody has described, for which plans are to be found."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridpp.plan_search.model_search import infer_plan
from hybridpp.sharding_plan import Plan

WIDTH, HEADS, HEAD = 16, 4, 4


class Attention(nn.Module):
    """Reshapes by the number of heads and the width, as most do."""

    def __init__(self, num_heads: int = HEADS, kv_heads: int = HEADS, norm: int | None = None):
        super().__init__()
        self.num_heads, self.kv_heads, self.head_dim = num_heads, kv_heads, HEAD
        self.q = nn.Linear(WIDTH, num_heads * HEAD)
        self.k = nn.Linear(WIDTH, kv_heads * HEAD)
        self.v = nn.Linear(WIDTH, kv_heads * HEAD)
        self.o = nn.Linear(num_heads * HEAD, WIDTH)
        self.norm_width, self.norm = norm, nn.LayerNorm(norm) if norm else None

    def heads(self, x: Tensor, number: int) -> Tensor:
        return x.view(*x.shape[:2], number, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = self.heads(self.norm(q) if self.norm_width == WIDTH else q, self.num_heads)
        q = self.norm(q) if self.norm_width == HEAD else q
        k, v = self.heads(k, self.kv_heads), self.heads(v, self.kv_heads)
        times = self.num_heads // self.kv_heads
        y = functional.scaled_dot_product_attention(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))
        return self.o(y.transpose(1, 2).reshape(*x.shape[:2], self.num_heads * self.head_dim))


class Shaped(nn.Module):
    """Attention that takes the width of its heads from what it is given, as vision transformers often do."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0):
        super().__init__()
        self.num_heads, self.dropout = HEADS, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.qkv(x).reshape(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Gated(nn.Module):
    """A multi-layer perceptron with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Normalises and adds, around whatever it is given."""

    def __init__(self, width: int = WIDTH, **parts: nn.Module):
        super().__init__()
        self.parts, self.norm = nn.ModuleDict(parts), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = x + part(self.norm(x))
        return x


def infer(block: nn.Module, tp_size: int = 2, *args: Tensor, **kwargs: Tensor) -> Plan:
    torch.manual_seed(0)
    model = nn.Sequential(block)
    args = args or (torch.randn(3, 5, WIDTH),)
    return infer_plan(model, ["0"], {"0": (args, kwargs)}, tp_size)
