import torch

from hybridpp.cluster import Loopback, current_world
from hybridpp.estimate import DEVICES, measure_device, measure_links


def test_this_device_has_speeds():
    found = measure_device(torch.device("cpu"))
    assert found.is_cpu
    assert found.cores >= 1
    assert found.tflops["fp32"] > 1e-4
    assert 0.01 < found.memory_gib_s < 1e4
    assert type(found).from_json(found.to_json()) == found


def test_all_ranks_find_the_slowest_link():
    def rank():
        return measure_links(DEVICES["cpu"], current_world())

    first, second = Loopback(2).run(rank)
    assert first == second
    assert first.host_gib_s > 0
    assert first.message_us > 0
