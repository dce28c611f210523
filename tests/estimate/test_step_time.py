from dataclasses import replace

import pytest

from hybridpp.config import ZeroConfig
from hybridpp.estimate import (
    DEVICES,
    Grid,
    StageWork,
    UnitTimes,
    stage_costs,
    step_time,
    update_ms,
)
from hybridpp.schedule import make_schedule
from hybridpp.simulate import PreparedPrograms, PreparedStep

# Four units of 1 ms forwards and 2 ms backwards.
TIMES = UnitTimes(
    key="",
    names=("a", "b", "c", "d"),
    begins=(0.0, 1e-3, 2e-3, 3e-3),
    ends=(1e-3, 2e-3, 3e-3, 4e-3),
    gradients=(10e-3, 8e-3, 6e-3, 4e-3),
    loss=4e-3,
    backward_end=12e-3,
    end=12e-3,
)
FAST = replace(DEVICES["h100"], message_us=0.0, memory_gib_s=1e9, host_gib_s=1e9, network_gib_s=1e9)


def grid(pp_size, num_replicas=1, zero_stage=0):
    return Grid(tp_size=1, pp_size=pp_size, num_replicas=num_replicas, zero=ZeroConfig(zero_stage=zero_stage))


def works(pp_size, gradients=0):
    share = 4 // pp_size
    return [
        StageWork(first=s * share, last=s * share + share - 1, sent=0, gradients=gradients, weights=0)
        for s in range(pp_size)
    ]


def prepared(schedule, pp_size, num_microbatches):
    return PreparedStep(
        lambda number: PreparedPrograms(make_schedule(schedule, pp_size, number)), pp_size, num_microbatches
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("pp_size", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 4, 8, 64])
def test_a_balanced_pipeline_takes_its_micro_batches_and_the_others_once(schedule, pp_size, num_microbatches):
    costs = stage_costs(TIMES, works(pp_size), range(pp_size), FAST, grid(pp_size))
    time = step_time(prepared(schedule, pp_size, num_microbatches), costs, 0.0, FAST, grid(pp_size))
    assert time.step_ms == pytest.approx((num_microbatches + pp_size - 1) * 12 / pp_size, rel=1e-4)
    assert time.idle_share == pytest.approx((pp_size - 1) / (num_microbatches + pp_size - 1), abs=1e-3)


def test_gradients_are_sent_over_the_link_that_their_replicas_need():
    device = replace(FAST, host_gib_s=2**10, network_gib_s=2**4, devices_per_host=4)
    size = 2**30
    for num_replicas, expected_ms in ((1, 0.0), (4, 1.5e3 / 2**10), (8, 1.75e3 / 2**4)):
        costs = stage_costs(TIMES, works(1, size), [0], device, grid(1, num_replicas))
        assert costs.reducing_ms(0) == pytest.approx(expected_ms)


def test_ranks_of_a_host_share_its_cores():
    device = replace(FAST, cores=2)
    costs = stage_costs(TIMES, works(4), range(4), device, grid(4))
    time = step_time(prepared("1f1b", 4, 64), costs, 1.0, device, grid(4))
    # Two of four ranks compute at a time, but for the first and the last micro-batches.
    assert 64 * 12 / 2 < time.passes_ms < 1.05 * 64 * 12 / 2
    assert time.update_ms == pytest.approx(2.0)


def test_an_update_moves_the_state_and_gathers_the_weights_of_zero():
    device = replace(FAST, memory_gib_s=1.0, host_gib_s=1.0)
    work = StageWork(first=0, last=3, sent=0, gradients=0, weights=2**30)
    assert update_ms(2**30, [work], device, grid(1)) == pytest.approx(3000)
    assert update_ms(2**30, [work], device, grid(1, 2, zero_stage=1)) == pytest.approx(3500)
