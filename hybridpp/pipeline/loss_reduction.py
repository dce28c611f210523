"""What the first loss of a criterion is over samples, as far as trying it on other samples tells."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline.batch_dims import Dims, leaf_dims
from hybridpp.pipeline.packed_rows import packed_lengths, some_sequences


class LossReduction(IntEnum):
    """How a loss is reduced over samples; the most severe last."""

    MEAN = 0
    """A mean, as far as known."""
    STATISTICS = 1
    """The model applies statistics of a micro-batch's samples to each of them."""
    SUM_IN_MODEL = 2
    """The model computed the loss, and its last operation is a sum, or it multiplied a mean with the samples."""
    SUM = 3
    """Twice the samples gave twice the loss: a sum."""
    UNCOUNTED = 4
    """What it is divided by cannot be told from a batch."""
    OF_EARLIER_STAGE = 5
    """A part of it is a number that an earlier stage made, of which it is not known what it is a mean over."""
    COUPLED = 6
    """Neither a mean nor a sum over items."""
    KEPT = 7
    """It depends on what the criterion keeps from call to call."""
    EMPTY = 8
    """No replica's batch has an item."""
    CHANGED = 9
    """It is made in another way than the one whose form is known."""
    APPEARED = 10
    """It has a term that the one whose form is known had not."""


@torch.no_grad()
def confirm_sum(loss: Tensor, on_twice: Callable[[], Any]) -> LossReduction:
    """Whether a loss that ends with a sum is a sum over samples.

    Called on duplicated samples, it is distinguished from a mean with weights that add up to one.

    Args:
        loss: the criterion's result.
        on_twice: calls the criterion with the micro-batch's samples duplicated.
    """
    try:
        twice = on_twice()
    except Exception:  # a criterion may raise anything for a number of samples that it was not made for
        return LossReduction.MEAN
    return LossReduction.SUM if _is_twice(twice, loss.detach()) else LossReduction.MEAN


def duplicate_samples(tree: Any, num_samples: int, dims: Callable[[Any], list[int | None]]) -> Any:
    """A copy of ``tree`` with every tensor's samples duplicated; ``dims`` gives the sample dimension of each leaf.

    Tensors with several rows per sample (all tokens, for example) are duplicated, too.
    """

    def twice(leaf: Tensor, dim: int, rows: int) -> Tensor:
        # On the device, and not from a list, which would be copied there.
        return torch.arange(leaf.shape[dim], device=leaf.device).repeat(2)

    return _indexed(tree, num_samples, dims, twice)


def duplicate_inputs(inputs: Any, num_samples: int, dims: Dims) -> Any:
    """A copy of a micro-batch's inputs with every sample duplicated, also where these are sequences of a packed row."""
    lengths = packed_lengths(inputs, dims)
    if lengths is not None and len(lengths) == num_samples:
        return some_sequences(inputs, lengths, [*range(num_samples)] * 2)
    return duplicate_samples(inputs, num_samples, partial(leaf_dims, dims=dims))


def select_samples(tree: Any, num_samples: int, dims: Callable[[Any], list[int | None]], samples: slice) -> Any:
    """``tree`` with some of the samples of every tensor; arguments as for :func:`duplicate_samples`."""

    def selected(leaf: Tensor, dim: int, rows: int) -> slice:
        return slice(samples.start * rows, samples.stop * rows)

    return _indexed(tree, num_samples, dims, selected)


def joined_samples(
    trees: Sequence[Any],
    num_samples: int,
    dims: Callable[[Any], list[int | None]],
    chosen: Sequence[tuple[int, int]],
) -> Any:
    """Samples of several trees of one form, one after another; of tensors without samples, those of the first tree.

    Args:
        trees: of as many samples each.
        num_samples: of each tree. If it is 1, tensors of more rows may hold no samples, and are left as they are.
        dims: gives the sample dimension of each leaf.
        chosen: the index of a tree, and that of a sample of it.

    Raises:
        ValueError: the trees have other leaves.
        RuntimeError: their samples have other shapes.
    """
    leaves, structure = pytree.tree_flatten(trees[0])
    flat = [pytree.tree_leaves(tree) for tree in trees]
    if any(len(one) != len(leaves) for one in flat):
        raise ValueError("the trees must have the same leaves")
    for index, (leaf, dim) in enumerate(zip(list(leaves), dims(trees[0]), strict=True)):
        if not isinstance(leaf, Tensor) or dim is None or dim >= leaf.dim() or leaf.shape[dim] % num_samples:
            continue
        rows = leaf.shape[dim] // num_samples
        if num_samples > 1 or rows == 1:
            parts = [flat[tree][index].detach().narrow(dim, sample * rows, rows) for tree, sample in chosen]
            leaves[index] = torch.cat([part.to(leaf.device) for part in parts], dim)
    return pytree.tree_unflatten(leaves, structure)


def picked_samples(tree: Any, num_samples: int, dims: Callable[[Any], list[int | None]], samples: Sequence[int]) -> Any:
    """``tree`` with some of its samples, in any order; arguments as for :func:`joined_samples`."""

    def selected(leaf: Tensor, dim: int, rows: int) -> Tensor | slice:
        if num_samples == 1 < rows:
            return slice(None)
        starts = torch.tensor(samples, device=leaf.device) * rows
        return (starts[:, None] + torch.arange(rows, device=leaf.device)).flatten()

    return _indexed(tree, num_samples, dims, selected)


MIXED: Sequence[int] = (0, 1, 0, 0, 0, 1)
"""Samples of two kinds, of which the first two and the others hold unlike shares, and none lacks a kind."""
PARTS_OF_MIXED: Sequence[slice] = (slice(0, 6), slice(0, 2), slice(2, 6))
APART: Sequence[int] = (0, 0, 0, 1, 1)
"""Samples of two kinds, of which the first three and the others lack one."""
PARTS_OF_APART: Sequence[slice] = (slice(0, 5), slice(0, 3), slice(3, 5))


