import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hybridpp.errors import ConfigError
from hybridpp.estimate import (
    DEVICES,
    LayoutEstimate,
    RankEstimate,
    RankState,
    SearchSpace,
    StepPeak,
    StepTime,
    plugin_call,
    search,
    why_slower,
)
from hybridpp.estimate.search import _candidates

GIB = 2**30


class Made:
    """Estimates of a model that nobody has: sizes and times follow from the layout's numbers."""

    num_blocks = 8

    def __init__(self):
        self.given = SimpleNamespace(device=replace(DEVICES["h100"], devices_per_host=4))
        self.num_estimated = 0

    def bound_ms(self, sizes, settings):
        share = settings["tp_size"] * settings["pp_size"]
        return 100.0 * sizes.num_microbatches * sizes.microbatch_size**0.9 / share

    def least_bytes(self, sizes, settings):
        return self.quick_estimate(sizes, settings, 0).ranks[0].state.total

    def quick_estimate(self, sizes, settings, memory_bytes):
        self.num_estimated += 1
        tp_size, pp_size = settings["tp_size"], settings["pp_size"]
        num_replicas = sizes.world_size // (tp_size * pp_size)
        shards = num_replicas if settings.get("zero_stage") else 1
        recomputes = "gradient_checkpoint_config" in settings
        state = 64 * GIB // (tp_size * pp_size) // shards
        held = 16 * GIB * sizes.microbatch_size // tp_size // (4 if recomputes else 1)
        busy = self.bound_ms(sizes, settings) * (1.3 if recomputes else 1) * (1.1 if tp_size > 1 else 1)
        idle = 0.1 * busy * (pp_size - 1) / sizes.num_microbatches * (0.5 if settings.get("schedule") == "zb-v" else 1)
        rank = RankEstimate(
            0, (0,), RankState(weights=state, gradients=0, masters=0, moments=0, buffers=0), StepPeak(held)
        )
        time = StepTime(step_ms=busy + idle, passes_ms=busy + idle, update_ms=0, busy_ms=busy, idle_share=0)
        return LayoutEstimate(sizes=sizes, settings=settings, num_replicas=num_replicas, ranks=(rank,), time=time)


def space(**more):
    given = {"num_devices": 16, "memory_bytes": 40 * GIB, "global_batch": 64}
    return SearchSpace(**{**given, **more})


def test_the_search_finds_what_estimating_every_layout_finds():
    result = search(Made(), space())
    everything = Made()
    estimates = [everything.quick_estimate(one.sizes, one.settings, 0) for one in _candidates(everything, space())]
    fitting = sorted(one.time.step_ms for one in estimates if one.worst.total <= 40 * GIB)
    # Of equal ones, some are named by others.
    times = [one.time.step_ms for one in result.best for _ in range(1 + len(one.alike))]
    assert times == pytest.approx(fitting[: len(times)], rel=5e-4)
    assert len(result.best) == 10 < len(times)
    assert result.num_estimated < result.num_candidates == len(estimates)


def test_layouts_of_the_space_go_together():
    for one in _candidates(Made(), space()):
        sizes, given = one.sizes, one.settings
        num_replicas = sizes.world_size // (given["tp_size"] * given["pp_size"])
        assert given["tp_size"] <= 4
        assert given["pp_size"] <= 8
        assert sizes.microbatch_size * sizes.num_microbatches * num_replicas == 64
        assert num_replicas > 1 or "zero_stage" not in given
        assert given["pp_size"] > 1 or "schedule" not in given


def test_sizes_can_be_set():
    found = {
        (one.settings["tp_size"], one.settings["pp_size"], one.sizes.microbatch_size)
        for one in _candidates(Made(), space(tp_sizes=[2], pp_sizes=[4], microbatch_sizes=[2]))
    }
    assert found == {(2, 4, 2)}


def test_what_fits_nowhere_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"fits in 2 GiB: the nearest is tp_size=4, .* GiB more\. Use more devices"):
        search(Made(), space(memory_bytes=2 * GIB))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp_sizes": [3]}, r"no layout of 16 devices has one of tp_sizes=\[3\]: .* Use 1, 2 or 4\."),
        ({"tp_sizes": [1], "pp_sizes": [3, 16]}, r"has one of pp_sizes=\[3, 16\]: .* Use 1, 2, 4 or 8\."),
        ({"tp_sizes": [4], "pp_sizes": [8]}, r"has one of pp_sizes=\[8\]: .* Use 1, 2 or 4\."),
        ({"microbatch_sizes": [7], "tp_sizes": [1]}, r"no share .* microbatch_sizes=\[7\]\. Use 1, 2, 4, 8 or 16\."),
    ],
)
def test_sizes_that_leave_no_layout_are_named_with_those_that_do(sizes, message):
    with pytest.raises(ConfigError, match=message):
        search(Made(), space(**sizes))


