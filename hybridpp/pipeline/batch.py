"""Batches and micro-batches."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from hybridpp.errors import DataError
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline.batch_dims import Dims, PerSample, leaf_dims, mark_sample_lists, with_sample_lists
from hybridpp.pipeline.loss_items import LossForm, Measured, NotCountedError, ReplicaCounts, add_up
from hybridpp.pipeline.packed_rows import Lengths, Rows, mark_rows, shared_entries, size_of_samples

# Of larger tensors, this many evenly spaced elements are compared: enough to distinguish two batches.
_MAX_COMPARED = 4096

TOTAL_KEY = "num_items_in_batch"
"""The argument by which Hugging Face models accept the number of items that their loss is divided by."""


@dataclass(frozen=True)
class Microbatch:
    """A part of a batch.

    Attributes:
        inputs: with the batch's structure, on the batch's device.
        num_samples: number of samples.
        share: weight of its loss in the batch's loss; 0 if it holds no item.
        counts: of what its loss is divided by, where that was found.
    """

    inputs: Any
    num_samples: int
    share: float
    counts: Measured | None = None


@dataclass(frozen=True)
class SplitBatch:
    """A batch that is split into micro-batches.

    Attributes:
        microbatches: the parts, in order.
        num_items: number of items that the batch's loss is a mean over: samples, unless the criterion counts others.
        full_batch: the batch before the split.
        sums: whether the batch's loss is the sum, not the mean, over its items.
        unchecked: some bytes of tensors on a device, which ranks that must hold the same batch have not compared yet.
        form: what its loss is a mean over, where that was found.
        has_total: whether it holds ``num_items_in_batch``.
        counted_items: what its loss is a mean over, where that is only reported; a tensor if a device counts it.
        dims: where the samples are, with the lists of samples that it shows itself.
    """

    microbatches: tuple[Microbatch, ...] = ()
    num_items: float = 0.0
    full_batch: Any = None
    sums: bool = False
    unchecked: Sequence[Tensor] = ()
    form: LossForm | None = None
    has_total: bool = False
    counted_items: float | Tensor | None = None
    dims: Dims = 0

    @property
    def reported_items(self) -> float | Tensor:
        """How much its loss counts in a mean over batches: items, or samples where it is a sum."""
        if self.counted_items is not None:
            return self.counted_items
        if self.form is not None and (found := self.form.num_items(self.counts)) is not None:
            return float(found)
        if self.sums or self.has_total:
            return float(sum(part.num_samples for part in self.microbatches))
        return self.num_items

    @property
    def counts(self) -> tuple[float, ...]:
        """Of all micro-batches together, where the form of the loss was found."""
        return add_up([one.counts for one in self.microbatches if one.counts is not None]) if self.form else ()

    def weights(self, replicas: ReplicaCounts, scale: float) -> list[float]:
        """The factors on the micro-batches' losses in the gradient, times a loss scale."""
        if self.form is not None and replicas.are_known and not self.form.divides_by_total:
            measured = [part.counts for part in self.microbatches if part.counts is not None]
            return [scale * weight for weight in self.form.weights(measured, replicas.total)]
        # Sums add up over the replicas, as over micro-batches.
        if not self.sums and not (self.has_total and replicas.has_global_total):
            scale *= self.num_items / math.fsum(replicas.num_items)
        return [scale * part.share for part in self.microbatches]

    def by_samples(self) -> "SplitBatch":
        """The same batch, as if the form of the loss were not known."""
        if self.form is None:
            return self
        total = sum(part.num_samples for part in self.microbatches)
        shares = [1.0 if self.has_total else part.num_samples / total for part in self.microbatches]
        parts = [replace(part, share=share, counts=None) for part, share in zip(self.microbatches, shares, strict=True)]
        return replace(self, microbatches=tuple(parts), form=None)

    def weighted(self, form: LossForm, measured: Sequence[Measured]) -> "SplitBatch":
        """The same batch, with the shares that a form of the loss gives its micro-batches."""
        ones = [1.0] * len(measured)
        shares = ones if form.divides_by_total else form.weights(measured, add_up(measured))
        parts = [
            replace(part, share=share, counts=one)
            for part, share, one in zip(self.microbatches, shares, measured, strict=True)
        ]
        return replace(self, microbatches=tuple(parts), form=form)


def to_plain_containers(batch: Any) -> Any:
    """A batch of containers that torch's pytree supports: other mappings, nested ones too, become dicts.

    Raises:
        DataError: the batch is no container that can be split.
    """
    batch = _with_dicts(dict(batch) if isinstance(batch, Mapping) else batch)
    if not isinstance(batch, dict | tuple | list | Tensor):
        raise DataError(
            f"a batch must be a mapping, a tuple, a list or a tensor: got {type(batch).__name__}. "
            "Return one of these from the collate_fn."
        )
    return batch


