from dataclasses import replace

import pytest
from doctor.facts import FACTS, facts, several, told

from hybridpp.doctor.job_problems import job_problems

OTHER_HOST = {"name": "host1", "addresses": ("10.0.0.2",)}


def test_ranks_that_are_alike_have_no_problem():
    assert list(job_problems(several(4), [0.0, 0.0, 0.5, -0.5])) == []
    both = [*several(2), *(replace(one, rank=one.rank + 2, machine="boot1") for one in several(2, host=OTHER_HOST))]
    assert list(job_problems(both, [])) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"versions": {**FACTS.versions, "torch": "2.12"}},
            "torch must be the same on all ranks: got 2.11 on ",
        ),
        ({"builds": {**FACTS.builds, "cuda": "13.0"}}, "CUDA of torch must be the same on all ranks: got none on "),
        ({"location": "/home/me/hybridpp"}, "folder of hybridpp must be the same on all ranks: got /site/hybridpp on "),
    ],
)
def test_environments_that_differ_are_an_error(changes, text):
    first, second = several(2)
    (found,) = job_problems([first, replace(second, **changes)], [])
    assert found.level == "error"
    assert found.what.startswith(text)
    assert "on rank 1" in found.what


def test_ranks_that_share_a_device_are_told():
    ranks = [replace(one, hardware="GPU-1") for one in several(2)]
    assert told(job_problems(ranks, [])) == [
        ("warning", "every rank needs a CUDA device of its own for nccl: ranks 0, 1 share GPU-1 of host host0.")
    ]


def test_clocks_that_differ_are_told():
    (found,) = job_problems(several(3), [0.0, -70.0, 0.2])
    assert found.what.startswith("clocks of hosts differ from that of rank 0: rank 1 by -70.0 s.")


def test_a_host_that_others_do_not_reach_is_told():
    local = facts(rank=1, machine="boot1", host={"name": "host1", "addresses": ("127.0.1.1",)})
    (found,) = job_problems([FACTS, local], [])
    assert found.level == "hint", "joining the job has chosen the interface"
    assert found.what.startswith("the name of host host1 resolves to 127.0.1.1, where other hosts do not reach it: ")
    # Alone, or with the interface named, it is none.
    assert list(job_problems([replace(local, rank=0), replace(local, rank=1)], [])) == []
    named = replace(local, environment={**FACTS.environment, "GLOO_SOCKET_IFNAME": "eth0"})
    assert list(job_problems([FACTS, named], [])) == []


def test_hosts_with_different_numbers_of_ranks_are_told():
    ranks = [*several(2), facts(rank=2, machine="boot1", host=OTHER_HOST)]
    assert told(job_problems(ranks, [])) == [("hint", "hosts have different numbers of ranks: host0 2, host1 1.")]
