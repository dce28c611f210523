"""Put the outputs of micro-batches together again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hybridpp.pipeline.batch import Microbatch


def merge_outputs(outputs: list[Any], microbatches: Sequence[Microbatch]) -> Any:
    """One output for the whole batch, of the structure of the parts.

    Tensors whose first dimension is the samples are concatenated; a scalar tensor (a loss) becomes the mean, weighted
    like the loss; any other leaf is kept if it is the same everywhere, else the parts are given as a list.
    """
    flattened = [pytree.tree_flatten(output) for output in outputs]
    trees = {str(tree) for _, tree in flattened}
    if len(trees) > 1:
        return outputs
    leaves = [_merge(list(parts), microbatches) for parts in zip(*(leaves for leaves, _ in flattened), strict=True)]
    return pytree.tree_unflatten(leaves, flattened[0][1])


def _merge(parts: list[Any], microbatches: Sequence[Microbatch]) -> Any:
    if all(isinstance(part, Tensor) for part in parts):
        if all(part.dim() and part.shape[0] == mb.num_samples for part, mb in zip(parts, microbatches, strict=True)):
            return torch.cat(parts)
        if all(part.dim() == 0 for part in parts):
            return torch.stack(
                [part * mb.share for part, mb in zip(parts, microbatches, strict=True) if mb.share]
            ).sum()
        return parts
    return parts[0] if all(_same(part, parts[0]) for part in parts) else parts


def _same(part: Any, other: Any) -> bool:
    if part is other:
        return True
    # Arrays compare element by element, which is no truth value: they count as different.
    return type(part) is type(other) and (part == other) is True
