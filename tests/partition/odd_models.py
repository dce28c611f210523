"""Small models that do what tracers stumble over, between their blocks or in the way they call them."""

import warnings
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from partition.user_models import Base
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class WithNothing(nn.Linear):
    """Returns nothing in some places."""

    def forward(self, x):
        h = super().forward(x)
        return h, None, (h.sum(-1), None)


class Nothing(Base):
    """Blocks return None in tuples."""

    def __init__(self):
        super().__init__(WithNothing)

    def forward(self, x):
        sums = []
        for block in self.blocks:
            x, nothing, (more, _) = block(x)
            assert nothing is None
            sums.append(more)
        return self.head(x) + sum(sums)[:, None]


class Twice(nn.Linear):
    """Returns one tensor in two places."""

    def forward(self, x):
        h = super().forward(x)
        return h, h


class Duplicates(Base):
    """Uses one on the next stage, the other one later."""

    def __init__(self):
        super().__init__(Twice)

    def forward(self, x):
        kept = 0
        for block in self.blocks:
            x, again = block(x)
            kept = kept + again
        return self.head(x + kept)


@dataclass
class State:
    """What is handed from block to block."""

    hidden: torch.Tensor
    extra: Any = None
    step: int = 0


class Stepping(nn.Linear):
    """Makes a new dataclass."""

    def forward(self, state):
        h = super().forward(state.hidden)
        return State(h, h.sum() if state.extra is None else state.extra + h.sum(), state.step + 1)


class Dataclasses(Base):
    """Blocks take and return dataclasses, and so does the model."""

    def __init__(self):
        super().__init__(Stepping)

    def forward(self, x):
        states = [State(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return State(self.head(states[-1].hidden), [states[2].hidden, states[-1].extra * states[-1].step])


class NewDict(nn.Linear):
    """Makes a new nested dict."""

    def forward(self, state):
        h = super().forward(state["h"]["x"])
        return {**state, "h": {"x": h, "past": [*state["h"]["past"], h.mean()]}, "n": state["n"] + 1}


class Dicts(Base):
    """Nested dicts go from block to block."""

    def __init__(self):
        super().__init__(NewDict)

    def forward(self, x):
        state = {"h": {"x": x, "past": []}, "n": 0, "raw": x}
        for block in self.blocks:
            state = block(state)
        return self.head(state["h"]["x"] + state["raw"]) + sum(state["h"]["past"]) * state["n"]


class Holder:
    """An object that torch knows nothing about."""

    def __init__(self, **things):
        vars(self).update(things)


class Writing(nn.Linear):
    """Writes to what it is given, and returns nothing."""

    def forward(self, state):
        if isinstance(state, dict):
            state["x"] = super().forward(state["x"])
            state["past"].append(state["x"].mean())
            state["n"] += 1
        else:
            state.x = super().forward(state.x)
            state.past.append(state.x.mean())
            state.n += 1


class WrittenDict(Base):
    """Blocks leave their results in a dict."""

    make = dict

    def __init__(self):
        super().__init__(Writing)

    def forward(self, x):
        state = self.make(x=x, past=[], n=0, raw=x)
        for block in self.blocks:
            block(state)
        found = state if isinstance(state, dict) else vars(state)
        return self.head(found["x"] + found["raw"]) * found["n"] + sum(found["past"])


class WrittenNamespace(WrittenDict):
    """In a namespace."""

    make = SimpleNamespace


class WrittenObject(WrittenDict):
    """In any object."""

    make = Holder


class Collecting(nn.Linear):
    """Looks at values, which fakes do not have, and leaves its result in a list and in a dict as well."""

    def forward(self, x, collected, latest):
        h = super().forward(x)
        collected.append(h * 2 if h.sum() > 1e9 else h)
        latest["h"] = h.mean()
        return h


class Collected(Base):
    """Everything that blocks left is used at the end."""

    def __init__(self):
        super().__init__(Collecting)

    def forward(self, x):
        collected, latest = deque(), {"x": x}
        for block in self.blocks:
            x = block(x, collected, latest)
        return self.head(x + sum(collected) + latest["x"]) + latest["h"]


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
    """Weights made anew at every call, one by old hooks; glue uses one of them too."""

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
    """One checkpoint around each block, one around several and the glue between them, with dropout."""

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
    """Glue uses it with a parameter of the model, on every stage, and vmap."""

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


TO_ROUNDING = {Checkpointed, WeightNorms, OwnFunction, Gathered, Closures, Collected}
