"""The share of right predictions."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hybridpp.errors import DataError


class Accuracy:
    """Counts right predictions of a classifier: ``accuracy(outputs, batch)`` is their number and that of all.

    Args:
        ignore_index: label of what is not counted.

    Example:
        >>> import torch
        >>> correct, count = Accuracy()(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), (None, torch.tensor([1, 1])))
        >>> correct.item(), count.item()
        (1, 2)
    """

    def __init__(self, ignore_index: int = -100):
        self.ignore_index = ignore_index

    def __call__(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """The two numbers, on the device of the outputs.

        Args:
            outputs: logits, or a dict or model output with ``logits``: ``[..., classes]``, or ``[B, classes, ...]``.
            batch: a dict with ``labels``, or a tuple or list whose last entry they are: logits without the classes.

        Raises:
            DataError: there are no logits or labels, or their shapes do not fit.
        """
        logits = outputs if isinstance(outputs, Tensor) else _entry(outputs, "logits", "the model's outputs")
        labels = batch[-1] if isinstance(batch, tuple | list) else _entry(batch, "labels", "the batch")
        labels = labels.to(logits.device)
        dims = [dim for dim in (-1, 1) if logits.dim() == labels.dim() + 1 and _without(logits, dim) == labels.shape]
        if not dims:
            raise DataError(
                f"accuracy needs logits [..., classes] and labels [...]: got {tuple(logits.shape)} and "
                f"{tuple(labels.shape)}. Pass AccuracyHook a function (outputs, batch) -> (number correct, number)."
            )
        counted = labels != self.ignore_index
        return ((logits.argmax(dims[0]) == labels) & counted).sum(), counted.sum()


def _without(logits: Tensor, dim: int) -> tuple[int, ...]:
    shape = list(logits.shape)
    del shape[dim]
    return tuple(shape)


def _entry(container: Any, name: str, owner: str) -> Tensor:
    found = container.get(name) if isinstance(container, Mapping) else getattr(container, name, None)
    if not isinstance(found, Tensor):
        raise DataError(
            f"accuracy reads {name!r} of {owner}: got {type(container).__name__} without it. Pass AccuracyHook a "
            "function (outputs, batch) -> (number correct, number)."
        )
    return found
