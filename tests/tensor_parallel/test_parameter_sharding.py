"""What a rank holds of a parameter, and the whole put together again."""

import pytest
import torch
from torch import nn

from hybridpp.sharding_plan.sharding_spec import DimShard
from hybridpp.tensor_parallel.parameter_sharding import ParameterSharding, divide, sharding_of


def placed(full_shape, dim=0, size=2, parts=None, copies=()):
    return ParameterSharding(
        name="weight", full_shape=full_shape, size=size, shard=DimShard(dim, parts or (full_shape[dim],), copies)
    )


def test_equal_shares_along_a_dimension():
    whole = torch.arange(8).reshape(2, 4)
    assert placed((2, 4), dim=1).take(whole, 1).tolist() == [[2, 3], [6, 7]]
    assert placed((2, 4), dim=0).take(whole, 0).tolist() == [[0, 1, 2, 3]]


def test_parts_are_divided_one_by_one():
    assert placed((8,), parts=(4, 2, 2)).take(torch.arange(8), 1).tolist() == [2, 3, 5, 7]


def test_what_does_not_fit_is_filled_up_with_zeros():
    place = placed((5,), size=4)
    assert place.local_shape == (2,)
    shares = [place.take(torch.arange(1, 6), rank).tolist() for rank in range(4)]
    assert shares == [[1, 2], [3, 4], [5, 0], [0, 0]]


def test_fewer_shares_than_ranks_are_copied():
    place = placed((4,), size=4, copies=(2,))
    assert [place.take(torch.arange(4), rank).tolist() for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [place.counts_on(rank) for rank in range(4)] == [True, False, True, False]


def test_parts_may_be_copied_one_by_one():
    place = placed((10,), size=2, parts=(6, 2, 2), copies=(1, 2, 2))
    shares = [place.take(torch.arange(10), rank) for rank in range(2)]
    assert [share.tolist() for share in shares] == [[0, 1, 2, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9]]
    assert [(copies, view.tolist()) for copies, view in place.replicated_views(shares[1])] == [(2, [6, 7, 8, 9])]
    assert place.unique_mask(shares[0], 0).all()
    assert shares[1][place.unique_mask(shares[1], 1)].tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    "place",
    [
        placed((6, 4), dim=1),
        placed((6, 4), dim=0, size=3),
        placed((7, 3), dim=0, size=4),
        placed((12, 2), dim=0, parts=(8, 2, 2)),
        placed((3, 12), dim=1, parts=(4, 4, 4), size=4),
        placed((4, 3), dim=0, size=4, copies=(2,)),
        placed((2, 3), dim=0, size=2, copies=(2,)),
        placed((2, 12), dim=1, size=4, parts=(8, 2, 2), copies=(1, 4, 2)),
        placed((5,), size=4),
    ],
)
def test_shares_make_the_whole(place):
    whole = torch.randn(place.full_shape)
    shares = [place.take(whole, rank) for rank in range(place.size)]
    assert {tuple(share.shape) for share in shares} == {place.local_shape}
    assert torch.equal(place.join(shares), whole)


def test_a_divided_parameter_stays_the_same_object_and_says_where_it_lies():
    parameter = nn.Parameter(torch.arange(4.0))
    version = parameter
    assert sharding_of(parameter) is None
    divide(parameter, placed((4,)), rank=1)
    assert parameter is version
    assert parameter.tolist() == [2, 3]
    assert parameter.requires_grad
    assert sharding_of(parameter) == placed((4,))
    assert parameter.untyped_storage().nbytes() == 8
