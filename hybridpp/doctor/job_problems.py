"""Problems of several ranks: what differs between them, and what they share."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from hybridpp.cluster import name_ranks
from hybridpp.cluster.devices import RankDevice, conflicts
from hybridpp.doctor.problem import Problem
from hybridpp.doctor.rank_facts import RankFacts

# Packages whose versions decide what ranks compute and send.
_ALIKE = ("python", "hybridpp", "torch", "transformers")
_MAX_CLOCK_S = 1.0


def job_problems(facts: Sequence[RankFacts], clocks: Sequence[float]) -> Iterator[Problem]:
    """Of a job.

    Args:
        facts: of all ranks, in order.
        clocks: how far each rank's clock is ahead of rank 0's, in seconds; empty: not measured.
    """
    for name in _ALIKE:
        yield from _differing(facts, name, partial(_version, name))
    yield from _differing(facts, "CUDA of torch", lambda one: one.builds["cuda"] or "none")
    if len({one.host.name for one in facts}) == 1:
        yield from _differing(facts, "folder of hybridpp", lambda one: one.location)
    devices = [RankDevice(one.host.name, one.machine, one.hardware) for one in facts]
    if any(device.hardware for device in devices) and (found := conflicts(devices)):
        yield Problem(
            level="warning",
            what=f"every rank needs a CUDA device of its own for nccl: {found}.",
            way_out="Start at most as many ranks on a host as it has devices.",
        )
    yield from _host_problems(facts)
    late = [rank for rank, offset in enumerate(clocks) if abs(offset) > _MAX_CLOCK_S]
    if late:
        values = ", ".join(f"{clocks[rank]:+.1f} s" for rank in late[:4])
        yield Problem(
            level="warning",
            what=f"clocks of hosts differ from that of rank 0: {name_ranks(late[:4])} by {values}. Times in logs and "
            "the order of checkpoints by time are then wrong.",
            way_out="Synchronize the clocks (chrony, ntpd).",
        )


def _version(name: str, facts: RankFacts) -> str:
    return facts.versions.get(name, "none")


def _differing(facts: Sequence[RankFacts], name: str, value: Callable[[RankFacts], str]) -> Iterator[Problem]:
    ranks_of: dict[str, list[int]] = {}
    for one in facts:
        ranks_of.setdefault(value(one), []).append(one.rank)
    if len(ranks_of) > 1:
        clauses = ", ".join(f"{found} on {name_ranks(ranks[:4])}" for found, ranks in ranks_of.items())
        yield Problem(
            level="error",
            what=f"{name} must be the same on all ranks: got {clauses}.",
            way_out="Install the same environment on every host.",
        )


def _host_problems(facts: Sequence[RankFacts]) -> Iterator[Problem]:
    """What harms only because other hosts have to reach this one."""
    hosts = {one.host_id: one for one in facts}
    if len(hosts) == 1:
        return
    for one in hosts.values():
        local = one.host.addresses and all(address.startswith(("127.", "::1")) for address in one.host.addresses)
        if local and "GLOO_SOCKET_IFNAME" not in one.environment:
            yield Problem(
                level="hint",
                what=f"the name of host {one.host.name} resolves to {one.host.addresses[0]}, where other hosts do not "
                "reach it: plain torchrun tells them this name, and where another library joins the job, gloo takes "
                "this address.",
                way_out="Use hybridpp run; or pass --local-addr to torchrun, and set GLOO_SOCKET_IFNAME.",
            )
    numbers = {host: sum(one.host_id == host for one in facts) for host in hosts}
    if len(set(numbers.values())) > 1:
        yield Problem(
            level="hint",
            what="hosts have different numbers of ranks: "
            + ", ".join(f"{hosts[host].host.name} {number}" for host, number in numbers.items())
            + ".",
            way_out="Start as many on each, so that tensor-parallel ranks lie on one host.",
        )
