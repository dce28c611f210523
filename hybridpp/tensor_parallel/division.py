"""How a block is divided, parameter by parameter and module by module: more than styles of layers can say."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """What a rank has of one parameter (or of another tensor that is divided like one).

    Attributes:
        dim: along which it is divided.
        widths: of the pieces along it that are each divided evenly; one where it is not fused.
        copies: of each piece, how many neighbouring ranks share a part: more than one where there are fewer heads than
            ranks. Empty: one for all.
        repeated: whether the pieces follow each other again and again (heads of the first sample, of the second, …).
    """

    dim: int
    widths: tuple[int, ...]
    copies: tuple[int, ...] = ()
    repeated: bool = False

    def index(self, rank: int, tp_size: int, size: int) -> Tensor:
        """Places that this rank has along a dimension of ``size``."""
        places, start = [], 0
        for width, copies in zip(self.widths, self.copies or (1,) * len(self.widths), strict=True):
            own = width * copies // tp_size
            first = start + rank // copies * own
            places.append(torch.arange(first, first + own))
            start += width
        once = torch.cat(places)
        return torch.cat([once + start * turn for turn in range(size // start)]) if self.repeated else once

    def divides(self, tp_size: int) -> bool:
        """Whether every rank's part has the same size."""
        copies = self.copies or (1,) * len(self.widths)
        return all(tp_size % c == 0 and w % (tp_size // c) == 0 for w, c in zip(self.widths, copies, strict=True))

    def of(self, tensor: Tensor, rank: int, tp_size: int) -> Tensor:
        """A rank's part of a tensor."""
        return tensor.index_select(self.dim, self.index(rank, tp_size, tensor.shape[self.dim]).to(tensor.device))


@dataclass(frozen=True)
class Division:
    """How one block is divided; everything by names inside the block.

    Attributes:
        parts: of parameters, by the parameter's name.
        enters: modules whose inputs are whole and whose gradients are summed: what comes after is divided.
        spreads: the same of modules whose outputs are whole, and are used both on divided activations and elsewhere.
        sums: modules whose outputs are summands.
        first_only: parameters that only one rank may add: biases behind a sum.
        attributes: what attributes of modules become, by the module's and the attribute's name; ``config.num_heads`` is
            that of the configuration which the module holds, and of which it gets a copy.
        arguments: what a rank takes of the arguments of a module, by its name and their number among the leaves.
        results: what a rank makes of the results of a module (attention probabilities of its heads); outside of it
            they are whole.
        joins: modules between divided layers that are whole (a norm over the width of all heads): how what they are
            given and what they return lies on the ranks, in the last dimension.
        narrows: widths of arguments of modules, by name and number among the leaves, which these are to see as wide as
            a rank's part, because they compute with the shapes; layers inside see them whole.
    """

    parts: Mapping[str, Part] = field(default_factory=dict)
    enters: frozenset[str] = frozenset()
    spreads: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()
    first_only: frozenset[str] = frozenset()
    attributes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    arguments: Mapping[tuple[str, int], Part] = field(default_factory=dict)
    results: Mapping[tuple[str, int], Part] = field(default_factory=dict)
    joins: Mapping[str, Part] = field(default_factory=dict)
    narrows: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def narrow_modules(self) -> dict[str, dict[int, int]]:
        """``narrows`` by module."""
        found: dict[str, dict[int, int]] = {}
        for (name, number), width in self.narrows.items():
            found.setdefault(name, {})[number] = width
        return found

    def __or__(self, other: "Division") -> "Division":
        """Both."""
        return Division(
            {**self.parts, **other.parts},
            self.enters | other.enters,
            self.spreads | other.spreads,
            self.sums | other.sums,
            self.first_only | other.first_only,
            {**self.attributes, **other.attributes},
            {**self.arguments, **other.arguments},
            {**self.results, **other.results},
            {**self.joins, **other.joins},
            {**self.narrows, **other.narrows},
        )

    def inside(self, prefix: str) -> "Division":
        """The same, of a module that is the submodule ``prefix`` of another one."""

        def longer(name: str) -> str:
            return ".".join(part for part in (prefix, name) if part)

        return Division(
            {longer(name): part for name, part in self.parts.items()},
            frozenset(map(longer, self.enters)),
            frozenset(map(longer, self.spreads)),
            frozenset(map(longer, self.sums)),
            frozenset(map(longer, self.first_only)),
            {(longer(name), key): value for (name, key), value in self.attributes.items()},
            {(longer(name), number): part for (name, number), part in self.arguments.items()},
            {(longer(name), number): part for (name, number), part in self.results.items()},
            {longer(name): part for name, part in self.joins.items()},
            {(longer(name), number): width for (name, number), width in self.narrows.items()},
        )
