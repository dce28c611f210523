import contextlib
import math
import time

import pytest
import torch
from processes import run_ranks

from hybridpp.cluster import (
    Loopback,
    Patience,
    current_world,
    gather_numbers,
    gather_objects,
    name_ranks,
    start_gather_numbers,
)
from hybridpp.cluster.gather_numbers import MAX_STARTED
from hybridpp.errors import UnlikeCallsError


def exchanged(numbers, size=2):
    """What every rank gets if rank ``n`` gives ``numbers(n)``."""

    def run():
        control = current_world().control()
        return gather_numbers(control, "in a test", numbers(control.rank))

    first, *others = Loopback(size).run(run)
    assert all(repr(other) == repr(first) for other in others)
    return first


@pytest.mark.parametrize("counts", [(0, 0), (1, 3), (MAX_STARTED, 0), (MAX_STARTED + 1, 2), (1, 500), (100, 200)])
def test_ranks_may_give_different_numbers_of_numbers(counts):
    expected = [tuple(rank + index / 3 for index in range(count)) for rank, count in enumerate(counts)]
    assert exchanged(lambda rank: list(expected[rank])) == expected


def test_every_bit_arrives():
    numbers = [math.inf, -math.inf, -0.0, 5e-324, math.nan, 2.0**53 + 2]
    assert exchanged(lambda rank: numbers, size=3) == [pytest.approx(numbers, nan_ok=True)] * 3
    assert math.copysign(1.0, exchanged(lambda rank: numbers)[1][2]) == -1.0


def errors(calls):
    """What every rank raises that is in one of ``calls``, by rank."""

    def run():
        control = current_world().control()
        try:
            calls[control.rank](control)
        except UnlikeCallsError as error:
            return str(error)
        return ""

    return Loopback(len(calls)).run(run)


def test_ranks_in_different_calls_all_raise_the_same():
    calls = [
        lambda control: gather_numbers(control, "in the first", range(100)),
        lambda control: start_gather_numbers(control, "in the second", [1.0]).wait(),
        lambda control: gather_objects(control, "in the first", {"a": 1}),
        lambda control: gather_objects(control, "in the \u00fcltimate one" + "!" * 200, {"a": 1}),
    ]
    first, *others = errors(calls)
    assert first.startswith(
        "all ranks must make the same calls in the same order: ranks 0, 2 are in the first while rank 1 is in the "
        "second while rank 3 is in the \u00fcltimate one!!!"
    )
    assert others == [first] * 3


def test_a_result_or_an_error_can_be_read_again():
    def run():
        control = current_world().control()
        good = start_gather_numbers(control, "in a test", [1.0])
        bad = start_gather_numbers(control, f"in call {control.rank}", [])
        assert good.wait() == good.wait() == [(1.0,), (1.0,)]
        raised = []
        for _ in range(2):
            with pytest.raises(UnlikeCallsError) as caught:
                bad.wait()
            raised.append(caught.value)
        return raised[0] is raised[1]

    assert Loopback(2).run(run) == [True, True]


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_processes_exchange_rows_of_one_size(monkeypatch, shared_memory):
    """Not so, gloo ends a process."""
    monkeypatch.setenv("HYBRIDPP_SHARED_MEMORY", shared_memory)

    def run():
        control = current_world().control()
        rows = gather_numbers(control, "in a test", range(10 + control.rank * 500))
        assert [len(row) for row in rows] == [10, 510, 1010]
        call, count = ("in many", 500) if control.rank == 0 else ("in one", 1)
        with pytest.raises(UnlikeCallsError, match=r"rank 0 is in many while ranks 1, 2 are in one"):
            gather_numbers(control, call, range(count))
        return gather_objects(control, "in a test", {"rank": control.rank})

    torch.set_num_threads(1)
    assert run_ranks(run, 3) == [[{"rank": rank} for rank in range(3)]] * 3


def test_names_of_ranks():
    assert [name_ranks(ranks) for ranks in ([1], [0, 2], (3, 4, 5))] == ["rank 1", "ranks 0, 2", "ranks 3, 4, 5"]


def looked_at(call_of, comes, patience):
    """What rank 0 finds in an exchange, which rank 1 takes part in where it ``comes``, without waiting for that."""
    control = current_world().control()
    if control.rank == 1:
        if comes:
            with contextlib.suppress(UnlikeCallsError):
                start_gather_numbers(control, call_of(1), []).wait()
        return None
    pending, began = start_gather_numbers(control, call_of(0), []), time.monotonic()
    try:
        pending.check_arrived(Patience(patience))
    except UnlikeCallsError as error:
        return str(error)
    return time.monotonic() - began


def test_a_rank_looks_at_an_exchange_and_waits_for_no_other():
    assert Loopback(2).run(lambda: looked_at(str, False, 0.05))[0] < 2


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_calls_that_differ_are_found_by_a_look(monkeypatch, shared_memory):
    monkeypatch.setenv("HYBRIDPP_SHARED_MEMORY", shared_memory)
    found, _ = run_ranks(lambda: looked_at("in call {}".format, True, 20.0), 2)
    assert "rank 0 is in call 0 while rank 1 is in call 1" in found
