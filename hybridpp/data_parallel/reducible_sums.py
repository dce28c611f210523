"""Sums of gradients whose buckets are taken away and given back: by reductions, ZeRO, and the search for an inf."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from hybridpp.data_parallel.accumulator import GradientAccumulator
from hybridpp.data_parallel.bucket import Bucket
from hybridpp.nn.fp32_products import add_product

# Maximum number of sampled buckets, and of sampled elements in each.
_MAX_SAMPLES = 16


class ReducibleSums(GradientAccumulator):
    """A rank's sums, with what is done to them beside passes that add to them by autograd.

    A step of one replica in one piece calls none of it.
    """

    # Where the samples of each bucket lie, and how many each parameter has.
    _positions: dict[Bucket, tuple[Tensor, list[int]]]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._positions = {}

    def hide(self) -> None:
        """Set exposed ``parameter.grad`` to None, until :meth:`begin`."""
        for parameter in self._exposed.values():
            parameter.grad = None
        self._is_hidden = True

    def lend(self, bucket: Bucket) -> None:
        """Let a reduction have what a bucket holds: the next gradient starts a new sum."""
        self._stale.update(bucket.views)
        for name in self._exposed.keys() & bucket.views.keys():
            self._exposed[name].grad = None

    def set_aside(self, bucket: Bucket) -> None:
        """Keep the reduced sums in a bucket apart; the next gradients start new ones, see :meth:`Bucket.set_aside`."""
        self.zero_stale([bucket])
        for name in self._exposed.keys() & bucket.views.keys():
            # The script has dropped it (module.zero_grad()).
            if not self._is_hidden and self._exposed[name].grad is not self.views[name]:
                self.views[name].zero_()
        bucket.set_aside()
        self.lend(bucket)

    def free(self, bucket: Bucket) -> None:
        """Free the buffer of a bucket whose sum is kept apart."""
        self.lend(bucket)
        bucket.close()

    def mark_written(self, bucket: Bucket) -> None:
        """Note that something wrote to a bucket of zeros, which its version may not show."""
        self._zero_versions[bucket] = -1

    def add_product(self, name: str, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b`` to the fp32 sum of the half-precision parameter ``name``."""
        if name in self._small.waiting:
            # In the order of the calls.
            self.add_collected()
        self._ready(self.bucket_of[name])
        add_product(self.views[name], a, b, keep=name not in self._stale)
        self._stale.discard(name)

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The dtype of the parameter ``name``; None: there is none."""
        return self._parameters[name].dtype if name in self._parameters else None

    def sample(self) -> list[Tensor]:
        """Copies of some elements, at fixed positions in a few buckets."""
        chosen = self.buckets[:: -(-len(self.buckets) // _MAX_SAMPLES) or 1]
        return [bucket.sample(_MAX_SAMPLES) for bucket in chosen]

    def samples_of(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of some elements, evenly spaced, of each of these real sums, the same ones in every call.

        One gather for each bucket.
        """
        found: dict[str, Tensor] = {}
        for bucket in self.buckets:
            sizes = {slot.name: (slot.start, slot.size) for slot in bucket.layout.slots if slot.name in names}
            if not sizes or bucket.flat.is_complex():
                continue
            if bucket not in self._positions:
                ranges = [range(start, start + size, max(1, size // _MAX_SAMPLES)) for start, size in sizes.values()]
                counts = [len(one) for one in ranges]
                at = torch.tensor([index for one in ranges for index in one]).to(bucket.flat.device)
                self._positions[bucket] = at, counts
            at, counts = self._positions[bucket]
            found.update(zip(sizes, torch.split(bucket.flat[at], counts), strict=True))
        return found

    def to_host(self) -> list[tuple[Tensor | None, ...]]:
        """Copies in host memory of all sums and of the segments that are kept apart, and those that are set aside."""
        held = [bucket for bucket in self.buckets if bucket.is_open and not bucket.each_pass]
        self.zero_stale(held)
        return [
            (
                bucket.flat.to("cpu", copy=True) if bucket in held else None,
                bucket.complete().to("cpu", copy=True) if bucket.frees else None,
                bucket.aside,
            )
            for bucket in self.buckets
        ]

    def from_host(self, copies: list[tuple[Tensor | None, ...]]) -> None:
        """Set all sums to what :meth:`to_host` gave."""
        self.zero_stale(self.buckets)
        for bucket, (flat, own, aside) in zip(self.buckets, copies, strict=True):
            bucket.aside = aside
            if flat is None:
                self.free(bucket)
            else:
                bucket.flat.copy_(flat)
            if own is not None:
                bucket.complete().copy_(own)
