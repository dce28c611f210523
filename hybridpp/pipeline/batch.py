"""Batches and micro-batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hybridpp.errors import DataError

TOTAL_KEY = "num_items_in_batch"
"""The name under which Hugging Face models take the count that their loss is divided by."""


@dataclass(frozen=True)
class Microbatch:
    """A part of a batch.

    Attributes:
        inputs: of the same structure as the batch, on the device the batch came on.
        num_samples: size of its tensors' first dimension.
        share: factor of its loss in the loss of the batch; 0 where it holds nothing that counts.
    """

    inputs: Any
    num_samples: int
    share: float

    def on(self, device: torch.device) -> Any:
        """A copy of the inputs on ``device``."""
        # A copy also where they are there: parts of one tensor share a version counter, so a model that writes to its
        # inputs would spoil the backward passes of earlier micro-batches.
        return _copied(self.inputs, device)


def _copied(tree: Any, device: torch.device) -> Any:
    # Most batches are walked here: torch's pytree leaves cycles for the garbage collector at every call.
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=True, copy=True)
    if type(tree) is dict:
        return {name: _copied(value, device) for name, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_copied(value, device) for value in tree)
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device, non_blocking=True, copy=True), tree)


@dataclass(frozen=True)
class SplitBatch:
    """A batch in parts.

    Attributes:
        microbatches: the parts, in order.
        num_items: what the batch's loss is a mean over: samples, unless the criterion counts something else.
        whole: the batch that the parts are of.
    """

    microbatches: tuple[Microbatch, ...] = ()
    num_items: float = 0.0
    whole: Any = None


def plain(batch: Any) -> Any:
    """A batch whose containers torch can walk: every mapping that it does not know becomes a dict, nested ones too.

    Raises:
        DataError: the batch is no container of a kind that can be split.
    """
    batch = _known(dict(batch) if isinstance(batch, Mapping) else batch)
    if not isinstance(batch, dict | tuple | list | Tensor):
        raise DataError(
            f"a batch is a mapping, a tuple, a list or a tensor: got {type(batch).__name__}. "
            "Return one of these from the collate_fn."
        )
    return batch


def _known(tree: Any) -> Any:
    def known(leaf: Any) -> Any:
        return {name: _known(value) for name, value in leaf.items()} if isinstance(leaf, Mapping) else leaf

    return pytree.tree_map(known, tree)


def num_samples(batch: Any) -> int:
    """The common size of the first dimension of the batch's tensors (0-dim tensors are left out).

    Raises:
        DataError: the tensors disagree, there is none, or the batch is empty.
    """
    paths, _ = pytree.tree_flatten_with_path(batch)
    sizes = {
        pytree.keystr(path) or "the batch": leaf.shape[0]
        for path, leaf in paths
        if isinstance(leaf, Tensor) and leaf.dim() > 0
    }
    if not sizes:
        raise DataError("a batch needs at least one tensor with a first dimension to split. Check the collate_fn.")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise DataError(
            f"all tensors of a batch must agree in dimension 0, the samples: got {listed}. "
            "Expand the others to one row per sample; 0-dimensional tensors and plain values go to every micro-batch."
        )
    size = next(iter(sizes.values()))
    if size == 0:
        raise DataError("a batch needs at least one sample: got 0. Drop empty batches in the dataloader.")
    return size


def split_batch(
    batch: Any,
    *,
    num_microbatches: int | None,
    microbatch_size: int | None,
    num_items: Callable[[Any], Any] | None = None,
) -> SplitBatch:
    """Cut a batch along dimension 0, in order.

    By count, the sizes differ by at most one, larger ones first, and a batch of fewer samples than micro-batches gives
    one per sample; by size, the last one may be smaller.

    Args:
        batch: from :func:`plain`.
        num_microbatches: how many; or
        microbatch_size: how large.
        num_items: maps a micro-batch's inputs to the number of items that the criterion's mean over it is taken over;
            None counts samples. A batch that holds ``num_items_in_batch`` (a number) says itself what its loss is
            divided by: the losses of its micro-batches are then parts of a sum.

    Raises:
        DataError: see :func:`num_samples`.
    """
    samples = num_samples(batch)
    if microbatch_size is not None:
        count = -(-samples // microbatch_size)
        sizes = [min(microbatch_size, samples - start * microbatch_size) for start in range(count)]
    else:
        count = min(num_microbatches or 1, samples)
        sizes = [samples // count + (place < samples % count) for place in range(count)]
    if isinstance(batch, dict) and isinstance(batch.get(TOTAL_KEY), int | float):
        # As a tensor: a plain number would make every step's inputs new to a model that is cut by their kind.
        batch = batch | {TOTAL_KEY: torch.tensor(batch[TOTAL_KEY])}
    leaves, tree = pytree.tree_flatten(batch)
    parts = [
        torch.split(leaf, sizes) if isinstance(leaf, Tensor) and leaf.dim() > 0 else [leaf] * len(sizes)
        for leaf in leaves
    ]
    inputs = [pytree.tree_unflatten([part[place] for part in parts], tree) for place in range(len(sizes))]
    if isinstance(batch, dict) and batch.get(TOTAL_KEY) is not None:
        total, shares = float(batch[TOTAL_KEY]), [1.0] * len(sizes)
    else:
        items = _numbers([num_items(part) for part in inputs]) if num_items else [float(size) for size in sizes]
        total = sum(items)
        shares = [count / total if total else 0.0 for count in items]
    return SplitBatch(tuple(map(Microbatch, inputs, sizes, shares)), total, batch)


def _numbers(values: list[Any]) -> list[float]:
    """As floats; tensors are read together, so that the host waits for their device once."""
    if all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
        values = torch.stack([value.detach().reshape(()) for value in values]).tolist()
    return list(map(float, values))


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called on inputs: a dict by keyword, a tuple or list by position, a tensor alone."""
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}
