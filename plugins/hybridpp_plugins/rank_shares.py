"""What a rank holds of the full tensors of its model, as boxes: the same words for every layout."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpp.checkpoint.boxes import Box, Region, full_box, range_boxes, shard_regions
from hybridpp.cluster import gather_objects
from hybridpp.errors import CheckpointError
from hybridpp_plugins.apply_tp import placements
from hybridpp_plugins.engine import Engine


class HeldWeight(NamedTuple):
    """A tensor of the model's state on this rank.

    Attributes:
        name: in the complete model.
        tensor: with its values in full precision: a master, a piece of one, or the tensor itself.
        is_trained: whether the optimizer updates it.
    """

    name: str
    tensor: Tensor
    is_trained: bool


class RankShares:
    """Boxes of a rank's tensors.

    Args:
        engine: of the model.
        buffer_position: the pipeline position that writes each buffer.
        divided: whether the tensors are what this replica updates; False: all replicas have all of them.
        divides_writing: whether each replica writes some of the parameters that all have; False: the first writes all.
    """

    def __init__(
        self,
        engine: Engine,
        buffer_position: Mapping[str, int],
        *,
        divided: bool = True,
        divides_writing: bool = False,
    ):
        self._layout = engine.layout
        self._parameters = dict(engine.model.named_parameters())
        self._sharded = placements(engine.model)
        self._position = {name: ranks[0] for name, ranks in engine.weights.ranks_of.items()} | dict(buffer_position)
        # Only where replicas divide the parameters: else every replica updates all of them.
        layout = engine.weights.layout if engine.zero_stage and divided else None
        pieces = {} if layout is None else layout.pieces
        sharded = engine.weights.sharded if divided else None
        # Of replicas that have the same segments, those of the first set write.
        self._counts = layout is not None and layout.counts
        self._pieces = {**pieces, **(sharded.frozen_pieces if sharded else {})}
        trained = engine.weights.parameters if layout is not None else ()
        self._divided = frozenset((*trained, *(name for name in self._parameters if sharded and sharded.holds(name))))
        num_writers = engine.layout.dp.size if divides_writing else 1
        # With two moments each; where a parameter is on several positions, the first one writes it.
        sizes = {
            name: parameter.numel() * (3 if parameter.requires_grad else 1)
            for name, parameter in self._parameters.items()
            if self._position[name] == engine.layout.here.pp
        }
        self._writers = _evenly(sizes, num_writers) if num_writers > 1 else {}

    def full_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """The shape that a parameter, or a buffer ``tensor``, has in the complete model."""
        if name in self._sharded:
            return self._sharded[name].full_shape
        return tuple(self._parameters.get(name, tensor).shape)

    def has_all(self, name: str) -> bool:
        """Whether this rank updates all of the complete model's parameter."""
        return name not in self._sharded and (name not in self._divided or self._pieces[name].is_whole)

    def writes(self, name: str) -> bool:
        """Whether this rank writes its parts of a tensor; of ranks that hold the same, the first does."""
        layout = self._layout
        is_first_replica = self._counts if name in self._divided else layout.here.dp == self._writers.get(name, 0)
        return (
            is_first_replica
            and self._position[name] == layout.here.pp
            and (layout.here.tp == 0 or name in self._sharded)
        )

    def parts(self, name: str, tensor: Tensor, *, to_write: bool = False) -> list[tuple[Box, Tensor]]:
        """Boxes of the full tensor that a tensor of this rank holds, each with a view.

        Args:
            name: of the parameter or buffer.
            tensor: what this rank updates of it, or a tensor of the same shape (a moment).
            to_write: leave out what another rank writes.

        Raises:
            CheckpointError: it is sparse.
        """
        if tensor.layout is not torch.strided:
            raise CheckpointError(
                f"{name} is a tensor of {tensor.layout}, which safetensors files cannot hold. Make it dense, or "
                "register it with persistent=False and make it again when the model is made."
            )
        if to_write and not self.writes(name):
            return []
        tensor, regions = tensor.detach(), self._regions(name, tensor, to_write)
        if name not in self._divided or self._pieces[name].is_whole:
            return [(region.box, tensor[Box(region.local, region.box.shape).slices]) for region in regions]
        return [
            (part.box, view[Box(part.local, part.box.shape).seen_from(box.start).slices])
            for box, view in self._boxes_of_piece(name, tensor)
            for region in regions
            if (part := region.inside(box)) is not None
        ]

    def _regions(self, name: str, tensor: Tensor, first_copies: bool) -> list[Region]:
        """The parts of the full tensor that this rank's shard of it has."""
        sharding = self._sharded.get(name)
        if sharding is None:
            shape = self.full_shape(name, tensor)
            return [Region(full_box(shape), (0,) * len(shape))]
        pieces, tp = list(sharding.shard.pieces()), self._layout.tp
        return shard_regions(sharding.full_shape, sharding.dim, pieces, tp.rank, tp.size, first_copies=first_copies)

    def _boxes_of_piece(self, name: str, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """The boxes of this rank's shard that a flat piece has, each with a view of its shape."""
        parameter, piece = self._parameters[name], self._pieces[name]
        order = sorted(range(parameter.dim()), key=lambda dim: -piece.strides[dim])
        back = [order.index(dim) for dim in range(parameter.dim())]
        start = 0
        for box in range_boxes(tuple(parameter.shape), order, piece.start, piece.stop):
            ordered = flat[start : start + box.size].view([box.shape[dim] for dim in order])
            yield box, ordered.permute(back)
            start += box.size


def _evenly(sizes: Mapping[str, int], num_bins: int) -> dict[str, int]:
    """The bin of each name, so that the sums of sizes are about equal: the largest first, to the emptiest."""
    filled = [0] * num_bins
    bins = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        bins[name] = filled.index(min(filled))
        filled[bins[name]] += sizes[name]
    return bins


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is what a module returns from ``get_extra_state``."""
    return name.rpartition(".")[2] == "_extra_state"


def state_of(engine: Engine) -> dict[str, Any]:
    """The model's state dict; of weights that replicas divide, with the shapes only."""
    with engine.weights.internal():
        return engine.model.state_dict()


def held_weights(engine: Engine) -> list[HeldWeight]:
    """The tensors of this rank's model, of trained ones what it updates; those that other replicas update are missing.

    Aliases are left out, what is no tensor, and what ``get_extra_state`` returns.
    """
    masters = engine.masters.masters
    updated: Mapping[str, Tensor] = (
        {name: masters.get(name, parameter) for name, parameter in engine.weights.parameters.items()}
        if engine.optimizer is None
        else engine.optimizer.target.tensors
    )
    held = []
    sharded = engine.weights.sharded
    own_parts = sharded.own_parts() if sharded else {}
    for name, tensor in state_of(engine).items():
        if name in engine.original.aliases or not isinstance(tensor, Tensor) or is_extra_state(name):
            continue
        if sharded and name not in engine.weights.parameters and sharded.holds(name):
            held += [HeldWeight(name, own_parts[name], False)] if name in own_parts else []
        elif name not in engine.weights.parameters:
            held.append(HeldWeight(name, tensor, False))
        elif name in updated:
            held.append(HeldWeight(name, updated[name], True))
    return held


class BufferOwners(NamedTuple):
    """Who writes buffers.

    Attributes:
        position: the pipeline position that writes each of the complete model's buffers: that of the last stage, which
            runs all container code, if it has it, else the first.
        differing: this rank's buffers that are not those of the first replica.
    """

    position: dict[str, int]
    differing: frozenset[str]


def find_buffer_owners(engine: Engine, call: str, digest_of: Callable[[Tensor], str] | None) -> BufferOwners:
    """Find out who writes buffers, and which replicas have buffers of their own. Collective: all ranks.

    Args:
        engine: of the model.
        call: that this rank is in.
        digest_of: gives a text that differs where values differ; None: they are not compared.
    """
    here, parameters = engine.layout.here, dict(engine.model.named_parameters())
    buffers = {held.name: held.tensor for held in held_weights(engine) if held.name not in parameters}
    compared = {name for name, tensor in buffers.items() if tensor.layout is torch.strided}  # others are refused
    own = {name: digest_of(buffers[name]) if digest_of and name in compared else "" for name in buffers}
    rows = gather_objects(engine.layout.control, call, [here.dp, here.pp, here.tp, own])
    last = engine.planner.placement[-1]
    by_precedence = sorted(rows, key=lambda row: (row[1] == last, -row[1]))
    position = {name: pp for dp, pp, tp, names in by_precedence if dp == tp == 0 for name in names}
    (of_first_replica,) = (names for dp, pp, tp, names in rows if (dp, pp, tp) == (0, here.pp, here.tp))
    return BufferOwners(position, frozenset(name for name in own if own[name] != of_first_replica[name]))
