"""A flat buffer of gradients, and its reduction over the replicas."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from enum import Enum, auto

import torch
from torch import Tensor

from hybridpp.cluster import Group, Work
from hybridpp.data_parallel.layout import BucketLayout, ParameterInfo, Piece, ShardLayout, plan_buckets
from hybridpp.data_parallel.replicas import HybridReplicas, Replicas


class GradientSharding(Enum):
    """What a replica keeps of the sums of gradients over the replicas.

    Attributes:
        NONE: all of them.
        SCATTERED: its own segments; the memory of the others is kept for the next backward passes (ZeRO 1).
        STEP: its own segments; the memory of the others is freed when the gradients of a step are complete.
        MICROBATCH: its own segments; every bucket is reduced after each backward pass, and its memory is freed.
    """

    NONE = auto()
    SCATTERED = auto()
    STEP = auto()
    MICROBATCH = auto()

    @property
    def frees(self) -> bool:
        """Whether sums are kept apart from the buffers in which gradients arrive."""
        return self in (GradientSharding.STEP, GradientSharding.MICROBATCH)


class Bucket:
    """Some parameters' gradients in one contiguous buffer.

    Args:
        layout: where they lie.
        parameters: by name.
        index: of this replica's segment.
        sharding: what is kept.

    Attributes:
        layout: as given.
        flat: the buffer; it may have no memory, see :meth:`open`.
        views: each parameter's gradient, by name.
        own: the segment that this replica has of the sum over the replicas: in the buffer, or in memory of its own.
        frees: whether that is in memory of its own, so that the buffer can be freed.
        is_open: whether the buffer has memory.
        each_pass: whether it is reduced after each backward pass, so that the sum over passes is in ``own`` only.
            Shared gradients are not, because they are summed over the ranks of this replica before.
        aside: what this replica has of a sum so far, without what was added since; None: all is in the buffer, or in
            ``own``.
        pending: parameters whose gradients the last backward pass does not have complete yet; None: it has not begun.
        work: the running reduction; None: there is none.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Mapping[str, Tensor],
        index: int = 0,
        sharding: GradientSharding = GradientSharding.NONE,
    ):
        first = parameters[layout.slots[0].name]
        make = torch.empty if sharding.frees and not layout.is_shared else torch.zeros
        self.layout = layout
        self.flat = make(layout.size, dtype=accumulation_dtype(first), device=first.device)
        self.views = views_in(self.flat, layout)
        self.each_pass = sharding is GradientSharding.MICROBATCH and not layout.is_shared
        self.pending: set[str] | None = None
        self.work: Work | None = None
        self.own = self._segment = self.flat[layout.segment(index)]
        self.frees, self.is_open = sharding.frees, True
        # Whether ``own`` counts as zero, whatever it holds.
        self._is_zero = False
        self.aside: Tensor | None = None
        self._sent = self.flat
        self._index = index
        # What this replica has of the sum after a reduction.
        self._reduced = self.flat if sharding is GradientSharding.NONE else self._segment
        if sharding.frees:
            self.own = torch.zeros_like(self._segment)
            if not layout.is_shared:  # of whose gradients views are still to be made
                self.close()

    def open(self) -> None:
        """Give the buffer memory, with old values, and zeros between the gradients."""
        if not self.is_open:
            allocate_flat(self.flat)
            for gap in self.layout.gaps():
                self.flat[gap].zero_()
            self.is_open = True

    def close(self) -> None:
        """Free the buffer."""
        free_flat(self.flat)
        self.is_open = False

    def held_tensors(self) -> list[Tensor]:
        """The memory that it has now."""
        return [tensor for tensor in (self.flat, self.own, self.aside) if tensor is not None]

    def sample(self, count: int) -> Tensor:
        """A copy of about ``count`` evenly spaced elements of the gradients and the zero padding between them.

        They are real: of complex gradients real and imaginary parts.
        """
        flat = torch.view_as_real(self.flat).flatten() if self.flat.is_complex() else self.flat
        return flat[:: max(1, flat.numel() // count)].clone()

    def set_aside(self) -> None:
        """Keep what this replica has of the sum; the next reduction adds the sum of what is added from now on.

        What was reduced is not reduced again, so sums over several calls do not depend on which replica has a segment.
        Nor does the kind of the next reduction depend on what is set aside: a script that clears gradients on one
        replica only meets the others, and gets an error.
        """
        if not self.frees:
            self.aside = self._reduced.clone()

    def clear(self) -> None:
        """Let the sum that is kept apart be zero."""
        self.aside, self._is_zero = None, self.frees

    def complete(self) -> Tensor:
        """This replica's segment of the sum, after a reduction."""
        if self._is_zero:
            self.own.zero_()
            self._is_zero = False
        return self.own

    def launch_reduce(self, group: Replicas, dtype: torch.dtype | None, *, scatter: bool) -> None:
        """Start to sum the buffer, rounded to ``dtype``, over a group. Collective: the group.

        Args:
            group: the replicas.
            dtype: of the message; None: the buffer's dtype.
            scatter: each replica gets its own segment of the sum only.
        """
        self._sent = self.flat if dtype is None else self.flat.to(dtype)
        self.work = group.reduce_scatter_segments(self._sent) if scatter else group.all_reduce(self._sent)

    def wait(self) -> None:
        """Wait for the reduction, and copy the sum to where it is kept, or add it to what is kept."""
        assert self.work is not None
        self.work.wait()
        if self.frees:
            part = self._sent[self.layout.segment(self._index)]
            if self._is_zero:
                self.own.copy_(part)
            else:
                self.own.add_(part)
            self._is_zero = False
        else:
            if self._sent is not self.flat:
                self.flat.copy_(self._sent)
            if self.aside is not None:
                self._reduced.add_(self.aside)
                self.aside = None
        self.cancel()

    def cancel(self) -> None:
        """Forget the running reduction."""
        self.work, self._sent = None, self.flat


def allocate_flat(flat: Tensor) -> None:
    """Give a flat tensor, which has its storage for itself, memory again after :func:`free_flat`."""
    flat.untyped_storage().resize_(flat.numel() * flat.itemsize)


def free_flat(flat: Tensor) -> None:
    """Free the memory of a flat tensor. Nothing may read it, or a view of it, before :func:`allocate_flat`.

    Views stay valid, unlike those of a tensor that is replaced by a new one, and so do those that autograd has saved.
    """
    flat.untyped_storage().resize_(0)


def accumulation_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which the gradients of a parameter are summed: at least fp32."""
    return torch.promote_types(parameter.dtype, torch.float32)


def views_in(flat: Tensor, layout: BucketLayout) -> dict[str, Tensor]:
    """Views of a bucket in the shapes and strides of its parameters, by name."""
    return {
        slot.name: flat.as_strided(slot.shape, slot.strides, flat.storage_offset() + slot.start)
        for slot in layout.slots
    }


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's strides if it is dense (fused optimizers require equal strides), else contiguous strides."""
    return torch.empty_like(parameter, device="meta").stride()


def piece_in(flat: Tensor, piece: Piece) -> Tensor:
    """The view of a bucket that a piece is: of the parameter's shape if it is whole, else flat."""
    if piece.is_whole:
        return flat.as_strided(piece.shape, piece.strides, flat.storage_offset() + piece.offset)
    return flat[piece.offset : piece.offset + piece.size]


def layout_of(
    parameters: Mapping[str, Tensor],
    group: Group | HybridReplicas,
    capacity_mib: float,
    *,
    shared: Collection[str] = (),
    indivisible: Collection[str] = (),
    stages: Mapping[str, tuple[int, ...]] | None = None,
    units: Mapping[str, tuple[int, ...]] | None = None,
) -> ShardLayout:
    """Put the gradients of parameters into buckets, a segment for each replica that divides them with others.

    Nothing is communicated.

    Args:
        parameters: trainable ones, by name, in the order of the forward.
        group: the replicas.
        capacity_mib: size of a bucket, in MiB.
        shared: those of whose gradients ranks of one replica hold summands.
        indivisible: those that are updated whole.
        stages: the stages of this rank that use each, in order; see :class:`ParameterInfo`.
        units: the units of this rank that use each, in order, if weights are gathered by unit.
    """
    infos = {
        name: ParameterInfo(
            parameter.numel(),
            parameter.numel() * accumulation_dtype(parameter).itemsize,
            (str(accumulation_dtype(parameter)), str(parameter.dtype), str(parameter.device)),
            (stages or {}).get(name, ()),
            name not in indivisible,
            name in shared,
            tuple(parameter.shape),
            dense_strides(parameter),
            (units or {}).get(name, ()),
        )
        for name, parameter in parameters.items()
    }
    shards = group.shards if isinstance(group, HybridReplicas) else group
    layout = plan_buckets(infos, capacity_mib * 2**20, shards.size, shards.rank)
    return replace(layout, counts=not isinstance(group, HybridReplicas) or group.copies.rank == 0)
