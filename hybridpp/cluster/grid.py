"""The rank grid: dp, pp and tp coordinates by arithmetic."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Axis = Literal["dp", "pp", "tp"]


class Coordinate(NamedTuple):
    """A rank's position on each axis."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """Ranks with dp as the outermost and tp as the innermost axis, so that ranks that communicate most are adjacent.

    Example:
        >>> RankGrid(dp_size=2, pp_size=2, tp_size=1).groups("pp")
        ((0, 1), (2, 3))
    """

    dp_size: int
    pp_size: int
    tp_size: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_size * self.pp_size * self.tp_size

    def rank(self, at: Coordinate) -> int:
        """The rank at a coordinate."""
        return (at.dp * self.pp_size + at.pp) * self.tp_size + at.tp

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of a rank."""
        rest, tp = divmod(rank, self.tp_size)
        dp, pp = divmod(rest, self.pp_size)
        return Coordinate(dp, pp, tp)

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only on ``axis``, each in order along the axis."""
        lines: dict[Coordinate, list[int]] = {}
        for rank in range(self.world_size):
            lines.setdefault(self.coordinate(rank)._replace(**{axis: 0}), []).append(rank)
        return tuple(tuple(ranks) for ranks in lines.values())
