"""Small models by what their blocks take, return and write to: nothing, dataclasses, dicts, objects, lists."""

from collections import OrderedDict, deque
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from partition.user_models import Base
from torch import nn


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
        names = ("x", "past", "n", "raw")
        x, past, n, raw = (state[name] if isinstance(state, dict) else getattr(state, name) for name in names)
        return self.head(x + raw) * n + sum(past)


class WrittenNamespace(WrittenDict):
    """In a namespace."""

    make = SimpleNamespace


class Slotted:
    """An object without a dict of attributes."""

    __slots__ = ("n", "past", "raw", "x")

    def __init__(self, **things):
        for name, thing in things.items():
            setattr(self, name, thing)


class WrittenSlots(WrittenDict):
    """In slots."""

    make = Slotted


class FrozenConfig(OrderedDict):
    """Refuses to be written, as the configurations of some model libraries do."""

    def __init__(self, items):
        super().__init__(items)
        vars(self)["frozen"] = True

    def _refuse(self, *args):
        raise TypeError("a configuration cannot be changed")

    def __setitem__(self, key, value):
        return self._refuse() if "frozen" in vars(self) else super().__setitem__(key, value)

    __delitem__ = update = pop = clear = setdefault = copy = _refuse


class Scaled(nn.Linear):
    """Looks at values, so fakes cannot run it, and reads from what cannot be written."""

    def forward(self, x, context):
        assert x.sum().item() == x.sum()
        h = super().forward(x) * context.config["scale"] + context.tables["first"]
        vars(context).setdefault("seen", []).append(h.mean())
        return h


class ReadOnly(Base):
    """Blocks are given frozen configurations and tables; the model has some, too."""

    def __init__(self):
        super().__init__(Scaled)
        self.config = FrozenConfig({"scale": 2.0, "sizes": [4, 4]})
        self.settings = MappingProxyType({"bias": 1.0})

    def forward(self, x):
        first = self.blocks[0](x, Holder(config=self.config, tables=MappingProxyType({"first": x})))
        context = Holder(config=self.config, tables=MappingProxyType({"first": first}), model=self)
        x = first
        for block in self.blocks[1:]:
            x = block(x, context)
        return self.head(x) + self.settings["bias"] * sum(context.seen)


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


TO_ROUNDING = {Collected}
