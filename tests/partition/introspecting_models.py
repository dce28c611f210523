"""Small models whose code asks modules for their parameters and buffers: a dtype, a device, numbers, names, sums."""

import torch
from partition.user_models import Base
from torch import nn
from torch.utils.checkpoint import checkpoint


def told(module):
    """A number that depends on all that a module's parameters and buffers can be asked for."""
    first = next(module.parameters())
    held = list(module.parameters())
    assert first.device.type == "cpu"
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    letters = sum(place * len(name) for place, name in enumerate(names))
    elements = sum(parameter.numel() for parameter in held)
    trainable = sum(parameter.requires_grad for parameter in held)
    return 1 + (letters + elements + trainable + first.dtype.itemsize + len(held)) / 1000


class Noted(nn.Linear):
    """Has buffers, and one weight that does not train."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("ones", torch.ones(outputs, dtype=torch.float64))
        self.bias.requires_grad_(False)

    @property
    def dtype(self):
        return next(self.buffers()).dtype


class Stack(Base):
    """A container that asks about itself, its blocks and what is in them, before and after they run."""

    def __init__(self):
        super().__init__(lambda inputs, outputs: nn.Sequential(Noted(inputs, outputs), nn.ReLU()))
        self.double()
        self.head.float()

    def forward(self, x):
        x = x.to(next(self.parameters()).dtype) * told(self)
        for block in self.blocks:
            assert all(next(other.buffers()).dtype == other[0].dtype for other in self.blocks)
            x = block(x.to(next(block.parameters()).dtype)) * told(block[0])
        return self.head(x.to(next(self.head.parameters()).dtype) * told(self.blocks))


class Nested(nn.Module):
    """Another container around it; its head is tied to its embedding, so one parameter counts once."""

    def __init__(self):
        super().__init__()
        self.stack = Stack()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    @property
    def device(self):
        return next(self.parameters()).device

    def forward(self, x):
        x = self.stack(self.first(x).to(self.device))
        return self.last(torch.cat([x, x], -1)) * told(self)


class _Bias(nn.Module):
    """Makes what blocks add, of buffers alone, and keeps it in one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", torch.arange(4.0))
        self.register_buffer("bias", None, persistent=False)

    def forward(self):
        first = next(self.buffers())
        if self.bias is None:
            self.register_buffer("bias", self.slopes.to(first.device, first.dtype) * 2, persistent=False)
        return self.bias


class Biased(nn.Linear):
    """Calls another unit."""

    def forward(self, x, bias):
        return super().forward(x) + bias()


class SharedBias(Base):
    """Every block is given a unit that has nothing but buffers; half of them are checkpointed."""

    def __init__(self):
        super().__init__(Biased)
        self.bias = _Bias()

    def forward(self, x):
        for place, block in enumerate(self.blocks):
            x = checkpoint(block, x, self.bias, use_reentrant=False) if place % 2 else block(x, self.bias)
        return self.head(x)


class AskingInCheckpoints(Base):
    """Checkpoints container code around blocks, which asks again in the backward pass."""

    def _container_code(self, x, block):
        return block(x * told(self)) * told(block)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(self._container_code, x, block, use_reentrant=False)
        return self.head(x)


class Decaying(Base):
    """Adds a norm over all its parameters to its result."""

    def forward(self, x):
        return super().forward(x) + 0.01 * sum(parameter.square().sum() for parameter in self.parameters())


TO_ROUNDING = {Nested, Decaying}
