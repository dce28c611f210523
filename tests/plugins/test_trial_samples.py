"""Copies of a sample hold what other samples could, and differ in what a criterion may make of several."""

import pytest
import torch
from hybridpp_plugins.trial_samples import copies, trial_pairs

from hybridpp.pipeline.loss_items import Count, entry


def copied(values, *others, may_guess=True, size=1):
    trees = [{"y": one} for one in (values, *others)]
    return [pair.trees[1]["y"].tolist() for pair in copies(trees, size, 0, may_guess=may_guess)]


def test_whole_numbers_of_copies_are_those_of_other_samples():
    assert copied(torch.tensor([3]), torch.tensor([0]), torch.tensor([-100])) == [[0], [0]]
    assert copied(torch.tensor([3.0]), torch.tensor([1.0])) == [[1.0], [1.0]]
    # Half of those that are equal change; no class id is lost, and none is negative.
    assert copied(torch.tensor([[2, -100, -100, -100]])) == [[[2, 2, 2, -100]], [[2, -100, 2, 2]]]


@pytest.mark.parametrize(
    ("values", "guessed"),
    [([4], [[3], [5]]), ([0], [[1], [1]]), ([-100], [[0], [0]]), ([True], [[False], [False]]), ([1.0], [[0.0], [2.0]])],
)
def test_values_that_nothing_shows_are_guessed_where_none_can_do_harm(values, guessed):
    assert copied(torch.tensor(values)) == guessed
    assert copied(torch.tensor(values), may_guess=False) == []


def test_other_numbers_of_copies_are_moved():
    (near,), (far,) = copied(torch.tensor([0.25]))
    assert 0 <= near <= 1
    assert near != 0.25
    assert far < 0
    assert all(one > -3 for row in copied(torch.tensor([[-0.5, 0.5]]), may_guess=False) for one in row[0])


def test_entries_without_samples_and_other_samples_stay():
    tree = {"y": torch.tensor([1, 2]), "scale": torch.ones(3), "names": ["a", "b"]}
    for pair in copies([tree], 2, 0, may_guess=True):
        _, made = pair.trees
        assert (pair.samples, made["y"][1].item(), made["names"]) == ((0, 0), 2, ["a", "b"])
        assert torch.equal(made["scale"], tree["scale"])
        assert made["y"][0] != 1


def test_pairs_are_those_for_which_numbers_differ_else_the_most_unlike_one():
    trees = [{"y": torch.tensor([one]), "z": torch.tensor([other])} for one, other in ((0, 1), (0, 2), (3, 3))]

    def chosen_of(pair):
        return lambda kinds: {"y": torch.stack([pair.trees[kind]["y"][0] for kind in kinds])}

    counts = Count(torch.sum, (entry(("y",)),))
    (pair,) = trial_pairs(trees, 1, 0, [counts], chosen_of)
    assert (pair.trees[1], pair.applies) == (trees[2], True)
    (pair,) = trial_pairs(trees, 1, 0, [], chosen_of)
    assert (pair.trees[1], pair.applies) == (trees[2], False)
    assert list(trial_pairs(trees[:1], 1, 0, [counts], chosen_of)) == []
