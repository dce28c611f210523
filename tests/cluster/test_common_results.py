"""Results that in-process ranks compute once: which they share, and when each computes for itself."""

import copy

import pytest
import torch

from hybridpp.cluster import Loopback, common_results, current_world


def computed(kind=lambda rank: "kind", key=lambda rank: "key", is_common=lambda made: True, size=3, **options):
    """The ranks that computed, and what each got."""
    made = []

    def run():
        world = current_world()
        results = world.common_results(kind(world.rank))
        if results is None:
            return None

        def make():
            made.append(world.rank)
            return [world.rank]

        return results.get(key(world.rank), make, is_common)

    return Loopback(size, **options).run(run), made


def test_the_first_rank_computes_for_all():
    results, made = computed()
    assert made == [0]
    assert results == [[0]] * 3
    assert results[0] is results[2]


def test_ranks_with_other_keys_or_of_another_kind_compute():
    assert computed(key=lambda rank: rank % 2) == ([[0], [1], [0]], [0, 1])
    assert computed(kind=lambda rank: rank == 2) == ([[0], [0], [2]], [0, 2])


def test_what_belongs_to_a_rank_is_not_shared():
    assert computed(is_common=lambda made: made != [0]) == ([[0], [1], [1]], [0, 1])


def test_one_rank_has_nobody_to_share_with_and_others_may_not_want_to():
    assert computed(size=1) == ([None], [])
    assert computed(shares_results=False) == ([None] * 3, [])


@pytest.mark.parametrize("communicate", [True, False])
def test_where_ranks_communicate_each_computes(communicate):
    made = []

    def run():
        world = current_world()

        def make():
            made.append(world.rank)
            if communicate:
                return world.control().all_gather(torch.tensor([world.rank]))
            return [torch.tensor([rank]) for rank in range(2)]

        gathered = world.common_results("").get("", make, lambda made: True)
        # All ranks have communicated as often.
        return [part.item() for part in (*gathered, *world.control().all_gather(torch.tensor([-world.rank])))]

    assert Loopback(2).run(run) == [[0, 1, 0, -1]] * 2
    assert made == ([0, 1] if communicate else [0])


def test_each_asks_for_results_of_its_own():
    def run():
        found = [current_world().common_results("").get("", lambda name=name: name, bool) for name in "ab"]
        again = copy.deepcopy(current_world().common_results(""))
        return (*found, again.get("", lambda: "c", bool))

    assert Loopback(2).run(run) == [("a", "b", "c")] * 2


def test_an_error_is_raised_again_on_every_rank_that_asks():
    raised = []

    def run():
        results = current_world().common_results("")

        def fail():
            raised.append(current_world().rank)
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            results.get("", fail, bool)

    Loopback(2).run(run)
    assert raised == [0, 1]


def test_old_results_are_dropped_and_all_of_them_after_a_run(monkeypatch):
    monkeypatch.setattr(common_results, "_MAX_RESULTS", 2)
    loopback = Loopback(2)

    def run():
        results = current_world().common_results("")
        for number in range(5):
            results.get(number, lambda number=number: str(number), bool)
        return len(loopback.results)

    assert loopback.run(run) == [2, 2]
    assert loopback.results == {}


@pytest.fixture
def kept(monkeypatch):
    """The results that later runs take."""
    found = {}
    monkeypatch.setattr(Loopback, "results_of_any_run", found)
    return found


def ask(made, size=2, **options):
    """What ranks get for the keys 0 to 2, and what they make for them."""

    def run():
        results = current_world().common_results("")
        return [results.get(key, lambda key=key: made.append(key) or [key], bool, **options) for key in range(3)]

    return Loopback(size).run(run)


def test_later_runs_take_results_whose_keys_refer_to_nothing_of_a_run(kept):
    made = []
    first, second = ask(made, is_of_run=False), ask(made, size=4, is_of_run=False)
    assert made == [0, 1, 2]
    assert first[0][2] is second[3][2]


def test_results_of_one_run_end_with_it(kept):
    made = []
    assert ask(made) == ask(made)
    assert made == [0, 1, 2] * 2
    assert kept == {}


def test_without_a_place_for_them_no_run_takes_results_of_another():
    made = []
    assert Loopback.results_of_any_run is None
    assert ask(made, is_of_run=False) == ask(made, is_of_run=False)
    assert made == [0, 1, 2] * 2


def test_results_that_no_run_took_for_long_are_dropped(kept, monkeypatch):
    monkeypatch.setattr(common_results, "_MAX_RESULTS_OF_ANY_RUN", 2)
    ask([], is_of_run=False)
    assert [value[0] for value in kept.values()] == [1, 2]


def test_a_key_is_hashed_once_each_time_it_is_asked_for(kept):
    hashed = []

    class Key:
        def __eq__(self, other):
            return isinstance(other, Key)

        def __hash__(self):
            hashed.append(self)
            return 1

    def run():
        results = current_world().common_results("keys")
        return [results.get(Key(), list, lambda made: True, is_of_run=False) for _ in range(3)]

    ranks = Loopback(2).run(run)
    assert len({id(found) for rank in ranks for found in rank}) == 1
    assert len(hashed) == len(set(map(id, hashed))) == 6
