"""Detect batches whose samples are probably not in dimension 0."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.errors import DataError
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline.batch import SplitBatch

# A smaller triangle may be a coincidence: padding of samples sorted by length looks the same.
_MIN_MASK = 3


def check_batch_dims(batch: SplitBatch, loader_batch_size: int | None) -> None:
    """Refuse a batch of several micro-batches whose samples seem not to be in dimension 0.

    Args:
        batch: split along dimension 0 by default.
        loader_batch_size: the dataloader's batch size, if known.

    Raises:
        DataError: a tensor is a triangular mask over dimension 0, dimension 1 has the size of the loader's batches, or
            a list that would not be split has as many numbers as the batch has samples.
    """
    if len(batch.microbatches) < 2:
        return
    _refuse_lists(batch.full_batch, sum(microbatch.num_samples for microbatch in batch.microbatches))
    paths, _ = pytree.tree_flatten_with_path(batch.full_batch)
    tensors = {pytree.keystr(path): leaf for path, leaf in paths if isinstance(leaf, Tensor) and leaf.dim() > 0}
    for name, tensor in tensors.items():
        if _is_triangular_mask(tensor):
            raise DataError(
                f"{name} is a triangular mask of shape {tuple(tensor.shape)}, which samples usually share, but it "
                "would "
                "be split along dimension 0. To give every micro-batch the complete mask, use HybridParallelPlugin("
                "batch_dims={'mask': None}), with the entry's name or index; if it holds samples, use "
                "batch_dims={'mask': 0}."
            )
    samples = sum(microbatch.num_samples for microbatch in batch.microbatches)
    size = loader_batch_size
    if size is None or samples <= size or any(tensor.dim() == 1 for tensor in tensors.values()):
        return
    if all(tensor.shape[1] == size for tensor in tensors.values()):
        raise DataError(
            f"the dataloader makes batches of {size} samples, but the batch's tensors have size {samples} in dimension "
            f"0 and {size} in dimension 1, as for sequence-first models. Set the dimension of the samples: "
            "HybridParallelPlugin(batch_dims=1), or batch_dims=0."
        )


def _refuse_lists(batch: Any, num_samples: int) -> None:
    """Lists in a batch that probably hold an entry for each sample, and would be given to every micro-batch whole."""
    named = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, list | tuple) else ()
    for name, entry in named:
        if not isinstance(entry, list | tuple) or len(entry) != num_samples or num_samples < 2:
            continue
        is_split = isinstance(entry, list) and all(isinstance(one, str | bytes) for one in entry)
        if is_split or not all(one is None or isinstance(one, int | float | str | bytes) for one in entry):
            continue
        as_list, as_none = (
            repr({name: dims} if isinstance(batch, Mapping) else [0] * int(name) + [dims]) for dims in ("list", None)
        )
        raise DataError(
            f"{name!r} of the batch is a {type(entry).__name__} of {num_samples} values, as many as there are samples, "
            "but every micro-batch would get all of them. If there is one for each sample, make it a tensor, or use "
            f"HybridParallelPlugin(batch_dims={as_list}); if not, batch_dims={as_none}."
        )


def _is_triangular_mask(tensor: Tensor) -> bool:
    size = tensor.shape[0]
    if tuple(tensor.shape) != (size, size) or size < _MIN_MASK:
        return False
    if tensor.dtype is not torch.bool and not tensor.is_floating_point():
        return False
    return _is_triangle(tensor) or _is_triangle(tensor.t())


def _is_triangle(tensor: Tensor) -> bool:
    """One value above the diagonal, another one everywhere else."""
    above, value = tensor[0, -1], tensor[0, 0]
    expected = torch.where(torch.ones_like(tensor, dtype=torch.bool).triu(1), above, value)
    return bool(above != value) and torch.equal(tensor, expected)


@contextmanager
def watch_sequence_axes(model: nn.Module, sizes: Collection[int]) -> Iterator[list[str]]:
    """A context that records attention and recurrent layers whose sequence dimension is the split dimension 0.

    Args:
        model: its torch layers that are not batch-first are checked.
        sizes: the micro-batch sizes.

    Yields:
        A list of descriptions, complete at the end.
    """
    found: list[str] = []
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and not module.batch_first
    ]

    def look_at(name: str) -> Any:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs.get("query", kwargs.get("input"))
            if isinstance(given, Tensor) and given.dim() == 3:
                length, count = given.shape[:2]
                if length in sizes and count not in sizes:
                    found.append(f"{name!r} ({type(module).__name__}, on {list(given.shape)})")

        return look

    hooks = [module.register_forward_pre_hook(look_at(name), with_kwargs=True) for name, module in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
