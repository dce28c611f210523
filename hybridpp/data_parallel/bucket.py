"""A flat buffer of gradients, and its reduction over the replicas."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from hybridpp.cluster import Group, Work
from hybridpp.data_parallel.layout import BucketLayout, ParameterInfo, Piece, ShardLayout, plan_buckets


class Bucket:
    """Some parameters' gradients in one contiguous buffer.

    Attributes:
        layout: where they lie.
        flat: the buffer.
        views: each parameter's gradient, by name.
        pending: parameters whose gradients the last backward pass does not have complete yet; None: it has not begun.
        work: the running reduction; None: there is none.
    """

    def __init__(self, layout: BucketLayout, parameters: Mapping[str, Tensor]):
        first = parameters[layout.slots[0].name]
        self.layout = layout
        self.flat = torch.zeros(layout.size, dtype=accumulation_dtype(first), device=first.device)
        self.views = views_in(self.flat, layout, parameters)
        self.pending: set[str] | None = None
        self.work: Work | None = None
        self._sent = self.flat

    def sample(self, count: int) -> Tensor:
        """A copy of about ``count`` evenly spaced elements of the gradients and the zero padding between them.

        They are real: of complex gradients real and imaginary parts.
        """
        flat = torch.view_as_real(self.flat).flatten() if self.flat.is_complex() else self.flat
        return flat[:: max(1, flat.numel() // count)].clone()

    def segment(self, index: int) -> Tensor:
        """The part of the buffer that one replica has after :meth:`launch_reduce` with ``scatter``."""
        return self.flat[self.layout.segment(index)]

    def keep_segment(self, index: int) -> None:
        """Clear all but one segment."""
        kept = self.layout.segment(index)
        self.flat[: kept.start].zero_()
        self.flat[kept.stop :].zero_()

    def launch_reduce(self, group: Group, dtype: torch.dtype | None, *, scatter: bool) -> None:
        """Start to sum the buffer, rounded to ``dtype``, over a group. Collective: the group.

        Args:
            group: the replicas.
            dtype: of the message; None: the buffer's dtype.
            scatter: each replica gets its own segment of the sum only.
        """
        self._sent = self.flat if dtype is None else self.flat.to(dtype)
        self.work = group.reduce_scatter_segments(self._sent) if scatter else group.all_reduce(self._sent)

    def wait(self) -> None:
        """Wait for the reduction, and copy the sum into the buffer."""
        assert self.work is not None
        self.work.wait()
        if self._sent is not self.flat:
            self.flat.copy_(self._sent)
        self.cancel()

    def cancel(self) -> None:
        """Forget the running reduction."""
        self.work, self._sent = None, self.flat


def accumulation_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which the gradients of a parameter are summed: at least fp32."""
    return torch.promote_types(parameter.dtype, torch.float32)


def views_in(flat: Tensor, layout: BucketLayout, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of a bucket in the shapes and strides of its parameters, by name."""
    return {
        slot.name: flat.as_strided(
            parameters[slot.name].size(), dense_strides(parameters[slot.name]), flat.storage_offset() + slot.start
        )
        for slot in layout.slots
    }


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's strides if it is dense (fused optimizers require equal strides), else contiguous strides."""
    return torch.empty_like(parameter, device="meta").stride()


def piece_in(flat: Tensor, piece: Piece, parameter: Tensor) -> Tensor:
    """The view of a bucket that a piece is: of the parameter's shape if it is whole, else flat."""
    if piece.is_whole:
        return flat.as_strided(parameter.size(), dense_strides(parameter), flat.storage_offset() + piece.offset)
    return flat[piece.offset : piece.offset + piece.size]


def layout_of(
    parameters: Mapping[str, Tensor],
    group: Group,
    capacity_mib: float,
    *,
    shared: Collection[str] = (),
    indivisible: Collection[str] = (),
    stages: Mapping[str, tuple[int, ...]] | None = None,
) -> ShardLayout:
    """Put the gradients of parameters into buckets, one segment per member of ``group``. Nothing is communicated.

    Args:
        parameters: trainable ones, by name, in the order of the forward.
        group: the replicas.
        capacity_mib: size of a bucket, in MiB.
        shared: those of whose gradients ranks of one replica hold summands.
        indivisible: those that are updated whole.
        stages: the stages of this rank that use each, in order; see :class:`ParameterInfo`.
    """
    infos = {
        name: ParameterInfo(
            parameter.numel(),
            parameter.numel() * accumulation_dtype(parameter).itemsize,
            (str(accumulation_dtype(parameter)), str(parameter.dtype), str(parameter.device)),
            (stages or {}).get(name, ()),
            name not in indivisible,
            name in shared,
        )
        for name, parameter in parameters.items()
    }
    return plan_buckets(infos, capacity_mib * 2**20, group.size, group.rank)
