"""What replicas send in a step at each stage of ZeRO: every collective, against the table of docs/memory.md."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from plugins.zero_models import SAMPLE, TiedModel, batches, cross_entropy, step, two_groups
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.cluster.loopback import LoopbackWorld

BY_STEP, BY_MICROBATCH = {"zero_reduce": "step"}, {}
COLLECTIVES = ("all_reduce", "reduce_scatter_segments", "all_gather_segments")


class Recorder:
    """A group that notes its collectives: which one, and of how many elements."""

    def __init__(self, group, calls=None):
        self._group, self.calls, self.where, self.during = group, [] if calls is None else calls, [], lambda: None

    def __getattr__(self, name):
        attribute = getattr(self._group, name)
        if name not in COLLECTIVES:
            return attribute

        def called(tensor):
            self.calls.append((name, tensor.numel()))
            self.where.append(self.during())
            return attribute(tensor)

        return called


@pytest.mark.parametrize(
    "settings", [{"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 2, **BY_STEP}, {"zero_stage": 2}]
)
def test_a_step_sends_each_bucket_once_each_way(settings):
    def run():
        plugin = HybridParallelPlugin(num_microbatches=4, ddp_bucket_cap_mb=0.02, **settings)
        recorder = Recorder(plugin.layout.dp)
        plugin.layout = replace(plugin.layout, dp=recorder)
        booster, model = Booster(plugin=plugin), TiedModel()
        parts = booster.boost(model, two_groups(model.parameters()), criterion=cross_entropy, sample=SAMPLE)
        for batch in batches(2, 16):
            recorder.calls.clear()
            step(booster, parts.model, parts.optimizer, batch)
            parts.optimizer.step()
        return recorder.calls, [bucket.size for bucket in plugin._engine(parts.model).weights.layout.buckets]

    for calls, sizes in Loopback(2).run(run):
        assert len(sizes) > 3
        stage = settings["zero_stage"]
        sums = [("reduce_scatter_segments" if stage else "all_reduce", size) for size in sizes]
        gathers = [("all_gather_segments", size) for size in sizes] if stage else []
        num_reductions = 4 if settings == {"zero_stage": 2} else 1
        assert calls == [*sums * num_reductions, ("all_reduce", 20), *gathers]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_chunk_is_reduced_while_others_still_run(stage):
    def run():
        plugin = HybridParallelPlugin(
            num_microbatches=4, zero_stage=stage, pp_size=2, schedule="interleaved", num_model_chunks=2
        )
        recorder = Recorder(plugin.layout.dp)
        plugin.layout = replace(plugin.layout, dp=recorder)
        booster, model = Booster(plugin=plugin), TiedModel()
        parts = booster.boost(model, two_groups(model.parameters()), criterion=cross_entropy, sample=SAMPLE)
        engine = plugin._engine(parts.model)
        recorder.during = lambda: engine.executor.where
        step(booster, parts.model, parts.optimizer, batches(1, 16)[0])
        return recorder.where, engine.weights.layout.buckets

    for where, buckets in Loopback(4).run(run):
        own = [bucket for bucket in buckets if not bucket.is_shared]
        last = max(min(bucket.stages) for bucket in own if bucket.stages)
        first = [action for action, bucket in zip(where, own, strict=False) if min(bucket.stages) == last]
        assert first
        assert all(action is not None and action.stage == last for action in first)


WIDTH = 64
LAYER = WIDTH * WIDTH  # elements: for two replicas, a bucket without padding


def deep(num_layers, frozen):
    """Layers of equal size, of which one may be frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    if frozen:
        model[1].requires_grad_(False)
    return model


