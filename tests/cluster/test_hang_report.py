"""Who waits for whom, and the report: from made-up states of ranks."""

from dataclasses import replace

import pytest

from hybridpp.cluster.hang_report import SuspectFinding, Suspicion, WatchedState, find_suspect, group_key, report
from hybridpp.cluster.progress import CONNECTION, Awaited, DeviceWork
from hybridpp.cluster.rank_process import RankProcess

PROCESS = RankProcess("node7", "", 4242, "1")


def state(rank, waits_for=(), **more):
    awaited = Awaited("a message", tuple(waits_for), "pp") if waits_for else None
    return WatchedState(rank=rank, process=PROCESS, section="step", awaited=awaited, **more)


def by_rank(*states):
    return {one.rank: one for one in states}


def gathering(rank, number, started, **more):
    """A rank of group dp (0, 1, 2) that waits for a collective, or, with number 0, does not wait."""
    others = tuple(other for other in range(3) if other != rank)
    awaited = Awaited("a collective", others, "dp", number) if number else None
    counts = {group_key("dp", range(3)): started}
    return WatchedState(rank=rank, process=PROCESS, section="step", awaited=awaited, started=counts, **more)


def test_a_chain_leads_to_the_rank_that_waits_for_nobody():
    states = by_rank(state(0, [1]), state(1, [2]), state(2), state(3, [0]))
    assert find_suspect(states, (), 3) == Suspicion((3, 0, 1, 2))


def test_a_silent_rank_is_a_suspect_whatever_it_waited_for():
    states = by_rank(state(0, [1]), state(1, [2]), state(2, [0]))
    assert find_suspect(states, {1}, 0) == Suspicion((0, 1))


def test_ranks_that_wait_for_each_other_are_a_cycle():
    states = by_rank(state(0, [1]), state(1, [2]), state(2, [1]))
    suspicion = find_suspect(states, (), 0)
    assert (suspicion.kind, suspicion.path) == ("cycle", (1, 2))
    assert "Ranks wait for each other: rank 1 waits for rank 2, rank 2 waits for rank 1." in report(
        states, (), suspicion, SuspectFinding(stack="  here"), "now"
    )


def test_of_a_collective_the_rank_that_has_not_started_it_is_the_suspect():
    states = by_rank(gathering(0, 5, 5), gathering(1, 0, 5, age_s=9.0), gathering(2, 0, 4, age_s=1.0))
    assert find_suspect(states, (), 0) == Suspicion((0, 2))


def test_a_collective_that_all_have_started_blames_the_network():
    states = by_rank(*(gathering(rank, 5, 5) for rank in range(3)))
    suspicion = find_suspect(states, (), 0)
    assert suspicion == Suspicion((0,), "network")
    text = "so the suspect is the connection between"
    assert f"{text} them." in report(states, (), suspicion, SuspectFinding(), "now")
    states[2] = replace(states[2], process=PROCESS._replace(host="node8"))
    assert f"{text} their hosts." in report(states, (), suspicion, SuspectFinding(), "now")


def connecting(rank, others):
    awaited = Awaited(CONNECTION, tuple(others), "", 3)
    return WatchedState(
        rank=rank, process=PROCESS, section="setup", awaited=awaited, started={group_key("", range(3)): 3}
    )


def test_of_ranks_that_connect_the_suspect_has_not_come_or_is_silent():
    states = by_rank(connecting(0, [1, 2]), connecting(1, [0, 2]), connecting(2, [0, 1]))
    suspicion = find_suspect(states, (), 0)
    assert suspicion == Suspicion((0,), "network")
    text = "so the suspect is the connection between them, or one of them that stands still in torch."
    assert text in report(states, (), suspicion, SuspectFinding(), "now")
    assert find_suspect(states, {1}, 0) == Suspicion((0, 1))
    assert find_suspect(by_rank(connecting(0, [1, 2]), connecting(1, [0, 2]), state(2)), (), 1) == Suspicion((1, 2))


def test_workers_of_a_dataloader_and_a_wait_in_the_kernel_are_told():
    finding = SuspectFinding(
        condition="is in a wait of the kernel", stack="  here", waiting_children=[8], worker_stacks={"9": "  there"}
    )
    text = report(by_rank(state(0)), (), Suspicion((0,)), finding, "now")
    assert "Its process is in a wait of the kernel. It is in a step." in text
    assert "wait in the kernel, as where a disk does not answer: 8." in text
    assert "The Python stack of process 9, which loads data for it, innermost call last:\n  there" in text


def test_a_device_that_needs_an_unfinished_action_waits_for_its_rank():
    needs = DeviceWork(3, "forward of stage 1, micro-batch 2 (1F2)", (0, "0F2"), ("1F0", "1F1"))
    waiting = WatchedState(rank=1, process=PROCESS, section="step", device=needs)
    for finished, path in (((), (1, 0)), (("0F2",), (1,))):
        other = WatchedState(rank=0, process=PROCESS, section="script", device=DeviceWork(3, "", None, finished))
        assert find_suspect(by_rank(other, waiting), (), 1).path == path


def test_states_are_the_same_after_json():
    device = DeviceWork(3, "forward", (0, "0F2"), ("1F0",))
    full = gathering(0, 5, 5, age_s=1.5, code="train.py:3 in main", device=device)
    assert WatchedState.of(full.as_text()) == full


@pytest.mark.parametrize(
    ("section", "finding", "expected"),
    [
        (
            "script",
            SuspectFinding(stack="  x"),
            "Rank 1 has not come to step 41 of ViT: it is in your code at train.py:57.",
        ),
        ("data", SuspectFinding(stack="  x"), "Rank 1 is reading from here, which gives none."),
        ("step", SuspectFinding(stack="  x"), "Rank 1 waits for no rank: it is in reading from here."),
        ("step", SuspectFinding(condition="is stopped (SIGSTOP, or job control)"), "Its process is stopped (SIGSTOP"),
        (
            "step",
            SuspectFinding(stack="  x", recorder="  all_reduce 4"),
            "NCCL's flight recorder on rank 1:\n  all_reduce 4",
        ),
        ("data", SuspectFinding(stack="  x", stopped_children=[7, 8]), "Processes that it started are stopped: 7, 8."),
    ],
)
def test_the_report_says_of_a_suspect(section, finding, expected):
    waiting = state(0, [1], location="step 41 of ViT", age_s=10.0)
    suspect = WatchedState(
        rank=1, process=PROCESS, section=section, location="" if section == "script" else "reading from here",
        code="train.py:57", age_s=10.0,
    )  # fmt: skip
    text = report(by_rank(waiting, suspect), (), Suspicion((0, 1)), finding, "rank 0 reports")
    assert "rank 0: in step 41 of ViT for 10 s, waits for a message of rank 1 (group pp)\n" in text
    assert "The first suspect is rank 1 (process 4242 on node7): rank 0 waits for rank 1.\n" in text
    assert expected in text


def test_of_many_ranks_those_of_the_chain_and_some_others_are_shown():
    states = by_rank(state(0, [99]), *(state(rank) for rank in range(1, 100)))
    text = report(states, (), Suspicion((0, 99)), SuspectFinding(), "now")
    assert "  rank 99: " in text
    assert "… and 84 more ranks" in text
