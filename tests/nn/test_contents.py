"""What containers and objects hold is put back whatever their own classes refuse."""

from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch

from hybridpp.nn.contents import attributes_of, items_of, put_attributes, put_items
from hybridpp.nn.snapshot import Snapshot
from hybridpp.partition.containers import ContainerSnapshot
from hybridpp.partition.object_state import holds_tensors, replace_tensors


class FrozenConfig(OrderedDict):
    """Refuses every change, as the configurations of some model libraries do."""

    def _refuse(self, *args, **kwargs):
        raise TypeError("this configuration cannot be changed")

    __setitem__ = __delitem__ = update = pop = clear = setdefault = copy = _refuse


class FrozenList(list):
    def _refuse(self, *args):
        raise TypeError("this list cannot be changed")

    __setitem__ = __delitem__ = append = extend = clear = copy = _refuse


def test_a_dict_with_tensors_as_keys_is_put_back():
    first, second = torch.ones(2), torch.ones(3)
    held = {first: 1, second: 2}
    before = items_of(held)
    held[torch.ones(4)] = held.pop(first)
    put_items(held, before)
    assert list(map(id, held)) == [id(first), id(second)]


class Slotted:
    __slots__ = ("__weakref__", "_hidden", "shown")

    def __init__(self):
        self.shown, self._hidden = torch.ones(1), 1


class Unwritable:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    @property
    def size(self):
        raise RuntimeError("nobody may ask for this")

    def __setattr__(self, name, value):
        raise AttributeError(f"{name} cannot be set")


@dataclass(frozen=True, slots=True)
class FrozenRecord:
    held: object


def frozen(**items):
    config = FrozenConfig()
    for key, value in items.items():
        OrderedDict.__setitem__(config, key, value)
    return config


def fill(container, items):
    """Change a container past its rules."""
    base = OrderedDict if isinstance(container, OrderedDict) else type(container).__mro__[-2]
    if issubclass(base, dict):
        base.__setitem__(container, *items)
    else:
        (base.add if base is set else base.append)(container, items)


@pytest.mark.parametrize(
    "container",
    [
        frozen(a=1, b=2),
        FrozenList([1, 2]),
        Counter(a=3),
        defaultdict(list, a=[1]),
        deque([1, 2], maxlen=2),
        {1, 2},
        OrderedDict(b=1, a=2),
    ],
    ids=lambda container: type(container).__name__,
)
def test_every_container_is_put_back_past_the_rules_of_its_class(container):
    before = items_of(container)
    fill(container, ("c", 5))
    assert items_of(container) != before
    put_items(container, before)
    assert items_of(container) == before


def test_the_order_of_an_ordered_dict_is_put_back():
    container = OrderedDict(a=1, b=2)
    before = items_of(container)
    container.move_to_end("a")
    put_items(container, before)
    assert list(container) == ["a", "b"]


def test_attributes_are_put_back_where_the_class_refuses_them():
    thing, slotted, record = Unwritable(size=1, a=2), Slotted(), FrozenRecord([1])
    before = [attributes_of(part) for part in (thing, slotted, record)]
    vars(thing).update(size=5, b=1)
    slotted.shown = 3
    del slotted._hidden
    object.__setattr__(record, "held", 0)
    for part, attributes in zip((thing, slotted, record), before, strict=True):
        put_attributes(part, attributes)
        assert attributes_of(part) == attributes
    assert before[1].keys() == {"shown", "_hidden"}


class Touchy(dict):
    """Counts how often it is written to."""

    writes = 0

    def clear(self):
        self.writes += 1

    def update(self, *args):
        self.writes += 1


def test_what_did_not_change_is_not_written():
    touchy = Touchy(a=1)
    holder = Unwritable(config=frozen(layers=2), record=FrozenRecord(touchy), proxy=MappingProxyType({"a": 1}))
    state, given = Snapshot.reachable_from([holder, touchy]), ContainerSnapshot([holder, {"x": holder}])
    state.restore()
    given.restore()
    assert touchy.writes == 0
    assert not given.changed()


def test_tensors_are_found_and_replaced_wherever_an_object_keeps_them():
    def one():
        return torch.ones(1)

    slotted, config = Slotted(), frozen(table=one())
    holder = Unwritable(pair=(one(), (one(), 2)), queue=deque([one()]), slotted=slotted, config=config)
    assert all(map(holds_tensors, (slotted, config, holder, Unwritable(pair=(one(),)), MappingProxyType({"a": one()}))))
    assert not any(map(holds_tensors, (frozen(a=1), Unwritable(a=(1,)), MappingProxyType({}), FrozenRecord(2))))
    replace_tensors([holder], lambda tensor: tensor * 2)
    found = [*holder.pair[:1], holder.pair[1][0], holder.queue[0], slotted.shown, config["table"]]
    assert [tensor.item() for tensor in found] == [2] * 5
    assert holder.pair[1][1] == 2
