"""Batches of samples, where a script has no ``collate_fn`` of its own: as torch's, but for lists of numbers."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hybridpp.errors import DataError


def stack_samples(samples: list[Any]) -> Any:
    """A batch of samples. A list of numbers in a sample becomes a row of a tensor.

    Rows of a table (Hugging Face's ``datasets``) hold such lists. Torch's function makes a list of ``L`` tensors
    ``[B]`` of them; this one makes one tensor ``[B, L]``.

    Args:
        samples: dicts, tuples, tensors, numbers; what is in a sample is stacked with the same of the others.

    Raises:
        DataError: an entry's lists differ in length between the samples, or torch's function cannot stack them.
    """
    try:
        return _stacked(samples)
    except (RuntimeError, TypeError, KeyError, IndexError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"samples of one batch are stacked, and these cannot be: {str(error).rstrip('.')}. Return tensors of one "
            "shape, or numbers, under the same names from the dataset, or pass a collate_fn."
        ) from error


def _stacked(samples: list[Any]) -> Any:
    first = samples[0]
    if isinstance(first, Mapping):
        columns = {name: _column(samples, name) for name in first}
        made = {name: column for name, column in columns.items() if column is not None}
        if not made:
            return default_collate(samples)
        others = [{name: sample[name] for name in first if name not in made} for sample in samples]
        stacked = default_collate(others) if others[0] else {}
        return {name: made[name] if name in made else stacked[name] for name in first}
    if isinstance(first, tuple | list):
        made = {
            position: column for position in range(len(first)) if (column := _column(samples, position)) is not None
        }
        if made:
            rows = [
                [_row(made, position, at, entry) for position, entry in enumerate(s)] for at, s in enumerate(samples)
            ]
            make = type(first)
            return default_collate([make(*row) if hasattr(first, "_fields") else make(row) for row in rows])
    return default_collate(samples)


def _row(made: Mapping[int, Tensor], position: int, index: int, entry: Any) -> Any:
    return made[position][index] if position in made else entry


def _column(samples: list[Any], key: Any) -> Tensor | None:
    """One entry of all samples as a tensor; None if they are no lists of numbers."""
    if type(samples[0][key]) is not list:
        return None
    try:
        lists = [sample[key] for sample in samples]
    except (KeyError, IndexError):  # torch's function says so
        return None
    if not all(map(_holds_numbers, lists)) or not any(lists):
        return None
    lengths = {len(one) for one in lists}
    if len(lengths) == 1:
        try:
            return torch.tensor(lists)
        except (ValueError, TypeError):  # lists in them differ in length, or hold something else
            lengths = {len(inner) for one in lists for inner in one if type(inner) is list}
    raise DataError(
        f"samples of one batch are stacked, so their lists must have one length: entry {key!r} has lists of "
        f"{min(lengths)} to {max(lengths)} numbers. Pad them in the dataset, or pass a collate_fn that does, such as "
        "transformers.DataCollatorWithPadding(tokenizer)."
    )


def _holds_numbers(value: Any) -> bool:
    """Whether it is a list of numbers, or of such lists; looks at the first of each."""
    while type(value) is list and value:
        value = value[0]
    return isinstance(value, Real) or value == []
