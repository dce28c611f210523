"""Base class and checks of all settings."""

from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from hybridpp.errors import ConfigError


def require_bools(**values: Any) -> None:
    """Check that values are bools.

    Raises:
        ConfigError: a value is not a bool; text such as ``"no"`` would count as True, and 0 as False.
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False: got {name}={value!r}. Pass a bool.")


def require_numbers(kind: type[int] | type[float], **values: Any) -> None:
    """Check that values are numbers of ``kind``, and neither NaN nor bools.

    Raises:
        ConfigError: a value is not such a number; a float is not an int.
    """
    number, what = (Integral, "an integer") if kind is int else (Real, "a number")
    for name, value in values.items():
        if not isinstance(value, number) or isinstance(value, bool) or value != value:
            raise ConfigError(f"{name} must be {what}: got {name}={value!r}. Pass {what}, or leave it out.")


class ConfigBase:
    """Base class of all settings; it checks that fields of type bool, int or float have such values."""

    def __post_init__(self) -> None:
        known: Any = self
        values = {each.name: (each.type, getattr(self, each.name)) for each in fields(known)}
        require_bools(**{name: value for name, (kind, value) in values.items() if kind is bool})
        require_numbers(int, **{name: value for name, (kind, value) in values.items() if kind is int})
        require_numbers(float, **{name: value for name, (kind, value) in values.items() if kind is float})


def require_positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ConfigError(f"{owner} needs {name} > 0: got {name}={value}.")
