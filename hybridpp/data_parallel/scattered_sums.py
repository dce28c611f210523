"""Sums of gradients of which every replica has its segments (ZeRO)."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from hybridpp.data_parallel.bucket import Bucket, piece_in, views_in
from hybridpp.data_parallel.replicas import Replicas
from hybridpp.errors import ConfigError


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

    def refuse_grads(self, parameters: Mapping[str, nn.Parameter], views: Mapping[str, Tensor]) -> None:
        """Refuse a ``parameter.grad`` that the script has set, since this replica has only its part of the sum.

        Args:
            parameters: by name.
            views: of the complete sums, by name.

        Raises:
            ConfigError: there is one.
        """
        for name, parameter in parameters.items():
            if parameter.grad is not None and parameter.grad is not views[name]:
                raise ConfigError(
                    f"{name}.grad was set between the backward pass and optimizer.step(): with ZeRO each replica has a "
                    "part of every gradient only, so it would not be used. Call optimizer.clip_grad_by_norm or "
                    "clip_grad_by_value, change the loss, or use zero_stage=0."
                )
