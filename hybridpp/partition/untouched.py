"""Leave a model as it was found, whatever a trace of its forward does to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Undo, afterwards, what happens to the attributes of the modules: counters, caches (of fakes), hooks.

    Attributes are put back, and so is what dicts, lists and sets among them hold; not what lies deeper.
    """
    before = [(module, dict(vars(module)), _contents(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            vars(module).clear()
            vars(module).update(attributes)
            for container, copy in contents:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(copy)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    return [(value, value.copy()) for value in vars(module).values() if isinstance(value, dict | list | set)]
