"""The weights of a rank in flat buckets, of which each replica updates one segment."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from hybridpp.data_parallel.bucket import piece_in, views_in
from hybridpp.data_parallel.layout import BucketLayout, Piece, ShardLayout
from hybridpp.data_parallel.replicas import Replicas


class FlatWeights:
    """Buffers in which the parameters lie like their gradients, so that replicas exchange whole segments.

    Args:
        layout: the buckets.
        parameters: by name, in their working dtypes; may be on the meta device.
        group: the replicas.
        device: of the buffers.
        move: ``move(parameter, view)`` lets a parameter lie in ``view``, with its values if it has any.

    Attributes:
        pieces: views of what this replica updates, by name: flat, or of the parameter's shape if it is whole.
        gathers_where_used: whether whatever computes has gathered the pieces just before.
        parts: functions that take such a piece of a tensor of the parameter's shape, by name.
    """

    gathers_where_used = False

    def __init__(
        self,
        layout: ShardLayout,
        parameters: Mapping[str, nn.Parameter],
        group: Replicas,
        device: torch.device,
        move: Callable[[nn.Parameter, Tensor], None],
    ):
        self._layout, self._group = layout, group
        self._flats: list[Tensor] = []
        self.pieces: dict[str, Tensor] = {}
        self.parts = parts_of(layout, parameters)
        # With the address of the memory that each was given.
        self._addresses: list[tuple[str, nn.Parameter, int]] = []
        for bucket in layout.buckets:
            flat = torch.zeros(bucket.size, dtype=parameters[bucket.slots[0].name].dtype, device=device)
            for name, view in views_in(flat, bucket).items():
                move(parameters[name], view)
            self._hold(bucket, flat, parameters)

    def _hold(self, bucket: BucketLayout, flat: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep a bucket with weights."""
        self._flats.append(flat)
        self._addresses += [(slot.name, p := parameters[slot.name], p.data_ptr()) for slot in bucket.slots]
        self.pieces |= {piece.name: piece_in(flat, piece) for piece in bucket.pieces(self._layout.index)}

    def gather(self) -> None:
        """Fill every weight with the pieces of all replicas. Collective: the group."""
        pending = [self._group.all_gather_segments(flat) for flat in self._flats]
        for work in pending:
            work.wait()

    def moved(self) -> Iterator[str]:
        """Parameters that the script has given other memory."""
        return (name for name, parameter, address in self._addresses if parameter.data_ptr() != address)

    def lost(self, written: Iterable[str]) -> Iterator[str]:
        """Of pieces that the script has written to since :meth:`gather`, those that the other replicas do not have.

        Args:
            written: the names of those that were written.
        """
        return iter(written)


def parts_of(layout: ShardLayout, parameters: Mapping[str, Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    """For each parameter of which this replica has a piece, a function that takes the piece of such a tensor."""
    return {name: partial(_take, piece) for name, piece in layout.pieces.items() if name in parameters}


def _take(piece: Piece, tensor: Tensor) -> Tensor:
    """The piece of a tensor of the parameter's shape: a view, if its memory is in the parameter's order."""
    if piece.is_whole:
        return tensor
    if tensor.stride() != piece.strides:
        ordered = torch.empty_strided(tensor.size(), piece.strides, dtype=tensor.dtype, device=tensor.device)
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())[piece.start : piece.stop]
