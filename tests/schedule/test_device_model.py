"""No schedule deadlocks on a device, whatever its queues, kernels and communicators wait for."""

from collections import defaultdict, deque
from dataclasses import fields, replace
from functools import cache

import pytest
from schedule.oracle import every_schedule

from hybridpp.errors import ScheduleError
from hybridpp.schedule import (
    STRICTEST,
    ActionKind,
    DeviceModel,
    Drains,
    Streams,
    check_on_devices,
    device_model,
    find_deadlock,
    forward_only,
    lower,
    make_schedule,
    one_f_one_b,
    parse_action,
    placement,
)

MODELS = {
    "as NCCL usually is": DeviceModel(),
    "a stream per group": DeviceModel(Streams.GROUP),
    "one stream for messages": DeviceModel(Streams.RANK),
    "one queue for all": DeviceModel(Streams.COMPUTE),
    "one group": DeviceModel(Streams.GROUP, one_group=True),
    "starts in order": DeviceModel(in_order=True),
    "lazy communicators": DeviceModel(lazy_communicators=True),
    "lazy kernels": DeviceModel(drains=Drains.FIRST_KERNEL),
    "lazy kernels and communicators": DeviceModel(lazy_communicators=True, drains=Drains.FIRST_KERNEL),
    "a communicator drains": DeviceModel(lazy_communicators=True, drains=Drains.COMMUNICATOR),
    "every kernel drains": DeviceModel(drains=Drains.ALWAYS),
    "strictest": STRICTEST[0],
    "strictest, one group": STRICTEST[1],
}
# How many of the programs below deadlock if each receive is posted one action ahead of its use.
ONE_AHEAD = {
    "as NCCL usually is": 0,
    "a stream per group": 8,
    "one stream for messages": 70,
    "one queue for all": 70,
    "one group": 70,
    "starts in order": 2,
    "lazy communicators": 32,
    "lazy kernels": 34,
    "lazy kernels and communicators": 63,
    "a communicator drains": 67,
    "every kernel drains": 67,
    "strictest": 70,
    "strictest, one group": 70,
}


def every_program(ranks, microbatches, chunks):
    found = dict(every_schedule(ranks, microbatches, chunks))
    for p in ranks:
        for where in (tuple(range(p)), (*range(p), *range(p)), (*range(p), *reversed(range(p)))):
            found |= {f"forward only {where} m={m}": forward_only(where, m) for m in microbatches}
    return found


SMALL = every_program((2, 4), (1, 2, 8), (2,))


@cache
def lowered(programs):
    """Once for all models."""
    return lower(programs)


SENT_AS = {
    ActionKind.FORWARD: ActionKind.SEND_ACTIVATION,
    ActionKind.BACKWARD: ActionKind.SEND_GRADIENT,
    ActionKind.INPUT_GRADIENT: ActionKind.SEND_GRADIENT,
}
# The receive that an action reads, and by how much the sending stage is higher.
READS = {
    ActionKind.FORWARD: (ActionKind.RECEIVE_ACTIVATION, -1),
    ActionKind.BACKWARD: (ActionKind.RECEIVE_GRADIENT, 1),
    ActionKind.INPUT_GRADIENT: (ActionKind.RECEIVE_GRADIENT, 1),
}


@cache
def one_ahead(programs):
    """Lowered by another rule: each receive is posted one action ahead of its use, in the order of the sends."""
    where, rows = placement(programs), []
    for program, lowered in zip(programs, lower(programs), strict=True):
        channels, row = defaultdict(deque), []
        for action in lowered:
            for kind, further in READS.values():
                if action.kind is kind and action not in channels[kind, where[action.stage + further]]:
                    channels[kind, where[action.stage + further]].append(action)
        for now, following in zip((None, *program), (*program, None), strict=True):
            kind, further = READS.get(following.kind, (None, 0)) if following else (None, 0)
            receive = following and following._replace(kind=kind)
            while receive in lowered and receive not in row:
                row.append(channels[kind, where[following.stage + further]].popleft())
            if now is not None:
                send = now._replace(kind=SENT_AS.get(now.kind))
                row += [now, send] if send in lowered else [now]
        rows.append(tuple(row))
    return tuple(rows)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_schedule_deadlocks_in_any_model(model):
    assert [name for name, programs in SMALL.items() if find_deadlock(lowered(programs), model)] == []


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_no_schedule_deadlocks_in_the_strictest_models(num_ranks):
    # Fewer micro-batches than ranks, an odd number, and as many as come again and again from then on.
    programs = every_program((num_ranks,), (1, 3, 2 * num_ranks), (2, 3))
    for name, each in programs.items():
        rows = lower(each)
        assert not any(find_deadlock(rows, model) for model in STRICTEST), name


@pytest.mark.parametrize("name", MODELS)
def test_receives_that_are_posted_one_action_ahead_deadlock(name):
    stuck = [programs for programs in SMALL.values() if find_deadlock(one_ahead(programs), MODELS[name])]
    assert (len(SMALL), len(stuck)) == (78, ONE_AHEAD[name])


def test_uneven_durations_do_not_matter_for_deadlocks():
    uneven = {
        ActionKind.FORWARD: 3,
        ActionKind.BACKWARD: 5,
        ActionKind.INPUT_GRADIENT: 3,
        ActionKind.WEIGHT_GRADIENT: 2,
    }
    for programs in SMALL.values():
        rows = lower(programs, uneven)
        assert not any(find_deadlock(rows, model) for model in STRICTEST)


def test_sends_may_also_be_waited_for_at_the_end_only():
    for programs in SMALL.values():
        rows = lowered(programs)
        assert not any(find_deadlock(rows, replace(model, waits_for_sends=False)) for model in STRICTEST)


def test_a_deadlock_is_described_by_where_each_rank_stands():
    crossed = tuple(
        tuple(map(parse_action, row.split())) for row in ("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    )
    assert find_deadlock(crossed, DeviceModel()) is None
    assert find_deadlock(crossed, DeviceModel(Streams.RANK)) == (
        "rank 0 at its end, with messages under way; rank 1 at its end, with messages under way"
    )
    assert find_deadlock(crossed, DeviceModel(lazy_communicators=True)) == "rank 0 at 0RECV_B0; rank 1 at 1RECV_F0"


def test_a_rank_that_drains_with_a_receive_open_is_found():
    ahead = tuple(
        tuple(map(parse_action, row.split()))
        for row in ("0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0", "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0")
    )
    assert find_deadlock(ahead, DeviceModel()) is None
    assert find_deadlock(ahead, DeviceModel(drains=Drains.ALWAYS)) == "rank 0 at 0F1; rank 1 at 1B0"


def test_every_setting_of_the_strictest_models_is_the_strictest():
    settings = {field.name for field in fields(DeviceModel)} - {"one_group", "waits_for_sends"}
    loose = DeviceModel()
    for model in STRICTEST:
        assert all(getattr(model, name) != getattr(loose, name) for name in settings)


def test_a_schedule_that_could_deadlock_is_refused(monkeypatch):
    check_on_devices(one_f_one_b(2, 3))
    monkeypatch.setattr(device_model, "lower", one_ahead)
    with pytest.raises(ScheduleError, match=r"can deadlock on a device .* rank 0 at 0.*; rank 1 at 1"):
        check_on_devices(make_schedule("1f1b", 2, 3))
