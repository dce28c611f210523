"""What a booster has boosted, as long as the script keeps it."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import nn

from hybridpp.boosted import Boosted
from hybridpp.errors import ConfigError

T = TypeVar("T")


class _Parts(NamedTuple):
    """The parts of a run, which belong to the script."""

    model: Callable[[], nn.Module | None]
    others: tuple[Callable[[], Any], ...]


class BoostedRuns:
    """The parts that :meth:`hybridpp.Booster.boost` returned, in order, without keeping them alive."""

    def __init__(self) -> None:
        self._parts: list[_Parts] = []

    def add(self, parts: Boosted) -> None:
        """Note what was boosted."""
        model, *others = parts
        self._parts.append(_Parts(weakref.ref(model), tuple(map(_reference, others))))

    def has(self, model: nn.Module) -> bool:
        """Whether a model is boosted."""
        return any(parts.model() is model for parts in self._parts)

    def remove(self, model: nn.Module) -> None:
        """Forget a model."""
        self._parts = [parts for parts in self._parts if parts.model() is not model]

    def parts(self) -> list[Boosted]:
        """The parts of every model that exists.

        Raises:
            ConfigError: there is none.
        """
        found = [
            Boosted(model, *(other() for other in parts.others))
            for parts in self._parts
            if (model := parts.model()) is not None
        ]
        if not found:
            raise ConfigError("there is no run to save or resume. Call booster.boost first.")
        return found

    def part_of(self, optimizer: Any) -> Boosted:
        """What was boosted together with an optimizer.

        Raises:
            ConfigError: nothing was.
        """
        for part in self.parts():
            if optimizer is not None and part.optimizer is optimizer:
                return part
        raise ConfigError(
            f"this {type(optimizer).__name__} was not boosted by this booster. Pass the optimizer that booster.boost "
            "returned."
        )


def _reference(value: T) -> Callable[[], T | None]:
    """A weak reference, to what can have one."""
    try:
        return weakref.ref(value)
    except TypeError:  # None, or an object with slots
        return lambda: value
