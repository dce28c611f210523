"""Sums of gradients of which every replica has its segments (ZeRO)."""

from collections.abc import Sequence

from torch import Tensor

from hybridpp.data_parallel.bucket import Bucket, piece_in, views_in
from hybridpp.data_parallel.replicas import Replicas


class ScatteredSums:
    """The sums after a reduction that scatters them.

    Args:
        buckets: of this rank.
        index: of this replica's segments.
        group: the replicas.

    Attributes:
        pieces: views of this replica's pieces of parameters' gradients, by name.
    """

    def __init__(self, buckets: Sequence[Bucket], index: int, group: Replicas):
        self._buckets, self._index, self._group = buckets, index, group
        self.pieces = {
            piece.name: piece_in(bucket.own, piece)
            for bucket in buckets
            for piece in bucket.layout.pieces_within(index)
        }

    def gather(self) -> dict[str, Tensor]:
        """The complete sums, by name. Collective: all replicas of this stage."""
        complete: dict[str, Tensor] = {}
        for bucket in self._buckets:
            flat = bucket.flat
            if bucket.frees:
                flat = bucket.own.new_zeros(bucket.layout.size)
                flat[bucket.layout.segment(self._index)] = bucket.complete()
            self._group.all_gather_segments(flat).wait()
            complete |= views_in(flat, bucket.layout) if bucket.frees else bucket.views
        return complete
