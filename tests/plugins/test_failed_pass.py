"""An error that one rank alone catches, in its own pass or among tensor-parallel ranks: nothing wrong follows it."""

import time
from functools import partial

import pytest
from plugins.zero_models import SAMPLE, batches, cross_entropy, on_layout, step, two_groups, weights_of, without_dropout
from processes import run_ranks
from support import assert_same, replica_part

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import current_world
from hybridpp.errors import DeadlockError, PeerError, PeerTimeoutError, UnlikeCallsError


class Breaks(Exception):
    """What a hook raises."""


def own_step(booster, model, optimizer, batch, breaks_in=None):
    """A step of the script's own loop; ``breaks_in``: "forward" or "backward"."""

    def break_here(*_):
        raise Breaks("it broke")

    block, handle = model.blocks[2], None
    if breaks_in == "forward":
        handle = block.register_forward_pre_hook(break_here)
    elif breaks_in == "backward":
        handle = block.register_full_backward_pre_hook(break_here)
    part = replica_part(batch, booster.plugin.layout.here.dp, booster.plugin.dp_size)
    try:
        booster.backward(cross_entropy(model(part), part), optimizer)
    finally:
        if handle is not None:
            handle.remove()
    optimizer.step()


def boosted(**settings):
    plugin = HybridParallelPlugin(num_microbatches=1, ddp_bucket_cap_mb=0.02, **settings)
    booster, model = Booster(plugin=plugin), without_dropout()
    parts = booster.boost(model, two_groups(model.parameters()), criterion=cross_entropy, sample=SAMPLE)
    return booster, parts.model, parts.optimizer


def refused(call):
    """The text of the error with which a rank refuses what follows."""
    with pytest.raises(UnlikeCallsError) as caught:
        call()
    return str(caught.value)


def _in_the_scripts_own_loop(settings, place):
    """What the ranks raise in the step that fails on the last one, and in the next; and whether weights changed."""
    booster, model, optimizer = boosted(**settings)
    first, second, third = batches(3, 8)
    own_step(booster, model, optimizer, first)
    with booster.unsharded(model):
        before = weights_of(model)
    fails = current_world().rank == 1
    with pytest.raises(Breaks if fails else PeerTimeoutError):
        own_step(booster, model, optimizer, second, place if fails else None)
    with pytest.raises((PeerError, UnlikeCallsError)):
        own_step(booster, model, optimizer, third)
    texts = [refused(lambda: own_step(booster, model, optimizer, third)), refused(lambda: booster.no_sync(model))]
    if settings.get("zero_stage") != 3:
        assert_same(weights_of(model), before)
    if fails:
        time.sleep(STAY_S)
    return texts


# A rank waits for another one that long, and starts within it on a host that is busy.
WAIT_S = 9
# The rank that fails may give up first; it lives on until the other one has, which else finds it gone.
STAY_S = 3


@pytest.mark.parametrize(
    ("settings", "place"),
    [({}, "backward"), ({"zero_stage": 3}, "forward"), ({"tp_size": 2}, "backward")],
    ids=str,
)
def test_nothing_follows_an_error_that_one_rank_alone_catches(settings, place):
    run = partial(_in_the_scripts_own_loop, settings, place)
    for texts in run_ranks(run, 2, timeout_s=90, wait_s=WAIT_S):
        assert all("ended in the middle on this rank, by " in text for text in texts)


@pytest.mark.parametrize(
    "settings", [{"dp_size": 2}, {"dp_size": 2, "zero_stage": 2}, {"dp_size": 2, "tp_size": 2}], ids=str
)
def test_the_next_step_is_right_if_all_ranks_fail_alike(settings):
    def run(fails):
        def steps(booster, model, optimizer):
            for batch in batches(3, 8):
                if fails:
                    with pytest.raises(Breaks):
                        own_step(booster, model, optimizer, batch, "backward")
                own_step(booster, model, optimizer, batch)
            return weights_of(model)

        return on_layout(steps, make_model=without_dropout, **settings)

    for plain, failed in zip(run(fails=False), run(fails=True), strict=True):
        assert_same(failed, plain)


def test_ranks_that_fail_at_different_places_do_not_go_on():
    def run(booster, model, optimizer):
        first, second = batches(2, 8)
        block = model.blocks[0 if current_world().rank else 3]

        def break_here(*_):
            raise Breaks("it broke")

        handle = block.register_full_backward_pre_hook(break_here)
        with pytest.raises(Breaks):
            own_step(booster, model, optimizer, first)
        handle.remove()
        return refused(lambda: own_step(booster, model, optimizer, second))

    for text in on_layout(run, dp_size=2, make_model=without_dropout, ddp_bucket_cap_mb=0.02):
        assert "an error in booster.backward, which came elsewhere on rank 1 than on rank 0" in text


def _in_the_pipeline():
    """The same in ``execute_pipeline`` on two tensor-parallel ranks."""
    booster, model, optimizer = boosted(tp_size=2)
    first, second, third = batches(3, 8)
    step(booster, model, optimizer, first)
    optimizer.step()
    before, fails = weights_of(model), current_world().rank == 1

    def break_here(*_):
        raise Breaks("it broke")

    if fails:
        handle = model.blocks[2].register_full_backward_pre_hook(break_here)
    with pytest.raises(Breaks if fails else PeerTimeoutError):
        step(booster, model, optimizer, second)
    if fails:
        handle.remove()
        with pytest.raises(PeerError):
            step(booster, model, optimizer, third)
    text = refused(lambda: step(booster, model, optimizer, third))
    assert_same(weights_of(model), before)
    if fails:
        time.sleep(STAY_S)
    return text


def test_tensor_parallel_ranks_do_not_go_on_after_an_error_of_one():
    for text in run_ranks(_in_the_pipeline, 2, timeout_s=90, wait_s=WAIT_S):
        assert "a step ended in the middle on this rank, by PeerTimeoutError: rank " in text


def test_in_process_ranks_that_wait_for_each_other_get_an_error():
    def run(booster, model, optimizer):
        [batch] = batches(1, 8)
        if current_world().rank == 0:
            return own_step(booster, model, optimizer, batch)
        with pytest.raises(Breaks):
            own_step(booster, model, optimizer, batch, "backward")
        return own_step(booster, model, optimizer, batch)

    with pytest.raises(DeadlockError):
        on_layout(run, dp_size=2, make_model=without_dropout)
