"""The grid of ranks, and this rank's process groups."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from weakref import ref

import torch

from hybridpp.cluster import Axis, Coordinate, Group, RankGrid, World
from hybridpp.data_parallel import HybridReplicas
from hybridpp.errors import ConfigError
from hybridpp.pipeline import StageManager


@dataclass(frozen=True)
class Layout:
    """The job's ranks as a grid, with the groups that this rank is in.

    Attributes:
        world: all ranks.
        grid: the coordinates of all ranks.
        here: this rank's coordinate.
        control: all ranks, for small host tensors.
        tp: this rank's tensor-parallel ranks.
        pp: the ranks of this rank's pipeline, by position. It carries all activations and gradients.
        dp: the ranks that hold the same stage of other replicas.
    """

    world: World
    grid: RankGrid
    here: Coordinate
    control: Group
    tp: Group
    pp: Group
    dp: Group
    # In order of creation, the same on all ranks.
    _groups: list[ref[Group]] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def create(cls, world: World, grid: RankGrid) -> "Layout":
        """Create the groups. Collective: all ranks of ``world``."""
        groups: list[ref[Group]] = []

        def along(axis: Axis) -> Group:
            group = world.split(grid.groups(axis), axis, point_to_point=axis == "pp")
            assert group is not None, "every rank is in one group of each axis"
            groups.append(ref(group))
            return group

        layout = cls(
            world=world,
            grid=grid,
            here=grid.coordinate(world.rank),
            control=world.control(),
            tp=along("tp"),
            pp=along("pp"),
            dp=along("dp"),
            _groups=groups,
        )
        # Groups of a plugin that no longer exists and had another layout.
        world.release_unused()
        return layout

    def check_carried(self, device: torch.device) -> None:
        """Refuse a device whose tensors the job's backend does not communicate.

        Raises:
            ConfigError: with what to change.
        """
        if not self.world.carries(device):
            raise ConfigError(
                f"the job's backend communicates tensors of other devices: got device={str(device)!r} in a job of "
                f"{self.world.size} ranks. Leave device out of Booster to compute on {self.world.device}, or join the "
                'job with backend="gloo".'
            )

    def connect(self, device: torch.device, placement: Sequence[int]) -> None:
        """Use every connection of this rank once, in one order on all ranks. Collective: all ranks of the world.

        NCCL makes the communicator of a group, or of a pair of its ranks, at its first use, for which the host waits.
        In a step, that would take time, and could delay a message that other ranks wait for.

        Args:
            device: of what is communicated in a step.
            placement: the pipeline position of every stage.
        """
        token = torch.zeros(1, device=device)
        for group in (found for reference in self._groups if (found := reference()) is not None):
            if group is not self.pp and group.size > 1:
                group.all_reduce(token).wait()
        own = self.pp.rank
        for pair in dict.fromkeys(tuple(sorted(pair)) for pair in pairwise(placement) if len(set(pair)) == 2):
            for source, target in (pair, pair[::-1]):
                if own == source:
                    self.pp.send(token, target).wait()
                elif own == target:
                    self.pp.receive(token, source).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    @property
    def num_collectives(self) -> int:
        """How many this rank has begun in its groups."""
        return sum(group.num_collectives for reference in self._groups if (group := reference()) is not None)

    def close(self) -> None:
        """Release all groups that no other layout uses. Collective: all ranks of the world."""
        self.world.release([group for reference in self._groups if (group := reference()) is not None])

    def _split(self, lists: Sequence[Sequence[int]], name: str) -> Group | None:
        group = self.world.split(lists, name)
        if group is not None:
            self._groups.append(ref(group))
        return group

    @cached_property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that work on the same batch, group by group, ordered by replica."""
        ranks_of: dict[int, list[int]] = {}
        for rank in range(self.grid.world_size):
            ranks_of.setdefault(self.grid.coordinate(rank).dp, []).append(rank)
        return tuple(tuple(ranks) for ranks in ranks_of.values())

    def rank_of(self, replica: int, position: int) -> int:
        """The first tensor-parallel rank at a pipeline position of a replica."""
        return self.grid.rank(Coordinate(replica, position, 0))

    def ranks_at(self, replica: int, position: int) -> tuple[int, ...]:
        """The tensor-parallel ranks at a pipeline position of a replica."""
        return tuple(self.grid.rank(Coordinate(replica, position, tp)) for tp in range(self.grid.tp_size))

    def stage_manager(self, placement: tuple[int, ...]) -> StageManager:
        """This rank's position in its pipeline, whose stages are on the positions ``placement``."""
        return StageManager(self.here.pp, self.pp.ranks, placement)

    def groups_within_pipelines(self, position_sets: list[tuple[int, ...]]) -> dict[tuple[int, ...], Group]:
        """For each set of pipeline positions, the group of the ranks there; only the groups that this rank is in.

        Collective: all ranks of the world, with the same sets.
        """
        groups: dict[tuple[int, ...], Group] = {}
        for positions in position_sets:
            group = self._split(
                [[line[position] for position in positions] for line in self.grid.groups("pp")], "pp, shared weights"
            )
            if group is not None:
                groups[positions] = group
        return groups

    def replicas(self, num_shards: int) -> Group | HybridReplicas:
        """The replicas, in sets of neighbours that divide gradients and weights among themselves.

        Collective: all ranks of the world, with the same number.

        Args:
            num_shards: replicas of a set; it divides their number.
        """
        if num_shards == self.dp.size:
            return self.dp
        lines = self.grid.groups("dp")
        copies = self._split([line[n::num_shards] for line in lines for n in range(num_shards)], "dp, copies")
        shards = self._split(self._sets(num_shards), "dp, shards")
        assert copies is not None, "every rank is in one of them"
        assert shards is not None, "every rank is in one of them"
        return HybridReplicas(self.dp, shards, copies)

    def dp_weights(self, num_shards: int) -> Group:
        """This rank's set of replicas again, for weights: their order and that of gradients may differ by replica.

        Collective: all ranks of the world, with the same number.

        Args:
            num_shards: replicas of a set.
        """
        group = self._split(self._sets(num_shards), "dp, weights")
        assert group is not None, "every rank is in one of them"
        return group

    def _sets(self, size: int) -> list[tuple[int, ...]]:
        """The ranks of each set of neighbouring replicas that hold the same part of the model."""
        lines = self.grid.groups("dp")
        return [line[start : start + size] for line in lines for start in range(0, len(line), size)]

    def group_of_copies(self, size: int) -> Group:
        """This rank's group of ``size`` consecutive tensor-parallel ranks.

        Collective: all ranks of the world, with the same size.
        """
        lines = self.grid.groups("tp")
        neighbours = [line[start : start + size] for line in lines for start in range(0, len(line), size)]
        group = self._split(neighbours, "tp, copies")
        assert group is not None, "every rank is in one of them"
        return group
