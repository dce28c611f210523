"""Merge the outputs of micro-batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline.batch import Microbatch
from hybridpp.pipeline.batch_dims import Dims, leaf_dims


def merge_outputs(outputs: list[Any], microbatches: Sequence[Microbatch], dims: Dims = 0) -> Any:
    """One output for the batch, with the structure of a micro-batch's output.

    Tensors whose size along their sample dimension (``dims``) is that of the micro-batch are concatenated. Scalar
    tensors (losses) are averaged with the weights of the loss. Any other leaf is kept if it is equal in all outputs;
    otherwise it becomes a list of the outputs' values.
    """
    flattened = [pytree.tree_flatten(output) for output in outputs]
    trees = {str(tree) for _, tree in flattened}
    if len(trees) > 1:
        return outputs
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    along = leaf_dims(outputs[0], dims, "output_dims")
    leaves = [_merge(list(parts), microbatches, dim) for parts, dim in zip(columns, along, strict=True)]
    return pytree.tree_unflatten(leaves, flattened[0][1])


def _merge(parts: list[Any], microbatches: Sequence[Microbatch], dim: int | None) -> Any:
    if all(isinstance(part, Tensor) for part in parts):
        if dim is not None and all(
            part.dim() > dim and part.shape[dim] == mb.num_samples for part, mb in zip(parts, microbatches, strict=True)
        ):
            return torch.cat(parts, dim)
        if all(part.dim() == 0 for part in parts):
            return torch.stack(
                [part * mb.share for part, mb in zip(parts, microbatches, strict=True) if mb.share]
            ).sum()
        return parts
    return parts[0] if all(_same(part, parts[0]) for part in parts) else parts


def _same(part: Any, other: Any) -> bool:
    if part is other:
        return True
    # Arrays compare element by element, which has no truth value: they count as different.
    return type(part) is type(other) and (part == other) is True
