"""This rank's groups."""

from dataclasses import dataclass

from hybridpp.cluster import Axis, Coordinate, Group, RankGrid, World
from hybridpp.pipeline import Lanes, StageManager


@dataclass(frozen=True)
class Layout:
    """The job's ranks as a grid, with the groups that this rank is in.

    Attributes:
        world: all ranks.
        grid: where each of them sits.
        here: where this one sits.
        control: all ranks, for small host tensors.
        tp: the ranks that share this rank's layers.
        pp: the ranks of this rank's pipeline, by stage.
        activations: the same ranks; carries activations.
        gradients: the same ranks; carries gradients.
        dp: the ranks that hold the same stage of other replicas.
    """

    world: World
    grid: RankGrid
    here: Coordinate
    control: Group
    tp: Group
    pp: Group
    activations: Lanes
    gradients: Lanes
    dp: Group

    @classmethod
    def create(cls, world: World, grid: RankGrid, placement: tuple[int, ...]) -> "Layout":
        """The groups for stages on the ranks of ``placement``. Collective: all ranks of ``world``."""

        def along(axis: Axis) -> Group:
            group = world.split(grid.groups(axis))
            assert group is not None, "every rank is in one group of each axis"
            return group

        pp, up = along("pp"), along("pp")
        # Where stages come back to a rank, messages of a kind go both ways. A group costs a thread of gloo's, and a
        # communicator of NCCL's, so there are no more than that takes.
        one_way = list(placement) == sorted(placement)
        return cls(
            world=world,
            grid=grid,
            here=grid.coordinate(world.rank),
            control=world.control(),
            tp=along("tp"),
            pp=pp,
            activations=Lanes(pp, pp if one_way else along("pp")),
            gradients=Lanes(up, up if one_way else along("pp")),
            dp=along("dp"),
        )

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that work on the same batch, group by group, ordered by replica."""
        ranks_of: dict[int, list[int]] = {}
        for rank in range(self.grid.world_size):
            ranks_of.setdefault(self.grid.coordinate(rank).dp, []).append(rank)
        return tuple(tuple(ranks) for ranks in ranks_of.values())

    def rank_of(self, replica: int, place: int) -> int:
        """The rank that speaks for a place in the pipeline of a replica: the first of those that share its layers."""
        return self.grid.rank(Coordinate(replica, place, 0))

    def stage_manager(self, placement: tuple[int, ...]) -> StageManager:
        """This rank's place in its pipeline, whose stages are on the ranks of ``placement``."""
        return StageManager(self.here.pp, self.pp.ranks, placement)

    def groups_within_pipelines(self, places: list[tuple[int, ...]]) -> dict[tuple[int, ...], Group]:
        """For each set of places in a pipeline, the group of the ranks there; only the groups this rank is in.

        Collective: all ranks of the world, with the same sets.
        """
        groups: dict[tuple[int, ...], Group] = {}
        for chosen in places:
            group = self.world.split([[line[place] for place in chosen] for line in self.grid.groups("pp")])
            if group is not None:
                groups[chosen] = group
        return groups

    def group_of_copies(self, size: int) -> Group:
        """The ``size`` neighbours among the ranks that share layers that this rank is one of.

        Collective: all ranks of the world, with the same size.
        """
        lines = self.grid.groups("tp")
        group = self.world.split([line[start : start + size] for line in lines for start in range(0, len(line), size)])
        assert group is not None, "every rank is in one"
        return group
