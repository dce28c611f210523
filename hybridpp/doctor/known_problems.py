"""Everything that is wrong with an installation, its hosts and a job, and the way out."""

from collections.abc import Sequence

from hybridpp.doctor.host_problems import host_problems
from hybridpp.doctor.job_problems import job_problems
from hybridpp.doctor.package_problems import package_problems
from hybridpp.doctor.problem import Problem
from hybridpp.doctor.rank_facts import RankFacts

_LEVELS = ("error", "warning", "hint")


def find_problems(facts: Sequence[RankFacts], clocks: Sequence[float] = ()) -> list[Problem]:
    """Each problem once, the worst first. A function of the facts, which changes nothing.

    Args:
        facts: of all ranks, in order.
        clocks: how far each rank's clock is ahead of rank 0's, in seconds; empty: not measured.
    """
    found = [problem for one in facts for problem in package_problems(one)]
    for host in dict.fromkeys(one.host_id for one in facts):
        found += host_problems([one for one in facts if one.host_id == host])
    if len(facts) > 1:
        found += job_problems(facts, clocks)
    return sorted(dict.fromkeys(found), key=lambda problem: _LEVELS.index(problem.level))