def test_a_batch_that_no_layout_divides_is_refused():
    with pytest.raises(ConfigError, match="no layout of 16 devices divides a global batch of 7 samples"):
        search(Made(), space(global_batch=7, tp_sizes=[1], pp_sizes=[1]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_devices": 0}, "num_devices must be at least 1: got 0."),
        ({"global_batch": 10**30}, f"global_batch must be at most {2**32}: got {10**30}."),
        ({"schedules": ("2f2b",)}, "unknown schedule '2f2b': the schedules are gpipe"),
    ],
)
def test_wrong_spaces_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        space(**wrong)


def test_each_reason_names_what_takes_longer():
    result = search(Made(), space())
    best = result.best[0]
    assert why_slower(best, best) == "as fast"
    twice = 2 * best.time.busy_ms
    slower = replace(best, time=replace(best.time, busy_ms=twice, step_ms=twice, passes_ms=twice))
    recomputing = replace(slower, settings={**best.settings, "gradient_checkpoint_config": {}})
    assert why_slower(recomputing, best).startswith("blocks are recomputed: a rank computes")
    waiting = replace(best, time=replace(best.time, passes_ms=1e4, step_ms=1e4))
    assert re.match(r"ranks wait \d+ % of the step", why_slower(waiting, best))


def test_reasons_have_numbers_that_differ():
    (best_of_all,) = search(Made(), space(num_kept=1)).best

    def layout(step_ms, busy_ms, update_ms=1.0):
        times = {"step_ms": step_ms, "passes_ms": step_ms - update_ms, "update_ms": update_ms, "busy_ms": busy_ms}
        time = StepTime(**times, idle_share=0)
        return replace(best_of_all, time=time)

    best = layout(100.0, 70.0)
    assert why_slower(layout(101.0, 70.7), best) == ("more work per rank: a rank computes 71 ms (70)")
    assert why_slower(layout(100.9, 70.4), best).startswith("ranks wait 30 ms of the step, for others or")
    assert why_slower(layout(100.3, 70.3), best) == "more work per rank: a rank computes 70.3 ms (70.0)"
    assert why_slower(layout(100.2, 70.0, 1.04), best) == (
        "ranks wait 29.2 ms of the step, for others or for gradients (29.0 ms)"
    )
    assert plugin_call(best, "bf16").startswith("HybridParallelPlugin(tp_size=")


def test_layouts_that_nobody_would_choose_before_another_are_no_lines():
    class Alike(Made):
        """ZeRO 2 takes as long as 1 and holds more; ZeRO 3 holds less; zb-h1 is a hair slower."""

        def quick_estimate(self, sizes, settings, memory_bytes):
            made = super().quick_estimate(sizes, settings, memory_bytes)
            (rank,), step_ms = made.ranks, made.time.step_ms * (1.0002 if settings.get("schedule") == "zb-h1" else 1)
            factor = {2: 1.1, 3: 0.5}.get(settings.get("zero_stage", 0), 1.0)
            state = replace(rank.state, weights=int(rank.state.weights * factor))
            return replace(made, ranks=(rank._replace(state=state),), time=replace(made.time, step_ms=step_ms))

    only = {"tp_sizes": [1], "pp_sizes": [2], "microbatch_sizes": [2], "recomputes": [False]}
    found = search(Alike(), space(**only, schedules=["1f1b", "zb-h1"], memory_bytes=80 * GIB, num_kept=3))
    lines = [(one.settings["schedule"], one.settings.get("zero_stage", 0)) for one in found.best]
    assert lines == [("1f1b", 0), ("1f1b", 1), ("1f1b", 3)]
    others = [{(one["schedule"], one.get("zero_stage", 0)) for one in first.alike} for first in found.best]
    assert others == [{("zb-h1", 0)}, {("1f1b", 2), ("zb-h1", 1), ("zb-h1", 2)}, {("zb-h1", 3)}]
    assert why_slower(found.best[2], found.best[0]).startswith("as fast: a rank holds ")
    assert len(found.best) + sum(map(len, others)) == 8
