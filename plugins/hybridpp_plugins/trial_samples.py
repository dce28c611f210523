"""Samples for trying a criterion on: chosen among those of the first step, and made from one of them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline import leaf_dims
from hybridpp.pipeline.batch_dims import Dims
from hybridpp.pipeline.loss_items import Count
from hybridpp.pipeline.loss_reduction import couples

Chosen: TypeAlias = Callable[[Sequence[int]], Any]
"""The inputs of some samples of a pair: 0 stands for its first one."""

# Samples that are looked at for unlike ones, and pairs of such that the criterion is called with.
_MAX_SAMPLES, _MAX_PAIRS = 64, 3
# Elements of a tensor that are looked at for values that it may hold.
_MAX_SEEN = 2**16


class TrialPair(NamedTuple):
    """Two samples.

    Attributes:
        trees: the inputs of the micro-batch of each.
        samples: their indices there.
        applies: whether numbers that the criterion has made of several samples differ for them.
    """

    trees: tuple[Any, Any]
    samples: tuple[int, int]
    applies: bool = False


def trial_pairs(
    trees: Sequence[Any], size: int, dims: Dims, applied: Sequence[Count], chosen_of: Callable[[TrialPair], Chosen]
) -> Iterator[TrialPair]:
    """Pairs of unlike samples: those of the first step, and then copies.

    Args:
        trees: the inputs of micro-batches, that of the criterion's outputs first.
        size: the number of samples of each.
        dims: where the inputs have their samples.
        applied: what the criterion has applied to what the model computed.
        chosen_of: gives samples of a pair.
    """
    samples = [(tree, sample) for tree in trees for sample in range(size)]
    (tree, sample), *others = samples[:: -(-len(samples) // _MAX_SAMPLES)]
    pairs = [TrialPair((tree, other), (sample, at), applies=True) for other, at in others]

    def applies(pair: TrialPair) -> bool:
        chosen = functools.cache(chosen_of(pair))

        def value(kinds: Sequence[int], count: Count) -> Any:
            return count.of(chosen(kinds), len(kinds))

        return any(couples(functools.partial(value, count=count)) for count in applied)

    num_found = 0
    for pair in pairs:
        if num_found < _MAX_PAIRS and applies(pair):
            num_found += 1
            yield pair
    if pairs and not num_found:
        yield max(pairs, key=lambda pair: _num_unlike(pair, size, dims))._replace(applies=False)


def copies(trees: Sequence[Any], size: int, dims: Dims, *, may_guess: bool) -> Iterator[TrialPair]:
    """The first sample with changed copies of it, whose values could be those of other samples.

    Where several samples are alike, or there is one alone, nothing else shows what a criterion makes of unlike ones.
    Of whole numbers (class ids, masks, tokens), half of those that are equal get another value, so that no value
    gets lost: one that the tensor has elsewhere in the first step, or one that is near. Other numbers are moved.

    Args:
        trees: as for :func:`trial_pairs`.
        size: the same.
        dims: the same.
        may_guess: whether whole numbers may get values that are not seen, which a criterion may not take.
    """
    for variant in range(2):
        changed = functools.partial(_another_value, variant=variant, may_guess=may_guess)
        leaves, structure = pytree.tree_flatten(trees[0])
        flat = [pytree.tree_leaves(tree) for tree in trees]
        is_other = False
        for index, (leaf, dim) in enumerate(zip(list(leaves), leaf_dims(trees[0], dims), strict=True)):
            rows = _rows_of(leaf, dim, size)
            if not rows or dim is None or leaf.is_complex():
                continue
            seen = [one[index] for one in flat if len(one) == len(leaves) and isinstance(one[index], Tensor)]
            row = leaf.detach().narrow(dim, 0, rows)
            values = changed(row.cpu().flatten(), _seen(seen, leaf.dtype)).view(row.shape).to(leaf)
            is_other = is_other or not torch.equal(values, row)
            leaves[index] = torch.cat([values, leaf.detach().narrow(dim, rows, leaf.shape[dim] - rows)], dim)
        if is_other:
            yield TrialPair((trees[0], pytree.tree_unflatten(leaves, structure)), (0, 0))


def _rows_of(leaf: Any, dim: int | None, size: int) -> int:
    """How many rows of a leaf each sample has; 0: it holds no samples."""
    if not isinstance(leaf, Tensor) or dim is None or dim >= leaf.dim() or leaf.shape[dim] % size or not leaf.numel():
        return 0
    rows = leaf.shape[dim] // size
    # Tensors of more rows than the one sample may hold no samples.
    return rows if size > 1 or rows == 1 else 0


def _num_unlike(pair: TrialPair, size: int, dims: Dims) -> int:
    """In how many entries a pair differs."""
    first, second = (pytree.tree_leaves(tree) for tree in pair.trees)
    if len(first) != len(second):
        return 0
    found = 0
    for one, other, dim in zip(first, second, leaf_dims(pair.trees[0], dims), strict=True):
        rows = _rows_of(one, dim, size)
        if rows and isinstance(other, Tensor) and one.shape == other.shape:
            both = [leaf.narrow(dim, at * rows, rows) for leaf, at in zip((one, other), pair.samples, strict=True)]
            found += not torch.equal(*both)
    return found


def _seen(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Values that a tensor has in the first step, in host memory."""
    limit = max(_MAX_SEEN // len(tensors), 1)
    return torch.cat([one.detach().flatten()[:limit].to("cpu", dtype) for one in tensors])


def _another_value(values: Tensor, seen: Tensor, *, variant: int, may_guess: bool) -> Tensor:
    if not values.is_floating_point() or bool((seen == seen.round()).all() and (values == values.round()).all()):
        return _another_class(values, seen, variant, may_guess)
    # Of the host's generator, since not every device has one of its own.
    random = torch.rand(values.shape, generator=torch.Generator().manual_seed(variant)).to(values.dtype)
    low, high, spread = float(seen.min()), float(seen.max()), max(float(seen.double().std(correction=0)), 1.0)
    if variant and may_guess:  # of the other sign, which they may not have, as far as is seen
        return -values - torch.where(values < 0, -1, 1) * random * spread
    if low >= 0 and high <= 1:
        return values.lerp(random, 0.7)
    return values + 2 * spread * (2 * random - 1 if low < 0 < high else random if low >= 0 else -random)


def _another_class(values: Tensor, seen: Tensor, variant: int, may_guess: bool) -> Tensor:
    known, numbers = torch.unique(values, return_counts=True)
    most = known[numbers.argmax()]
    at = (values == most).nonzero().flatten()
    at = at[: (len(at) + 1) // 2] if variant == 0 else at[len(at) // 2 :]
    # Negative ones stand for no class.
    others = [one for one in torch.unique(seen) if one >= 0 and one != most]
    if others:
        other = others[(variant * len(others)) // 2]
    elif not may_guess:
        return values
    elif values.dtype == torch.bool:
        other = ~most
    elif most <= 0:
        other = torch.full_like(most, 1 if most == 0 else 0)
    else:
        other = most + (1 if variant else -1)
    values = values.clone()
    values[at] = other
    return values
