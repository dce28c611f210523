"""Descriptions of values: equal only for what does the same, and changes that can be made in an equal value."""

import copy
import decimal
import functools
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn

from hybridpp.nn import structure
from hybridpp.nn.structure import ObjectChanges, Structure, repeat_changes


def described(value):
    return Structure().of(value)


class Config:
    def __init__(self, **settings):
        vars(self).update(settings)


class Slotted:
    __slots__ = ("width",)

    def __init__(self, width):
        self.width = width


class Listed(list):
    pass


class Hiding:
    """Copies of it lack its cache."""

    def __init__(self):
        self.cache = {}

    def __getstate__(self):
        return {}


class Color(Enum):
    RED = 1


def adding(number):
    return lambda x, more=0: x + number + more


class Block(nn.Module):
    def __init__(self, scale=1.0, act=torch.relu):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 2)
        self.scale, self.act = scale, act


def hooked(hook, **options):
    block = Block()
    block.register_forward_hook(lambda *_: None)
    block.register_forward_hook(hook, **options)
    return block


def renamed(model):
    model.other = model.linear
    return model


def looped(depth):
    inner = outer = []
    for _ in range(depth):
        inner.append([])
        inner = inner[0]
    inner.append(outer)
    return outer


EQUAL = {
    "plain": lambda: [None, True, 1, 1.5, 2j, "a", b"a", torch.float16, torch.device("cpu"), torch.Size((1, 2))],
    "containers": lambda: ([1], (1,), {1: 2}, {1}, frozenset((1,)), deque([1], 3), OrderedDict(a=1), Listed([1])),
    "more containers": lambda: (defaultdict(list, a=[1]), MappingProxyType({1: 2}), SimpleNamespace(a=1)),
    "objects": lambda: [Config(a=1, b=[Config(c=2)]), Slotted(3)],
    "functions": lambda: [adding(1), functools.partial(adding(2), more=1), Config().__init__, [].append, torch.relu],
    "singletons": lambda: [Color.RED, Config, torch, threading],
    "decimal contexts": lambda: decimal.Context(prec=9),
    "tensors": lambda: [torch.arange(4.0), nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.bfloat16)],
    "modules": Block,
    "hooks": lambda: hooked(adding(1)),
    "cycles": lambda: looped(3),
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_values_that_are_made_alike_are_equal(make):
    assert described(make()) == described(make())
    hash(described(make()))


def test_copies_are_equal():
    model = nn.Sequential(Block(), Block())
    model.config = model[0].config = Config(width=2)
    assert described(copy.deepcopy(model)) == described(model)


