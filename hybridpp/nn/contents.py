"""What containers and objects hold, read and put back past the rules of their own classes.

A mapping may refuse to be written, a property may have no setter, and an ``update`` may do more than it is asked for.
None of that matters where something is only put back; and what holds the same as before is not written at all.
"""

from collections import OrderedDict, deque
from operator import is_
from types import MemberDescriptorType
from typing import Any, TypeAlias

Contents: TypeAlias = dict[Any, Any] | list[Any]


def items_of(container: Any) -> Contents:
    """A new dict or list of what a dict, list, deque or set holds, whatever subclass of those it is."""
    kind = type(container)
    if kind is dict or kind is list:  # nearly all; others take five times as long
        return kind.copy(container)
    base = _base(container)
    if base is dict:
        return dict.copy(container)
    return dict(base.items(container)) if base is OrderedDict else list(base.__iter__(container))


def attributes_of(thing: Any) -> dict[str, Any]:
    """The attributes that an object itself has, those in slots among them; no property is asked for."""
    found = dict(_dict_of(thing) or {})
    for name, slot in _slots(thing).items():
        try:
            found[name] = slot.__get__(thing)
        except AttributeError:  # not set
            continue
    return found


def put_items(container: Any, contents: Contents) -> None:
    """Let a container hold what :func:`items_of` returned."""
    # Most hold what they held: that is seen without a copy.
    if is_same(container if type(container) in (dict, list) else items_of(container), contents):
        return
    base = _base(container)
    base.clear(container)
    if isinstance(contents, dict):
        for key, value in contents.items():
            base.__setitem__(container, key, value)
    elif base is set:
        base.update(container, contents)
    else:
        base.extend(container, contents)


def put_attributes(thing: Any, attributes: dict[str, Any]) -> None:
    """Let an object have the attributes that :func:`attributes_of` returned, and no others."""
    now, slots = attributes_of(thing), _slots(thing)
    for name in now.keys() - attributes.keys():
        if name in slots:
            slots[name].__delete__(thing)
        else:
            del _dict_of(thing)[name]
    for name, value in attributes.items():
        if name in now and now[name] is value:
            continue
        if name in slots:
            slots[name].__set__(thing, value)
        else:
            _dict_of(thing)[name] = value


def is_same(now: Contents, before: Contents) -> bool:
    """Whether both are the very same objects, in one order."""
    if len(now) != len(before):
        return False
    if not now:
        return True
    if isinstance(now, dict) and isinstance(before, dict):
        return all(map(_is_same_key, now, before)) and all(map(is_, now.values(), before.values()))
    return all(map(is_, now, before))


def _is_same_key(one: Any, other: Any) -> bool:
    # By hash first, as a dict looks it up: two parameters, which an optimizer's state has as keys, cannot be compared.
    return one is other or (hash(one) == hash(other) and bool(one == other))


def is_container(thing: Any) -> bool:
    """Whether something is a dict, list, deque or set."""
    return isinstance(thing, _BASES)


def is_empty(container: Any) -> bool:
    """Whether it is exactly a dict, list, deque or set, no subclass, that holds nothing."""
    return type(container) in _EXACT and not container


def has_attributes(thing: Any) -> bool:
    """Whether an object has a place for attributes of its own."""
    return _dict_of(thing) is not None or bool(_slots(thing))


# An ordered dict has an order of its own, beside that of the dict that it is.
_BASES = (OrderedDict, dict, list, deque, set)
_EXACT = frozenset(_BASES)


def _base(container: Any) -> Any:
    kind = type(container)
    return kind if kind in _EXACT else next(base for base in _BASES if isinstance(container, base))


def _dict_of(thing: Any) -> Any:
    found = getattr(thing, "__dict__", None)
    return found if isinstance(found, dict) else None


def _slots(thing: Any) -> dict[str, MemberDescriptorType]:
    """Those that classes written in Python declare."""
    return {
        name: slot
        for kind in type(thing).__mro__
        if "__slots__" in vars(kind)
        for name, slot in vars(kind).items()
        if isinstance(slot, MemberDescriptorType)
    }