def sent_at_stage_3(monkeypatch, num_ranks, num_layers, num_microbatches, *, frozen=False, **settings):
    """By rank: the elements that each group of replicas summed and gathered in a step, and the rank's layers."""
    calls = {}
    split = LoopbackWorld.split

    def recording(world, lists, name="", **options):
        group = split(world, lists, name, **options)
        return Recorder(group, calls.setdefault((world.rank, name), [])) if name.startswith("dp") else group

    monkeypatch.setattr(LoopbackWorld, "split", recording)

    def run():
        rank = current_world().rank
        plugin = HybridParallelPlugin(
            num_microbatches=num_microbatches, zero_stage=3, ddp_bucket_cap_mb=0.01, **settings
        )
        booster, model = Booster(plugin=plugin), deep(num_layers, frozen)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        batch = torch.randn(num_microbatches, WIDTH)
        parts = booster.boost(model, optimizer, lambda outputs, _: outputs.square().mean(), sample=batch[:1])
        for _ in range(1 if plugin.pp_size > 1 else 2):  # the first step learns in which order passes use units
            for (of, _), made in calls.items():
                if of == rank:
                    made.clear()
            booster.execute_pipeline(iter([batch]), parts.model, parts.criterion, parts.optimizer)
            parts.optimizer.step()
        trained = [parameter.requires_grad for parameter in parts.model.parameters()]
        return len(trained), sum(trained)

    layers = Loopback(num_ranks).run(run)
    return [
        (
            Counter(
                {(name, one): size for (of, name), made in calls.items() if of == rank for one, size in sums(made)}
            ),
            *layers[rank],
        )
        for rank in range(num_ranks)
    ]


def sums(made):
    """The elements of all collectives of a kind, except for flags of parameters."""
    return {kind: sum(size for one, size in made if one == kind and size >= LAYER / 2) for kind in COLLECTIVES}.items()


SCHEDULES = [("1f1b", 2, None), ("zb-h1", 2, None), ("zb-v", 2, None), ("interleaved", 2, 2)]


@pytest.mark.parametrize("reduce", [BY_STEP, BY_MICROBATCH])
@pytest.mark.parametrize(("schedule", "pp_size", "num_chunks"), SCHEDULES)
def test_weights_of_stages_are_gathered_once(schedule, pp_size, num_chunks, reduce, monkeypatch):
    settings = {"schedule": schedule, "pp_size": pp_size, "num_model_chunks": num_chunks, **reduce}
    for found, num_layers, num_trained in sent_at_stage_3(monkeypatch, 4, 8, 4, frozen=True, **settings):
        assert +found == {
            ("dp", "reduce_scatter_segments"): (4 if reduce is BY_MICROBATCH else 1) * num_trained * LAYER,
            ("dp, weights", "all_gather_segments"): num_layers * LAYER,
        }


@pytest.mark.parametrize("reduce", [BY_STEP, BY_MICROBATCH])
@pytest.mark.parametrize("dp_size", [2, 3])
def test_weights_of_units_are_gathered_for_each_pass(dp_size, reduce, monkeypatch):
    """What is gathered ahead is what comes next, so that nothing is gathered in vain."""
    bucket = LAYER if dp_size == 2 else LAYER + 2048
    for found, num_layers, num_trained in sent_at_stage_3(monkeypatch, dp_size, 6, 4, frozen=True, **reduce):
        assert +found == {
            ("dp", "reduce_scatter_segments"): (4 if reduce is BY_MICROBATCH else 1) * num_trained * bucket,
            ("dp, weights", "all_gather_segments"): 2 * 4 * num_layers * bucket,
        }


@pytest.mark.parametrize(("most", "gathers"), [(2, 4.5), (3, 2.8)])
def test_few_stages_at_a_time_are_gathered_as_often_as_the_page_says(most, gathers, monkeypatch):
    settings = {"schedule": "interleaved", "pp_size": 4, "num_model_chunks": 4, "max_gathered_stages": most}
    ranks = sent_at_stage_3(monkeypatch, 8, 16, 16, **settings)
    counts = [found["dp, weights", "all_gather_segments"] / (num * LAYER) for found, num, _ in ranks]
    assert sum(counts) / len(counts) == pytest.approx(gathers, abs=0.05)


@pytest.mark.parametrize("reduce", [BY_STEP, BY_MICROBATCH])
def test_sets_gather_within_and_sum_segments_between(reduce, monkeypatch):
    for found, num_layers, _ in sent_at_stage_3(monkeypatch, 4, 4, 2, zero_size=2, **reduce):
        passes = 2 if reduce is BY_MICROBATCH else 1
        assert +found == {
            ("dp, shards", "reduce_scatter_segments"): passes * num_layers * LAYER,
            ("dp, copies", "all_reduce"): passes * num_layers * LAYER / 2,
            ("dp, weights", "all_gather_segments"): 2 * 2 * num_layers * LAYER,
        }
