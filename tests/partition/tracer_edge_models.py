"""Small models that do what tracers stumble over: closures, hooks, checkpoints, autograd functions."""

import warnings

import torch
from partition.user_models import Base
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Calling(nn.Linear):
    """Calls a function that it is given."""

    def forward(self, x, function):
        return function(super().forward(x))


class Closures(Base):
    """The function holds what the first block gave."""

    def __init__(self):
        super().__init__(Calling)

    def forward(self, x):
        first = self.blocks[0](x, torch.tanh)
        x = first
        for block in self.blocks[1:]:
            x = block(x, lambda h: h + first)
        return self.head(x)


class WeightNorms(Base):
    """Weights made anew at every call, one by old hooks; container code uses one of them too."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and used
            nn.utils.weight_norm(self.blocks[0])
            nn.utils.weight_norm(self.blocks[2])
        nn.utils.parametrizations.weight_norm(self.blocks[1])
        nn.utils.parametrizations.spectral_norm(self.blocks[3])

    def forward(self, x):
        return super().forward(torch.tanh(x @ self.blocks[1].weight))


class Checkpointed(Base):
    """One checkpoint around each block, one around several and the container code between them, with dropout."""

    def pair(self, number, x, first):
        x = nn.functional.dropout(torch.tanh(self.blocks[number](x)), 0.3, self.training)
        return torch.tanh(self.blocks[(number + 1) % 4](x) * first) + x

    def forward(self, x):
        first = x = checkpoint(self.pair, 0, x, x, use_reentrant=False)
        x = checkpoint(self.blocks[2], x, use_reentrant=False)
        # The first block is called again, on the last stage.
        return self.head(checkpoint(self.pair, 3, x, first, use_reentrant=False))


class CheckpointedSegments(nn.Module):
    """Fewer checkpoints than blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh()) for _ in range(6)])

    def forward(self, x):
        return checkpoint_sequential(self.body, 2, x, use_reentrant=False)


class Hooked(Base):
    """Hooks that change gradients, outputs and inputs, on every block."""

    def __init__(self):
        super().__init__()
        self.blocks[1].weight.register_hook(lambda gradient: gradient * 2)
        self.blocks[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
        self.blocks[3].register_forward_hook(lambda module, inputs, output: output + 1)
        for number, block in enumerate(self.blocks):
            block.register_full_backward_hook(lambda module, inputs, outputs, by=number + 1: (inputs[0] * by,))
            block.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))

    def forward(self, x):
        x = x + self.head.weight.sum() * 0  # something that requires a gradient goes in
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 1.5)
        return self.head(x)


class Teacher(Base):
    """Blocks run under no_grad first, then again."""

    def forward(self, x):
        with torch.no_grad():
            target = self.blocks[1](self.blocks[0](x * 2))
        h = self.blocks[1](self.blocks[0](x))
        return self.head(self.blocks[3](self.blocks[2](h + target.detach())))


class Gathered(Base):
    """Indices cross, views cross, and a table is filled in place."""

    def forward(self, x):
        h = self.blocks[0](x)
        order, table = h.argsort(-1), torch.zeros(4, *h.shape)
        table[0] = h
        for number in range(1, 4):
            left, right = self.blocks[number](h + table.sum(0)).chunk(2, -1)
            h = torch.cat([right.tanh(), left], -1).gather(-1, order)
            table[number] = h
        return self.head(table.mean(0))


class Scaled(torch.autograd.Function):
    """A product with a backward of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class OwnFunction(Base):
    """Container code uses it with a parameter of the model, on every stage, and vmap."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x):
        for block in self.blocks:
            x = Scaled.apply(torch.vmap(lambda row: row * 2)(block(x)), self.weight)
        return self.head(x)


class Forgiving(Base):
    """Catches what blocks raise."""

    def forward(self, x):
        for block in self.blocks:
            try:
                x = block.forward(x)
            except Exception:
                x = x * 2
        return self.head(x)


TO_ROUNDING = {Checkpointed, WeightNorms, OwnFunction, Gathered, Closures}
