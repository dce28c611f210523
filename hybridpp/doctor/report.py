"""All that a doctor finds, in a form that ranks and programs can exchange."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridpp.cluster import World
from hybridpp.doctor.known_problems import find_problems
from hybridpp.doctor.link_speed import LinkSpeed, clock_offsets, measure_pairs
from hybridpp.doctor.problem import Problem
from hybridpp.doctor.rank_facts import RankFacts, all_facts, backend_choice, facts_from_plain


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """What was found.

    Attributes:
        ranks: facts of each, in order.
        backend: that a job takes by itself.
        why: it does.
        links: between ranks; empty: there is one rank.
        problems: the worst first.
    """

    ranks: Sequence[RankFacts]
    backend: str
    why: str
    links: Sequence[LinkSpeed]
    problems: Sequence[Problem]

    @property
    def has_errors(self) -> bool:
        """Whether a job would fail, or compute elsewhere than meant."""
        return any(problem.level == "error" for problem in self.problems)

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "links": [link._asdict() for link in self.links]}

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> "DoctorReport":
        """From what :meth:`to_plain` gave."""
        return DoctorReport(
            ranks=[facts_from_plain(one) for one in plain["ranks"]],
            backend=plain["backend"],
            why=plain["why"],
            links=[LinkSpeed(**link) for link in plain["links"]],
            problems=[Problem(**problem) for problem in plain["problems"]],
        )


def examine(world: World) -> DoctorReport:
    """Examine the ranks of a job, their hosts and their links; the same report on every rank.

    Collective: all ranks of the world.
    """
    facts = all_facts(world)
    links: list[LinkSpeed] = []
    clocks: list[float] = []
    if world.size > 1:
        links = measure_pairs(world, [one.host_id for one in facts])
        clocks = clock_offsets(world)
    backend, why = backend_choice(facts)
    return DoctorReport(ranks=facts, backend=backend, why=why, links=links, problems=find_problems(facts, clocks))