ROWS = torch.arange(6.0).view(2, 3)
SHARED = Config(a=1)
DIFFERENT = {
    "types of numbers": (1, True),
    "signs of zero": (0.0, -0.0),
    "order": ([1, 2], [2, 1]),
    "kinds of containers": ([1], (1,)),
    "subclasses": ([1], Listed([1])),
    "lengths of deques": (deque([1], 2), deque([1], 3)),
    "attributes": (Config(a=1), Config(a=2)),
    "names of attributes": (Config(a=1), Config(b=1)),
    "slots": (Slotted(1), Slotted(2)),
    "deep inside": (Config(a=[{1: (Slotted(1),)}]), Config(a=[{1: (Slotted(2),)}])),
    "one object or two": ([SHARED, SHARED], [Config(a=1), Config(a=1)]),
    "closures": (adding(1), adding(2)),
    "code": (lambda x: x, lambda x: x),
    "defaults": (functools.partial(adding(1)), functools.partial(adding(1), more=1)),
    "owners of methods": (Config(a=1).__init__, Config(a=2).__init__),
    "owners of builtins": ([1].append, [2].append),
    "values": (ROWS, ROWS + 1),
    "shapes": (ROWS, ROWS.view(3, 2)),
    "strides": (ROWS.view(3, 2).contiguous(), ROWS.T),
    "dtypes": (ROWS.int(), ROWS.long()),
    "gradients": (ROWS, ROWS.clone().requires_grad_()),
    "memory": ([ROWS, ROWS.clone()], [ROWS, ROWS[:]]),
    "on meta": (torch.ones(2, device="meta"), torch.ones(3, device="meta")),
    "settings of modules": (Block(1.0), Block(2.0)),
    "functions of modules": (Block(), Block(act=torch.tanh)),
    "training": (Block(), Block().eval()),
    "one module or two": (renamed(Block()), nn.ModuleDict({"linear": nn.Linear(2, 2), "other": nn.Linear(2, 2)})),
    "hooks": (Block(), hooked(adding(1))),
    "kinds of hooks": (hooked(adding(1)), hooked(adding(1), with_kwargs=True)),
    "order of hooks": (hooked(adding(1)), hooked(adding(1), prepend=True)),
    "what hooks refer to": (hooked(adding(1)), hooked(adding(2))),
    "referents": (weakref.ref(SHARED), weakref.ref(Slotted)),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_values_that_differ_are_not_equal(one, other):
    assert described(one) != described(other)


@pytest.mark.parametrize(
    "make", [Hiding, threading.Lock, lambda: torch.Generator(), lambda: {Config()}, lambda: torch.ones(2).to_sparse()]
)
def test_what_hides_its_state_equals_itself_only(make):
    one = make()
    assert described(one) == described(one)
    assert described(one) != described(make())


def test_what_lies_beyond_the_limits_equals_itself_only(monkeypatch):
    monkeypatch.setattr(structure, "_MAX_OBJECTS", 5)
    monkeypatch.setattr(structure, "_MAX_ELEMENTS", 5)
    assert described([[1], [2]]) == described([[1], [2]])
    assert described([[n] for n in range(9)]) != described([[n] for n in range(9)])
    assert described(torch.ones(5)) == described(torch.ones(5))
    assert described(torch.ones(6)) != described(torch.ones(6))


def test_entries_of_modules_may_be_left_out():
    def without(model):
        return Structure([(id(vars(model)), "scale"), (id(model.linear._parameters), "weight")]).of(model)

    changed = Block(2.0)
    changed.linear.weight.data.zero_()
    assert without(changed) == without(Block())
    changed.linear.bias.data.zero_()
    assert without(changed) != without(Block())


def make_state():
    return Config(config=Config(kind=None, old=1), table={"a": 1}, kept=[1])


def change_plainly(state):
    state.config.kind = "regression"
    del state.config.old
    state.table["b"] = 2


def test_plain_changes_can_be_made_in_an_equal_value():
    first, second = Structure(), Structure()
    one, other = make_state(), make_state()
    assert first.of(one) == second.of(other)
    changes = ObjectChanges(first.changeable)
    change_plainly(one)
    found = changes.plain()
    repeat_changes(second.changeable, found)
    assert described(one) == described(other)
    repeat_changes(first.changeable, found)  # they are there
    assert described(one) == described(other)


def counting():
    count = 0

    def counted():
        nonlocal count
        count += 1

    return counted


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (make_state, lambda state: state.kept.append(1)),
        (make_state, lambda state: setattr(state.config, "kind", [1])),
        (make_state, lambda state: state.table.update({(1,): 1})),
        (counting, lambda count: count()),
    ],
    ids=["list", "object", "key", "closure"],
)
def test_other_changes_are_not_given(make, change):
    value, found = make(), Structure()
    found.of(value)
    changes = ObjectChanges(found.changeable)
    assert changes.plain() == []
    change(value)
    assert changes.plain() is None


def local_class():
    class Local(nn.Module):
        pass

    return Local()


def of_a_text():
    names = {"__name__": "text"}
    exec("def double(x): return 2 * x", names)
    return names["double"]


@pytest.mark.parametrize("make", [value for name, value in EQUAL.items() if name != "singletons"])
def test_descriptions_of_code_and_classes_of_modules_last(make):
    found = Structure()
    found.of(make())
    assert found.is_lasting


@pytest.mark.parametrize("make", [Hiding, threading.Lock, lambda: {Config()}, local_class, of_a_text])
def test_descriptions_of_what_may_be_gone_do_not_last(make):
    found = Structure()
    found.of([1, make()])
    assert not found.is_lasting
