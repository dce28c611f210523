"""A share of the bytes, by whole buckets, the last ones first."""

import pytest
import torch

from hybridpp.cluster import Loopback, current_world
from hybridpp.data_parallel import layout_of, offloaded_parameters


def layout(parameters, num_replicas, index=0):
    ranks = list(range(num_replicas))
    groups = Loopback(num_replicas).run(lambda: layout_of(parameters, current_world().split([ranks]), 40 / 2**20))
    return groups[index]


PARAMETERS = {name: torch.zeros(10) for name in "abcde"} | {"wide": torch.zeros(10, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("share", "names"),
    [(0, ""), (0.01, "a"), (1 / 7, "a"), (0.15, "ab"), (0.5, "abcd"), (5 / 7, "abcde"), (0.8, "abcde wide")],
)
def test_the_buckets_that_are_complete_last_make_up_the_share(share, names):
    expected = {*names.replace(" wide", "")} | ({"wide"} if "wide" in names else set())
    for index in range(2):
        assert offloaded_parameters(layout(PARAMETERS, 2, index), PARAMETERS, share) == expected


def test_all_of_it_is_every_parameter():
    assert offloaded_parameters(layout(PARAMETERS, 1), PARAMETERS, 1.0) == PARAMETERS.keys()


def test_a_rank_that_trains_nothing_offloads_nothing():
    assert offloaded_parameters(layout({}, 1), {}, 1.0) == frozenset()
