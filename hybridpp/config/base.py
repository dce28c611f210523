"""Base class and checks of all settings."""

import sys
from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Number, Real
from typing import Any

from hybridpp.errors import ConfigError, shown


def require_plain(**values: Any) -> None:
    """Check that values, and what is in their dicts and lists, are no arrays and no tensors.

    Those of numpy and of torch compare element by element, so no other check would hold for them.

    Raises:
        ConfigError: one is an array or a tensor, or contains itself.
    """
    for name, value in values.items():
        _require_plain(name, value, ())


def _require_plain(name: str, value: Any, outer: tuple[int, ...]) -> None:
    kind = type(value)
    # Numpy's numbers and texts are Python's, too.
    if hasattr(kind, "__array__") and not isinstance(value, Number | str):
        raise ConfigError(
            f"{name} must be made of Python's own numbers, texts, lists and dicts: got {name} with a value of class "
            f"{kind.__module__}.{kind.__qualname__}. Pass value.item() or value.tolist()."
        )
    if isinstance(value, Mapping | list | tuple):
        if id(value) in outer:
            raise ConfigError(f"{name} contains itself. Pass a {kind.__name__} that ends.")
        for one in (*value, *value.values()) if isinstance(value, Mapping) else value:
            _require_plain(name, one, (*outer, id(value)))


def require_bools(**values: Any) -> None:
    """Check that values are bools.

    Raises:
        ConfigError: a value is not a bool; text such as ``"no"`` would count as True, and 0 as False.
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False: got {name}={shown(value)}. Pass a bool.")


def require_numbers(kind: type[int] | type[float], **values: Any) -> None:
    """Check that values are numbers of ``kind``, and neither NaN nor bools.

    Raises:
        ConfigError: a value is not such a number; a float is not an int.
    """
    number, what = (Integral, "an integer") if kind is int else (Real, "a number")
    for name, value in values.items():
        if not isinstance(value, number) or isinstance(value, bool) or value != value:
            raise ConfigError(f"{name} must be {what}: got {name}={shown(value)}. Pass {what}, or leave it out.")
        if kind is float and isinstance(value, int) and abs(value) > sys.float_info.max:
            raise ConfigError(
                f"{name} must be at most {sys.float_info.max:.3g}: got an integer of {len(str(abs(value)))} digits. "
                "Pass a smaller number."
            )


class ConfigBase:
    """Base class of all settings; it checks that fields of type bool, int or float have such values."""

    def __post_init__(self) -> None:
        known: Any = self
        values = {each.name: (each.type, getattr(self, each.name)) for each in fields(known)}
        require_plain(**{name: value for name, (_, value) in values.items()})
        require_bools(**{name: value for name, (kind, value) in values.items() if kind is bool})
        require_numbers(int, **{name: value for name, (kind, value) in values.items() if kind is int})
        require_numbers(float, **{name: value for name, (kind, value) in values.items() if kind is float})


def require_positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ConfigError(f"{owner} needs {name} > 0: got {name}={value}.")
