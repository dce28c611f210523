from itertools import product

from covering import one_test_for

from hybridpp.cluster import Coordinate, RankGrid

GRIDS = [RankGrid(dp_size=dp, pp_size=pp, tp_size=tp) for dp, pp, tp in product([1, 2, 3], [1, 2, 4], [1, 2])]


def test_groups_of_two_replicas_of_two_stages_of_two_shards():
    grid = RankGrid(dp_size=2, pp_size=2, tp_size=2)
    assert grid.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))


@one_test_for("grid", GRIDS)
def test_ranks_and_coordinates_are_each_others_inverse(grid):
    coordinates = [grid.coordinate(rank) for rank in range(grid.world_size)]
    assert coordinates == [
        Coordinate(*at) for at in product(range(grid.dp_size), range(grid.pp_size), range(grid.tp_size))
    ]
    assert [grid.rank(at) for at in coordinates] == list(range(grid.world_size))


@one_test_for("axis", ["dp", "pp", "tp"])
@one_test_for("grid", GRIDS)
def test_groups_of_an_axis_partition_the_ranks_and_vary_only_on_that_axis(grid, axis):
    groups = grid.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    for group in groups:
        at = [grid.coordinate(rank) for rank in group]
        assert [getattr(place, axis) for place in at] == list(range(getattr(grid, f"{axis}_size")))
        assert len({place._replace(**{axis: 0}) for place in at}) == 1
