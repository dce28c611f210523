import pytest

from hybridpp.cluster.shared_memory.spinning import Spinning


class Host:
    """A clock that only yields move on: by a microsecond, or by a time slice while something else can run."""

    def __init__(self):
        self.now, self.num_yields, self.is_busy = 0.0, 0, False

    def give_way(self):
        self.num_yields += 1
        self.now += 3e-3 if self.is_busy else 1e-6

    def spinning(self):
        return Spinning(clock=lambda: self.now, give_way=self.give_way)


@pytest.fixture
def host():
    return Host()


def test_what_is_there_is_not_waited_for(host):
    assert host.spinning().until(lambda: True)
    assert host.num_yields == 0


def test_what_comes_while_the_rank_spins_is_seen_at_once(host):
    assert host.spinning().until(lambda: host.num_yields >= 5)
    assert host.num_yields == 5


def test_a_rank_spins_for_a_millisecond(host):
    assert not host.spinning().until(lambda: False)
    assert host.now == pytest.approx(1e-3, abs=2e-6)


def test_a_rank_that_saw_something_else_run_spins_no_more_for_a_second(host):
    spinning = host.spinning()
    host.is_busy = True
    for _ in range(10):
        assert not spinning.until(lambda: False)
        host.now += 0.05
    assert host.num_yields == 1


def test_what_came_while_something_else_ran_is_seen(host):
    host.is_busy = True
    assert host.spinning().until(lambda: host.num_yields == 1)


def test_a_rank_spins_again_when_the_processor_is_free(host):
    spinning = host.spinning()
    host.is_busy = True
    spinning.until(lambda: False)
    host.is_busy = False
    host.now += 1.1
    assert spinning.until(lambda: host.num_yields >= 5)
    assert spinning.until(lambda: host.num_yields >= 9)