def couples(value: Callable[[Sequence[int]], Any]) -> bool:
    """Whether a value of samples of two kinds is made of several samples at once, and depends on their kinds.

    What has rows of its own for each sample does not, nor does what is equal for any samples.

    Args:
        value: makes it, of some samples: 0 is one of the first kind, 1 one of the other.
    """
    try:
        full, *parts = [_numbers(value(MIXED[part])) for part in PARTS_OF_MIXED]
        if _is_equal(full, _numbers(value((0,) * len(MIXED)))):
            return False
        for dim in range(full.dim()):
            if sum(part.shape[dim] for part in parts) == full.shape[dim]:
                return not _is_equal(torch.cat(parts, dim), full)
        return not all(_is_equal(part, full) for part in parts)
    except Exception:  # any operation of the script's, on fewer samples than it was made for, and what is no tensor
        return False


def _numbers(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().double()


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, equal_nan=True)


def with_another(
    tree: Any, other: Any, dims: Callable[[Any], list[int | None]], factor: float = 1.0
) -> tuple[Any, Any]:
    """A tree of one sample with another one beside it; and the other one alone.

    Tensors of one row are joined: with that of ``other``, where it has one of that shape in the same place, else with
    themselves. What has more rows may hold no samples, and is left as it is.

    Args:
        tree: of one sample.
        other: the same of another sample; None: there is none.
        dims: gives the sample dimension of each leaf.
        factor: on the other sample's floating-point numbers.
    """
    leaves, structure = pytree.tree_flatten(tree)
    others = pytree.tree_leaves(other)
    both, alone = list(leaves), list(leaves)
    for index, (leaf, dim) in enumerate(zip(leaves, dims(tree), strict=True)):
        if isinstance(leaf, Tensor) and dim is not None and dim < leaf.dim() and leaf.shape[dim] == 1:
            found = others[index] if len(others) == len(leaves) else None
            if not isinstance(found, Tensor) or (found.shape, found.dtype) != (leaf.shape, leaf.dtype):
                found = leaf
            second = found.detach().to(leaf.device)
            alone[index] = second * factor if leaf.is_floating_point() else second
            both[index] = torch.cat([leaf.detach(), alone[index]], dim)
    return pytree.tree_unflatten(both, structure), pytree.tree_unflatten(alone, structure)


def with_unlike_samples(
    tree: Any, num_samples: int, dims: Callable[[Any], list[int | None]], changed: Sequence[bool]
) -> Any:
    """Outputs of a model as far from each other as those of a trained one are, made from others.

    Early in training all samples may have about the same loss, so that a mean over samples and one over items are
    equal. Of each sample, the numbers are changed by another amount. What is between 0 and 1 (probabilities), not
    negative, or not positive, stays so. The numbers are the same on all ranks.

    Args:
        tree: the outputs.
        num_samples: how many they are of.
        dims: gives the sample dimension of each leaf.
        changed: of each leaf, whether it is changed, if it holds floating-point numbers.
    """
    leaves, structure = pytree.tree_flatten(tree)
    for index, (leaf, dim) in enumerate(zip(leaves, dims(tree), strict=True)):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or dim is None or dim >= leaf.dim():
            continue
        if not leaf.numel() or leaf.shape[dim] % num_samples or not changed[index]:
            continue
        values = leaf.detach()
        # Of the host's generator, since not every device has one of its own.
        random = torch.rand(values.shape, generator=torch.Generator().manual_seed(index)).to(values)
        amounts = torch.linspace(0.1, 0.9, num_samples, device=values.device, dtype=values.dtype)
        amounts = amounts.repeat_interleave(leaf.shape[dim] // num_samples)
        amounts = amounts.view(*[1] * dim, -1, *[1] * (leaf.dim() - dim - 1))
        low, high = float(values.min()), float(values.max())
        is_zero = low == high == 0  # of a layer that begins with zeros
        if low >= 0 and high <= 1 and not is_zero:
            leaves[index] = torch.lerp(values, random, amounts)
        else:
            shift = 2 * random - 1 if is_zero or low < 0 < high else random if low >= 0 else -random
            leaves[index] = values + 4 * amounts * max(float(values.std(correction=0)), 1.0) * shift
    return pytree.tree_unflatten(leaves, structure)


def _indexed(
    tree: Any,
    num_samples: int,
    dims: Callable[[Any], list[int | None]],
    index_of: Callable[[Tensor, int, int], Tensor | slice],
) -> Any:
    """``tree`` with the samples of every tensor indexed; ``index_of`` gets it, its dimension, and rows per sample.

    An index keeps logits in parts that are sharded by vocabulary.
    """
    leaves, structure = pytree.tree_flatten(tree)
    for index, (leaf, dim) in enumerate(zip(leaves, dims(tree), strict=True)):
        if isinstance(leaf, Tensor) and dim is not None and dim < leaf.dim() and leaf.shape[dim] % num_samples == 0:
            chosen = index_of(leaf, dim, leaf.shape[dim] // num_samples)
            leaves[index] = leaf.detach()[(*[slice(None)] * dim, chosen)]
    return pytree.tree_unflatten(leaves, structure)


def _is_twice(twice: Any, once: Tensor) -> bool:
    if not isinstance(twice, Tensor) or twice.numel() != 1:
        return False
    # A loss of 0 shows nothing; the tolerance covers rounding.
    return bool(once != 0) and bool(((twice / once) - 2).abs() < 0.01)
