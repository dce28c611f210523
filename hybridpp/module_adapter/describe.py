"""What was put on the modules and tensors of a model, in words."""

import re
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from hybridpp.text_table import text_table

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def describe(model: nn.Module, put: Mapping[nn.Module | Tensor, tuple[str, ...]]) -> str:
    """A table with one row for all that have one class and carry the same, under names that differ only in numbers.

    Args:
        model: to whose names they belong; what is not in it any more is left out.
        put: what each of them carries.

    Example:
        >>> model = nn.Sequential(nn.ReLU(), nn.ReLU())
        >>> print(describe(model, {model: ("calls of the model",), model[0]: ("stage",), model[1]: ("stage",)}))
        name        | number | class      | what is on it, outermost first
        ------------+--------+------------+-------------------------------
        (the model) |      1 | Sequential | calls of the model
        *           |      2 | ReLU       | stage
    """
    rows: dict[tuple[str, str, tuple[str, ...]], int] = {}
    for name, owner in _named(model):
        if owner in put:
            key = (_NUMBER.sub("*", f".{name}")[1:] or "(the model)", type(owner).__name__, put[owner])
            rows[key] = rows.get(key, 0) + 1
    table = [(name, str(number), kind, ", ".join(carried)) for (name, kind, carried), number in rows.items()]
    return text_table(("name", "number", "class", "what is on it, outermost first"), table, left=(0, 2, 3))


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module | Tensor]]:
    yield from model.named_modules()
    yield from model.named_parameters()
    yield from model.named_buffers()
