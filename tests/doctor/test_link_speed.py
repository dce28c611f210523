import time

from processes import run_ranks

from hybridpp.cluster import Loopback, current_world
from hybridpp.doctor import link_speed
from hybridpp.doctor.link_speed import clock_offsets, measure_pairs, measured_pairs


def test_all_pairs_are_measured_on_in_process_ranks(monkeypatch):
    monkeypatch.setattr("hybridpp.doctor.link_speed._CPU_BYTES", 2**12)
    ranks = Loopback(3).run(lambda: measure_pairs(current_world(), ["a", "a", "b"]))
    assert ranks[0] == ranks[1] == ranks[2]
    assert [(link.first, link.second, link.transport) for link in ranks[0]] == [
        (0, 1, "in-process"),
        (0, 2, "in-process"),
        (1, 2, "in-process"),
    ]
    assert all(link.latency_us > 0 and link.gb_s > 0 and link.gb_s_back > 0 for link in ranks[0])


def test_processes_of_one_host_share_memory_and_have_one_clock():
    def run():
        world = current_world()
        links = [measure_pairs(world, machines) for machines in (["a", "a"], ["a", "b"])]
        return [link.transport for (link,) in links], clock_offsets(world)

    (first, clocks), (second, _) = run_ranks(run, 2)
    assert first == second == ["shared memory", "shared memory"]
    assert clocks[0] == 0
    assert abs(clocks[1]) < 1


def test_many_ranks_are_not_measured_in_all_pairs():
    assert measured_pairs(1) == []
    assert len(measured_pairs(16)) == 120
    pairs = measured_pairs(64)
    assert len(pairs) == 63 + 62
    assert {rank for pair in pairs for rank in pair} == set(range(64))


def test_clocks_are_compared_with_that_of_rank_0(monkeypatch):
    ahead = {0: 0.0, 1: 5.0}
    monkeypatch.setattr(link_speed, "_wall_clock", lambda: time.time() + ahead[current_world().rank])
    offsets = Loopback(2).run(lambda: clock_offsets(current_world()))[0]
    assert offsets[0] == 0
    assert abs(offsets[1] - 5) < 1