def _with_dicts(tree: Any) -> Any:
    """``tree`` with dicts for the mappings that pytree takes for leaves."""

    def with_dicts(leaf: Any) -> Any:
        return {name: _with_dicts(value) for name, value in leaf.items()} if isinstance(leaf, Mapping) else leaf

    return pytree.tree_map(with_dicts, tree)


def num_samples(batch: Any, dims: Dims = 0) -> int:
    """The common size of the batch's tensors along the dimension of their samples (0-dim tensors are left out).

    Raises:
        DataError: the tensors disagree, there is none, one lacks the dimension, or the batch is empty.
    """
    if not _is_flat(batch):
        dims = with_sample_lists(batch, dims)
        batch = mark_sample_lists(batch, dims)
    return _num_samples(mark_rows(batch, dims), dims, is_split=True)


def resize_batch(batch: Any, size: int, dims: Dims = 0) -> Any:
    """A batch of ``size`` samples: those of ``batch``, repeated or left out at the end.

    Entries that all samples share stay as they are, and so do tensors of another number of rows than samples.

    Args:
        batch: from :func:`to_plain_containers`.
        size: samples, at least 1.
        dims: where the samples are.

    Raises:
        DataError: see :func:`num_samples`; tensors may disagree.
    """
    dims = dims if _is_flat(batch) else with_sample_lists(batch, dims)
    marked = mark_rows(mark_sample_lists(batch, dims), dims)
    given = _num_samples(marked, dims, is_split=False)
    repeats, shared = -(-size // given), shared_entries(batch, dims)

    def resized(path: Any, leaf: Any, dim: int | None) -> Any:
        if isinstance(leaf, Lengths):
            counts = (leaf.ends.diff().tolist() * repeats)[:size]
            return leaf.ends.new_tensor([0, *accumulate(counts)])
        if isinstance(leaf, Rows):
            rows = sum((leaf.counts * repeats)[:size])
            if not isinstance(leaf.values, Tensor):
                return type(leaf.values)((list(leaf.values) * repeats)[:rows])
            return torch.cat([leaf.values] * repeats, leaf.dim).narrow(leaf.dim, 0, rows)
        if isinstance(leaf, PerSample) and len(leaf) == given:
            return (list(leaf) * repeats)[:size]
        is_shared = dim is None or (shared and getattr(path[0], "key", None) in shared)
        if not isinstance(leaf, Tensor) or is_shared or leaf.dim() <= (dim or 0) or leaf.shape[dim or 0] != given:
            return leaf
        return torch.cat([leaf] * repeats, dim or 0).narrow(dim or 0, 0, size)

    paths, spec = pytree.tree_flatten_with_path(marked)
    found = zip(paths, _leaf_dims(marked, dims, len(paths)), strict=True)
    return pytree.tree_unflatten([resized(path, leaf, dim) for (path, leaf), dim in found], spec)


def _num_samples(batch: Any, dims: Dims, is_split: bool) -> int:
    """As :func:`num_samples`, of a batch whose rows are marked; tensors of one that is not split may disagree."""
    sizes, arrays = _sizes_by_name(batch, dims)
    for name, length in arrays.items():
        if not sizes or length in sizes.values():
            raise DataError(
                f"numpy arrays cannot be split into micro-batches: {name} is an array of {length} rows. "
                "Call torch.as_tensor on it in the collate_fn."
            )
    if not sizes:
        raise DataError("a batch needs at least one tensor with a first dimension to split. Check the collate_fn.")
    if len(set(sizes.values())) > 1 and not is_split:
        return max(size_of_samples(batch, sizes), 1)
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        where = "dimension 0, the samples" if dims == 0 else f"the dimension of the samples (batch_dims={dims})"
        raise DataError(
            f"all tensors of a batch must agree in {where}: got {listed}. "
            "Expand the others to one row per sample; 0-dimensional tensors and plain values go to every micro-batch. "
            "Or set the dimensions: HybridParallelPlugin(batch_dims={'x': 1, 'mask': None, 'boxes': 'list'}), with "
            "None for entries that all micro-batches share, and 'list' for a list with one entry per sample. For rows "
            "of which samples have unlike numbers, use {'patches': ('rows', 'grids')}, or a function of the batch that "
            "gives each sample's number; or num_microbatches=1."
        )
    size = next(iter(sizes.values()))
    if size == 0:
        raise DataError("a batch needs at least one sample: got 0. Drop empty batches in the dataloader.")
    return size


def _sizes_by_name(batch: Any, dims: Dims) -> tuple[dict[str, int], dict[str, int]]:
    """How many samples each tensor and list of samples holds, by its path in the batch; and each numpy array."""
    paths, _ = pytree.tree_flatten_with_path(batch)
    sizes: dict[str, int] = {}
    arrays: dict[str, int] = {}
    shared = shared_entries(batch, dims)
    for (path, leaf), dim in zip(paths, _leaf_dims(batch, dims, len(paths)), strict=True):
        if shared and getattr(path[0], "key", None) in shared:
            continue
        if isinstance(leaf, Rows):
            sizes[pytree.keystr(path)] = len(leaf.counts)
        elif isinstance(leaf, Lengths):
            sizes[pytree.keystr(path)] = len(leaf.ends) - 1
        elif isinstance(leaf, Tensor) and leaf.dim() > 0 and dim is not None:
            name = pytree.keystr(path) or "the batch"
            sizes[name] = _size(leaf, dim, name)
        elif type(leaf) is PerSample:
            sizes[pytree.keystr(path)] = len(leaf)
        elif isinstance(leaf, numpy.ndarray) and leaf.ndim and dim is not None:
            arrays[pytree.keystr(path)] = len(leaf)
    return sizes, arrays


def _leaf_dims(batch: Any, dims: Dims, count: int) -> list[int | None]:
    return [dims] * count if isinstance(dims, int) else leaf_dims(batch, dims, count=count)


def _is_flat(batch: Any) -> bool:
    """Whether it is a dict or tuple of tensors, as most are: there are no lists in it that may hold samples."""
    if type(batch) not in (dict, tuple):
        return False
    return all(isinstance(leaf, Tensor) for leaf in (batch.values() if type(batch) is dict else batch))


def _size(leaf: Tensor, dim: int, name: str) -> int:
    if dim >= leaf.dim():
        raise DataError(
            f"batch_dims puts the samples in dimension {dim}: {name} has shape {tuple(leaf.shape)}. "
            "Set a dimension for every entry: batch_dims={'x': 1, 'labels': 0}, or (1, 0) for a tuple."
        )
    return leaf.shape[dim]


def split_batch(
    batch: Any,
    *,
    num_microbatches: int | None,
    microbatch_size: int | None,
    num_items: Callable[[Any], Any] | None = None,
    sums: bool = False,
    dims: Dims = 0,
    form_of: Callable[[bool], LossForm | None] | None = None,
) -> SplitBatch:
    """Split a batch along the dimension of its samples, in order.

    With ``num_microbatches``, sizes differ by at most one, larger ones first, and a batch with fewer samples gives one
    micro-batch per sample. With ``microbatch_size``, the last micro-batch may be smaller.

    Args:
        batch: from :func:`to_plain_containers`.
        num_microbatches: number of micro-batches; None if ``microbatch_size`` is given.
        microbatch_size: samples per micro-batch; None if ``num_microbatches`` is given.
        num_items: returns the number of items that the criterion's mean over a micro-batch's inputs is over; None
            counts samples. If the batch holds ``num_items_in_batch`` (a number), its loss is divided by that: the
            losses of its micro-batches are then parts of a sum.
        sums: whether the criterion returns a sum over samples: then every loss has weight 1.
        dims: where the samples are, see :mod:`hybridpp.pipeline.batch_dims`.
        form_of: what the loss is known to be a mean over, of batches with or without ``num_items_in_batch``.

    Raises:
        DataError: see :func:`num_samples`; or what the loss is a mean over cannot be counted in this batch.
    """
    is_flat, full_batch = _is_flat(batch), batch
    dims = dims if is_flat else with_sample_lists(batch, dims)
    batch = batch if is_flat and isinstance(dims, int) else mark_sample_lists(batch, dims)
    batch = mark_rows(batch, dims)
    samples = _num_samples(batch, dims, is_split=num_microbatches is None or num_microbatches > 1)
    sizes = _microbatch_sizes(samples, num_microbatches, microbatch_size)
    if isinstance(batch, dict) and isinstance(batch.get(TOTAL_KEY), int | float):
        # As a tensor: a changing Python number would be a new signature, which is traced again, at every step.
        batch = batch | {TOTAL_KEY: torch.tensor(batch[TOTAL_KEY])}
    leaves, tree = pytree.tree_flatten(batch)
    split_dims = _leaf_dims(batch, dims, len(leaves))
    if shared := shared_entries(batch, dims):
        paths, _ = pytree.tree_flatten_with_path(batch)
        split_dims = [
            None if getattr(path[0], "key", None) in shared else dim
            for (path, _), dim in zip(paths, split_dims, strict=True)
        ]
    parts = [_parts(leaf, dim, sizes) for leaf, dim in zip(leaves, split_dims, strict=True)]
    inputs = [pytree.tree_unflatten([part[index] for part in parts], tree) for index in range(len(sizes))]
    if sums:
        total, shares = float(samples), [1.0] * len(sizes)
    elif isinstance(batch, dict) and batch.get(TOTAL_KEY) is not None:
        total, shares = float(batch[TOTAL_KEY]), [1.0] * len(sizes)
    else:
        items = _numbers([num_items(part) for part in inputs]) if num_items else [float(size) for size in sizes]
        total = sum(items)
        shares = [count / total if total else 0.0 for count in items]
    has_total = isinstance(batch, dict) and batch.get(TOTAL_KEY) is not None
    split = SplitBatch(
        tuple(map(Microbatch, inputs, sizes, shares)), total, full_batch, sums, has_total=has_total, dims=dims
    )
    form = None if form_of is None else form_of(has_total)
    if form is None:
        return split
    try:
        return split.weighted(form, form.measure(inputs, sizes))
    except NotCountedError as error:
        raise DataError(
            f"what the loss is a mean over cannot be counted in this batch as in those before ({error}). Give the "
            "criterion a method num_items(inputs), which counts it."
        ) from error


def _microbatch_sizes(samples: int, num_microbatches: int | None, microbatch_size: int | None) -> list[int]:
    if microbatch_size is not None:
        count = -(-samples // microbatch_size)
        return [min(microbatch_size, samples - start * microbatch_size) for start in range(count)]
    count = min(num_microbatches or 1, samples)
    return [samples // count + (index < samples % count) for index in range(count)]


def _parts(leaf: Any, dim: int | None, sizes: list[int]) -> Sequence[Any]:
    if len(sizes) == 1:
        return [leaf.values if isinstance(leaf, Rows) else leaf.ends if isinstance(leaf, Lengths) else _complete(leaf)]
    if isinstance(leaf, Rows | Lengths):
        return leaf.parts(sizes)
    if isinstance(leaf, Tensor) and leaf.dim() > 0 and dim is not None:
        return torch.split(leaf, sizes, dim)
    if isinstance(leaf, PerSample) and len(leaf) == sum(sizes):
        return [leaf[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return [_complete(leaf)] * len(sizes)


def _complete(leaf: Any) -> Any:
    return list(leaf) if isinstance(leaf, PerSample) else leaf


def _numbers(values: list[Any]) -> list[float]:
    """The values as floats. Tensors are read together, so that the host waits for their device once."""
    if all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
        values = torch.stack([value.detach().reshape(()) for value in values]).tolist()
    return list(map(float, values))


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model's call: a dict by keyword, a tuple or list by position, a tensor as the only one."""
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


class Summary(NamedTuple):
    """Equal for equal batches, and in practice for no others.

    Attributes:
        texts: of everything in a batch.
        samples: some bytes of each tensor.
    """

    texts: Sequence[str]
    samples: Sequence[Tensor]

    @classmethod
    def of(cls, batch: Any) -> "Summary":
        texts, samples = [], []
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, Tensor):
                texts.append(f"{tuple(leaf.shape)} {leaf.dtype}")
                samples.append(_some_bytes(leaf))
            else:
                # The repr of other objects may differ between processes.
                texts.append(repr(leaf) if isinstance(leaf, str | int | float | None) else type(leaf).__qualname__)
        return cls(texts, samples)

    def without_devices(self) -> tuple["Summary", list[Tensor]]:
        """A summary without the samples that are on a device, and those."""
        on_host = [sample for sample in self.samples if sample.is_cpu]
        return self._replace(samples=on_host), [sample for sample in self.samples if not sample.is_cpu]

    def digest(self) -> float:
        """A number for it. Waits for devices that hold samples."""
        total = zlib.crc32(repr(self.texts).encode())
        for sample in _on_host(self.samples):
            total = zlib.crc32(sample.numpy().tobytes(), total)
        return float(total)


def _some_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    # Odd, so that the sample covers all columns of a tensor whose row length is a power of two.
    step = -(-flat.numel() // _MAX_COMPARED) | 1
    # As bytes, because numpy has no bfloat16.
    return flat[::step].contiguous().view(torch.uint8)


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """One-dimensional tensors, copied to host memory; the host waits once per device, not once per tensor."""
    on_host = list(tensors)
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        indices = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        joined = torch.cat([tensors[index] for index in indices]).cpu()
        sizes = [len(tensors[index]) for index in indices]
        for index, part in zip(indices, torch.split(joined, sizes), strict=True):
            on_host[index] = part
    return on_host
