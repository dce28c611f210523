"""Rules for what a file holds that anyone may have written. All of it is checked before any of it is used.

A rule is a function of a value and of where in the file it is ("": the whole of it); it raises what it misses there.
"""

import errno
import os
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any

from hybridpp.checkpoint.remote_path import AnyPath
from hybridpp.sizes import format_bytes
from hybridpp.strict_json import parse_strictly

Rule = Callable[[Any, str], None]

MOST_DIMS = 64
"""Dimensions of a tensor; torch's own limit."""
LARGEST = 2**63 - 1
"""What sizes, positions and products of them are kept in elsewhere."""

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 60


class BrokenRuleError(ValueError):
    """A value that a file must not hold: where it is, what it is, and the rule."""


def read_json(path: AnyPath, most_bytes: int) -> Any:
    """What a file of JSON holds.

    Args:
        path: of the file.
        most_bytes: a larger file is not read.

    Raises:
        OSError: it is no file, or cannot be read.
        ValueError: it is too large, or see :func:`~hybridpp.strict_json.parse_strictly`.
    """
    return parse_strictly(read_limited(path, most_bytes))


def read_limited(path: AnyPath, most_bytes: int) -> bytes:
    """All of a file of at most so many bytes.

    Raises:
        OSError: it is no file, or cannot be read.
        ValueError: it is larger.
    """
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if (size := path.stat().st_size) > most_bytes:
        raise ValueError(f"it has {size} bytes, and at most {format_bytes(most_bytes)} of one are read")
    return path.read_bytes()


def require(holds: bool, where: str, value: Any, rule: str) -> None:
    """Refuse a value.

    Raises:
        BrokenRuleError: ``holds`` is False.
    """
    if not holds:
        raise BrokenRuleError(f"{where or 'it'} is {_SHOWN.repr(value)}, and must be {rule}")


def anything(value: Any, where: str) -> None:
    """What is checked elsewhere, or not read."""


def integer(low: int = 0, high: int = LARGEST) -> Rule:
    """A whole number in a range; both ends are in it."""
    what = f"a whole number from {low} to {high}"

    def rule(value: Any, where: str) -> None:
        require(type(value) is int and low <= value <= high, where, value, what)

    return rule


def positive_number(value: Any, where: str) -> None:
    """A number above 0."""
    require(type(value) in (int, float) and value > 0, where, value, "a number above 0")


def flag(value: Any, where: str) -> None:
    """True or False."""
    require(type(value) is bool, where, value, "true or false")


def text(pattern: str = "(?s:.*)", what: str = "text") -> Rule:
    """Text that a pattern fits completely; ``what`` it is, in words."""
    fits = re.compile(pattern, re.ASCII).fullmatch

    def rule(value: Any, where: str) -> None:
        require(isinstance(value, str) and fits(value) is not None, where, value, what)

    return rule


def one_of(names: Collection[str]) -> Rule:
    """One of some texts."""
    what = f"one of {', '.join(sorted(names))}"

    def rule(value: Any, where: str) -> None:
        require(isinstance(value, str) and value in names, where, value, what)

    return rule


def optional(inner: Rule) -> Rule:
    """None, or what fits a rule."""

    def rule(value: Any, where: str) -> None:
        if value is not None:
            inner(value, where)

    return rule


def items(inner: Rule, *, exactly: int | None = None, most: int | None = None) -> Rule:
    """A list whose entries fit a rule."""
    what = "a list" if exactly is None else f"a list of {exactly}"
    what = what if most is None else f"{what} of at most {most}"

    def rule(value: Any, where: str) -> None:
        is_one = isinstance(value, list) and exactly in (None, len(value)) and (most is None or len(value) <= most)
        require(is_one, where, value, what)
        for number, entry in enumerate(value if inner is not anything else ()):
            inner(entry, f"{where}[{number}]")

    return rule


def mapping(inner: Rule) -> Rule:
    """An object of JSON, each of whose values fits a rule."""

    def rule(value: Any, where: str) -> None:
        require(isinstance(value, dict), where, value, "an object")
        for key, entry in value.items():
            inner(entry, f"{where}[{key!r:.80}]")

    return rule


def record(needed: Mapping[str, Rule], extra: Mapping[str, Rule] | None = None, *, is_open: bool = False) -> Rule:
    """An object of JSON with fields.

    Args:
        needed: the rule of each field that must be there.
        extra: of those that may be.
        is_open: whether others may be, which nothing reads.
    """
    rules = {**needed, **(extra or {})}

    def rule(value: Any, where: str) -> None:
        require(isinstance(value, dict), where, value, "an object")
        missing = [name for name in needed if name not in value]
        if missing:
            raise BrokenRuleError(f"{where or 'it'} lacks {missing[0]!r}")
        for name, entry in value.items():
            if name in rules:
                rules[name](entry, f"{where}.{name}" if where else name)
            elif not is_open:
                raise BrokenRuleError(f"{where or 'it'} has {name!r:.80}, and may have {', '.join(rules)}")

    return rule


_SIZES = items(integer(), most=MOST_DIMS)


def is_shape(value: Any, itemsize: int) -> bool:
    """Whether a value is the shape of a tensor with an address; :func:`shape_of` says why not."""
    return (
        type(value) is list
        and len(value) <= MOST_DIMS
        and all(type(size) is int and 0 <= size <= LARGEST for size in value)
        # Torch computes strides, where an empty tensor may have any.
        and prod(size or 1 for size in value) * itemsize <= LARGEST
    )


def shape_of(value: Any, where: str, itemsize: int) -> tuple[int, ...]:
    """The shape of a tensor, whose elements have so many bytes each.

    Raises:
        BrokenRuleError: it is none, or the tensor would be larger than what has an address.
    """
    if not is_shape(value, itemsize):
        _SIZES(value, where)
        require(False, where, value, f"one of at most {LARGEST} bytes")
    return tuple(value)
