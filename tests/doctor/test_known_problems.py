from dataclasses import replace

from doctor.facts import FACTS, facts, several

from hybridpp.doctor.known_problems import find_problems


def test_the_worst_comes_first_and_each_once():
    old = {"versions": {**FACTS.versions, "torch": "2.9"}, "host": {"shm_bytes": 2**26}, "environment": {}}
    problems = find_problems(several(3, **old))
    assert [problem.level for problem in problems] == ["error", "warning", "hint"]


def test_every_host_is_looked_at():
    small = {"name": "host1", "shm_bytes": 2**26, "shm_free_bytes": 2**26}
    ranks = [*several(2), *(replace(one, rank=one.rank + 2, machine="boot1") for one in several(2, host=small))]
    (found,) = find_problems(ranks)
    assert found.what.startswith("/dev/shm has 64.00 MiB")


def test_what_concerns_a_job_is_not_asked_of_one_rank():
    assert find_problems([facts(host={"addresses": ("127.0.1.1",)})]) == []


def test_copies_of_a_virtual_machine_are_two_hosts():
    ranks = [*several(8), *(replace(one, rank=one.rank + 8) for one in several(8, host={"name": "host1"}))]
    assert find_problems(ranks) == []
