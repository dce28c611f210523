import pytest

from hybridpp.schedule import make_schedule, placement
from hybridpp.simulate import Costs, PreparedPrograms, ends_on_cores

NAMES = ("1f1b", "zb-h1", "zb-v", "interleaved")


def prepared(name, num_ranks, num_microbatches):
    programs = make_schedule(name, num_ranks, num_microbatches)
    return PreparedPrograms(programs), Costs(num_stages=len(placement(programs)), forward_ms=1.5, send_ms=0.25)


@pytest.mark.parametrize("name", NAMES)
def test_a_core_for_each_rank_changes_nothing(name):
    programs, costs = prepared(name, 4, 8)
    shared, own = ends_on_cores(programs, costs, 3, 12), programs.ends(costs)
    assert shared.end_ms == pytest.approx(own.end_ms)
    assert shared.busy_ms == pytest.approx(own.busy_ms)
    assert shared.last_ms == pytest.approx(own.last_ms)


@pytest.mark.parametrize("name", NAMES)
def test_one_core_takes_the_sum_of_all_work(name):
    programs, costs = prepared(name, 4, 8)
    costs = Costs(num_stages=costs.num_stages, post_ms=0.1)
    posts = 0.1 * sum(step.received + step.sent for step in programs.steps)
    shared = ends_on_cores(programs, costs, 2, 1)
    assert shared.end_ms == pytest.approx(2 * (sum(shared.busy_ms) + posts))


def test_two_ranks_of_one_core_that_compute_at_once_take_twice_as_long():
    # 0F0 alone, then 0F1 beside 1F0 and 1B0, as far as there is work.
    programs, _ = prepared("1f1b", 2, 2)
    shared = ends_on_cores(programs, Costs(num_stages=2), 1, 1)
    assert shared.end_ms == pytest.approx(2 * 2 * 3)
    assert shared.last_ms[1] < shared.last_ms[0] == shared.end_ms
