"""How a model is sharded over the ranks of a tensor-parallel group: one description for plans, search and runtime."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridpp.nn.names import qualified


class Narrowable(Protocol):
    """A full tensor, in memory or in a file, of which ranges can be read."""

    def narrow(self, dim: int, start: int, length: int, /) -> Tensor:
        """As ``torch.narrow``."""


@dataclass(frozen=True)
class DimShard:
    """How one dimension of a tensor is divided over ``size`` ranks.

    Attributes:
        dim: the dimension.
        widths: sizes of the pieces along it, each of which is divided evenly: one, or several in a fused layer.
        copies: for each piece, how many neighbouring ranks hold the same shard: more than one where there are fewer
            heads than ranks. Empty: one for all pieces.
        repeated: whether the pieces follow each other again and again (the heads of the first sample, of the second,
            …), in an activation that is flattened with the batch.

    The ranks' shards of a piece that ``size`` does not divide have the size of the largest one: the last are padded
    with zeros.

    Example:
        >>> DimShard(0, (4, 4)).take(torch.arange(8), rank=1, size=2)
        tensor([2, 3, 6, 7])
    """

    dim: int
    widths: tuple[int, ...]
    copies: tuple[int, ...] = ()
    repeated: bool = False

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Width and number of copies of each piece."""
        return zip(self.widths, self.copies or (1,) * len(self.widths), strict=True)

    def divides(self, size: int) -> bool:
        """Whether all ranks' shards have one size, without padding."""
        return all(size % copies == 0 and width % (size // copies) == 0 for width, copies in self.pieces())

    def local_widths(self, size: int) -> tuple[int, ...]:
        """The size of a rank's shard of each piece, padding included."""
        return tuple(-(-width * copies // size) for width, copies in self.pieces())

    def index(self, rank: int, size: int, length: int) -> Tensor:
        """The positions that a rank holds along a dimension of ``length``, without padding."""
        positions, start = [], 0
        for width, copies in self.pieces():
            own = width * copies // size
            first = start + rank // copies * own
            positions.append(torch.arange(first, first + own))
            start += width
        once = torch.cat(positions)
        return torch.cat([once + start * turn for turn in range(length // start)]) if self.repeated else once

    def select(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """A rank's shard of an activation, without padding; a gradient flows back to the rank's positions."""
        return tensor.index_select(self.dim, self.index(rank, size, tensor.shape[self.dim]).to(tensor.device))

    def take(self, full: Narrowable, rank: int, size: int, *, allow_view: bool = False) -> Tensor:
        """A rank's shard of a full tensor, padded; nothing else of ``full`` is read.

        Args:
            full: the tensor.
            rank: in the group.
            size: of the group.
            allow_view: return a view where the shard is one range. Else it is contiguous, in memory of its own.
        """
        pieces = []
        ends = accumulate(self.widths)
        for (piece, copies), end, width in zip(self.pieces(), ends, self.local_widths(size), strict=True):
            start = min(rank // copies * width, piece)
            own = full.narrow(self.dim, end - piece + start, min(width, piece - start))
            pieces.append(own)
            if own.shape[self.dim] < width:
                shape = [*own.shape]
                shape[self.dim] = width - own.shape[self.dim]
                pieces.append(own.new_zeros(shape))
        return pieces[0] if allow_view and len(pieces) == 1 else torch.cat(pieces, self.dim)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor, from the shards of all ranks in order; padding is left out."""
        widths = self.local_widths(len(shards))
        pieces = []
        for (piece, copies), end, width in zip(self.pieces(), accumulate(widths), widths, strict=True):
            own = [shard.narrow(self.dim, end - width, width) for shard in shards[::copies]]
            pieces.append(torch.cat(own, self.dim).narrow(self.dim, 0, piece))
        return torch.cat(pieces, self.dim)


@dataclass(frozen=True, kw_only=True)
class ShardingSpec:
    """How a model, or a block of one, is sharded; parameters and modules by their names in it.

    Activations are replicated (all ranks hold the same) except between the modules that ``copy_inputs`` or
    ``copy_outputs`` name and those that ``reduce_outputs`` names: there each rank holds its shard.

    Attributes:
        params: how parameters are divided.
        copy_inputs: modules with replicated inputs and sharded outputs: gradients of the inputs are all-reduced.
        copy_outputs: modules whose replicated outputs are read both by sharded and by replicated computations: the
            gradients from the sharded ones are all-reduced.
        reduce_outputs: modules whose outputs are summands: they are all-reduced (row layers; embeddings divided by
            vocabulary; all experts of a layer).
        gather_outputs: linear layers divided by their outputs, which are gathered where they are read (heads).
        rank0_only: parameters of which ranks other than 0 use zeros, because they are added before a sum.
        partial_grad: replicated parameters that are used on sharded activations: their gradients are sums over ranks.
        attributes: new values of modules' attributes, by the module's and the attribute's name; ``config.num_heads``
            is an attribute of the module's configuration, of which the module gets a copy.
        arguments: arguments of which a module gets this rank's shard, by the module's name and the argument's index
            among all leaves of the call; their gradients are all-reduced.
        results: results that a module computes a shard of (attention probabilities), by name and index among the
            leaves; they are gathered.
        gather_inputs: replicated modules with sharded inputs and outputs (norms over the width of all heads): how the
            last dimension of those is divided. Inputs are gathered.
        local_width_args: full widths of arguments, by name and index among the leaves, that modules get narrowed to
            the width of a rank's shard, because they compute with the shape; linear layers inside get them in full.
    """

    params: Mapping[str, DimShard] = field(default_factory=dict)
    copy_inputs: frozenset[str] = frozenset()
    copy_outputs: frozenset[str] = frozenset()
    reduce_outputs: frozenset[str] = frozenset()
    gather_outputs: frozenset[str] = frozenset()
    rank0_only: frozenset[str] = frozenset()
    partial_grad: frozenset[str] = frozenset()
    attributes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    arguments: Mapping[tuple[str, int], DimShard] = field(default_factory=dict)
    results: Mapping[tuple[str, int], DimShard] = field(default_factory=dict)
    gather_inputs: Mapping[str, DimShard] = field(default_factory=dict)
    local_width_args: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def holders(self) -> dict[str, None]:
        """The modules that hold divided parameters, in order."""
        return dict.fromkeys(name.rpartition(".")[0] for name in self.params)

    def __or__(self, other: "ShardingSpec") -> "ShardingSpec":
        """The union; where both have a name, ``other`` counts."""
        both: Any = {item.name: getattr(self, item.name) | getattr(other, item.name) for item in fields(self)}
        return ShardingSpec(**both)

    def inside(self, prefix: str) -> "ShardingSpec":
        """The same for a module that is the submodule ``prefix`` of another one."""
        return self.renamed(lambda name: qualified(prefix, name))

    def of_block(self, block: str) -> "ShardingSpec":
        """The part of the spec for the submodule ``block``, with names inside of it."""

        def inner(name: str) -> str | None:
            return name.removeprefix(block).removeprefix(".") if f"{name}.".startswith(f"{block}.") else None

        return self.renamed(inner if block else lambda name: name)

    def of_module(self, name: str, parameters: Iterable[str]) -> "ShardingSpec":
        """What the spec does to one module, without those inside of it, and to its own ``parameters``."""
        own = {name: "", **{qualified(name, key): key for key in parameters}}
        return self.renamed(own.get)

    def renamed(self, rename: Callable[[str], str | None]) -> "ShardingSpec":
        """With other names; None: left out. Names that become equal must say the same."""

        def key(old: Any) -> Any:
            if isinstance(old, str):
                return rename(old)
            name = rename(old[0])
            return None if name is None else (name, *old[1:])

        def renamed(values: Any) -> Any:
            new = {old: key(old) for old in values}
            kept = {old: name for old, name in new.items() if name is not None}
            if isinstance(values, Mapping):
                return {name: values[old] for old, name in kept.items()}
            return frozenset(kept.values())

        every: Any = {item.name: renamed(getattr(self, item.name)) for item in fields(self)}
        return ShardingSpec(**every)
