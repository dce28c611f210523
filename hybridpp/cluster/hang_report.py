"""Who waits for whom when a job hangs, whom that leads to, and a report of it: functions of what the ranks publish."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from hybridpp.cluster.progress import CONNECTION, Awaited, DeviceWork, Section
from hybridpp.cluster.rank_process import RankProcess
from hybridpp.cluster.rendezvous import list_ranks

EXIT_CODE = 75
"""With which ranks end after a report: that of a temporary failure (EX_TEMPFAIL)."""

# Of larger jobs, the ranks that lead to the suspect are shown, and these many others.
_MAX_SHOWN = 16
_SECTIONS: dict[Section, str] = {
    "script": "the script",
    "setup": "setup",
    "data": "reading a batch",
    "step": "a step",
    "save": "a checkpoint",
}


@dataclass(frozen=True, kw_only=True)
class WatchedState:
    """What a rank publishes.

    Attributes:
        rank: of the world.
        process: of the rank.
        stack_file: descriptor of :class:`~hybridpp.cluster.python_stacks.StackDump` there.
        beat: counts how often it was published.
        section: of its code.
        location: in the section.
        age_s: seconds since it came there.
        code: where the user's code is.
        awaited: what it waits for; None: no rank.
        device: how far its device is; None: nobody knows.
        started: by group, how many collectives it has started.
        has_left: whether it has left the job.
    """

    rank: int
    process: RankProcess
    stack_file: int = -1
    beat: int = 0
    section: Section = "script"
    location: str = ""
    age_s: float = 0.0
    code: str = ""
    awaited: Awaited | None = None
    device: DeviceWork | None = None
    started: Mapping[str, int] = field(default_factory=dict)
    has_left: bool = False

    def as_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> "WatchedState":
        """From JSON."""
        values: dict[str, Any] = json.loads(text)
        values["process"] = RankProcess(*values["process"])
        if values["awaited"] is not None:
            what, ranks, group, number = values["awaited"]
            values["awaited"] = Awaited(what, tuple(ranks), group, number)
        if values["device"] is not None:
            step, action, needs, finished = values["device"]
            values["device"] = DeviceWork(step, action, needs and (needs[0], needs[1]), tuple(finished))
        return cls(**values)

    @property
    def where(self) -> str:
        """Section and location, in words."""
        text = self.location or _SECTIONS[self.section]
        if self.section == "script" and self.code:
            text = f"your code at {self.code}"
        if self.has_device_work:
            assert self.device is not None
            text += f" (its device has not finished {self.device.action})"
        return text

    @property
    def has_device_work(self) -> bool:
        """Whether its device has not finished an action."""
        return self.device is not None and self.device.action != ""

    @property
    def connects(self) -> bool:
        """Whether it connects to other ranks, and waits for all of them."""
        return self.awaited is not None and self.awaited.what == CONNECTION

    @property
    def waits(self) -> bool:
        """Whether it may wait for other ranks, itself or on its device."""
        return self.awaited is not None or self.has_device_work


def group_key(name: str, ranks: Collection[int]) -> str:
    """The name of a group in :attr:`WatchedState.started`."""
    return f"{name} {','.join(map(str, sorted(ranks)))}"


class Suspicion(NamedTuple):
    """Whom a rank waits for in the end.

    Attributes:
        path: the ranks from the one that waits to the suspect; each waits for the next.
        kind: ``"rank"``: the last one waits for nobody. ``"cycle"``: it waits for an earlier one of the path.
            ``"network"``: all ranks that it waits for have come, so the connection between them is at fault.
    """

    path: tuple[int, ...]
    kind: str = "rank"

    @property
    def rank(self) -> int:
        """The suspect; of a cycle, its first rank."""
        return self.path[-1]


def find_suspect(states: Mapping[int, WatchedState], silent: Collection[int], start: int) -> Suspicion:
    """Follow who waits for whom.

    Args:
        states: of all ranks.
        silent: ranks that publish nothing any more; what they waited for before does not count.
        start: the rank that waits.
    """
    path = [start]
    while True:
        state = states[path[-1]]
        is_done = state.rank in silent or state.has_left
        candidates = None if is_done else _awaited_by(state, states, silent)
        if candidates is None:
            return Suspicion(tuple(path))
        if not candidates:
            return Suspicion(tuple(path), "network")
        # One that waits is rather the effect of another's hang.
        following = max(
            candidates, key=lambda rank: (rank in silent, not states[rank].waits, states[rank].age_s, -rank)
        )
        if following in path:
            return Suspicion(tuple(path[path.index(following) :]), "cycle")
        path.append(following)


def _awaited_by(
    state: WatchedState, states: Mapping[int, WatchedState], silent: Collection[int]
) -> Sequence[int] | None:
    """The ranks that a rank waits for and that have not come; None: it waits for none."""
    awaited = state.awaited
    if awaited is not None and awaited.number is None:
        return awaited.ranks
    if awaited is not None and awaited.number is not None:
        key, number = group_key(awaited.group, (*awaited.ranks, state.rank)), awaited.number

        def is_missing(rank: int) -> bool:
            return rank in silent or states[rank].has_left or states[rank].started.get(key, 0) < number

        return [rank for rank in awaited.ranks if is_missing(rank)]
    if state.device is None or state.device.needs is None:
        return None
    rank, label = state.device.needs
    other = states[rank].device
    is_finished = other is not None and (other.step > state.device.step or label in other.finished)
    return None if is_finished else [rank]


@dataclass(frozen=True, kw_only=True)
class SuspectFinding:
    """What the suspect's host and the suspect tell about it.

    Attributes:
        condition: why none of its threads runs, in words; empty: they may run.
        exit_reason: how it ended, if it reported that.
        stack: of its threads; empty: there is none.
        stopped_children: processes that it started and that are stopped.
        waiting_children: those that are in a wait of the kernel.
        worker_stacks: what workers of its data loaders do, by the numbers of their processes.
        recorder: what NCCL's flight recorder holds there; empty: there is none.
    """

    condition: str = ""
    exit_reason: str = ""
    stack: str = ""
    stopped_children: Sequence[int] = ()
    waiting_children: Sequence[int] = ()
    worker_stacks: Mapping[str, str] = field(default_factory=dict)
    recorder: str = ""


def report(
    states: Mapping[int, WatchedState],
    silent: Collection[int],
    suspicion: Suspicion,
    finding: SuspectFinding,
    reason: str,
) -> str:
    """The report of a hang, as the lines that a rank prints.

    Args:
        states: of all ranks.
        silent: ranks that publish nothing any more.
        suspicion: whom the reporting rank waits for.
        finding: about the suspect.
        reason: who reports, and why now.
    """
    lines = [f"hybridpp: this job hangs: {reason}"]
    shown = [*dict.fromkeys((*suspicion.path, *states))][:_MAX_SHOWN]
    lines += [f"  rank {rank}: {_line(states[rank], rank in silent)}" for rank in sorted(shown)]
    if len(states) > len(shown):
        lines.append(f"  … and {len(states) - len(shown)} more ranks")
    lines += _conclusion(states, silent, suspicion, finding)
    lines.append(f"All ranks end with exit code {EXIT_CODE}; torchrun --max-restarts starts such a job again.")
    return "\n".join(lines) + "\n"


def pause_report(
    states: Mapping[int, WatchedState],
    own: WatchedState,
    waiting: Sequence[int],
    stack: str,
    *,
    step_s: float,
    limit_s: float,
) -> str:
    """The report of a rank that the script keeps while others wait for it, as the lines that it prints.

    Args:
        states: of all ranks.
        own: of the rank that reports, in the script.
        waiting: the ranks that wait for it, themselves or through others.
        stack: of its threads.
        step_s: the limit of a step.
        limit_s: that of the script, after which the job ends.
    """
    lines = [
        f"hybridpp: {list_ranks(list(waiting))} wait{'s' if len(waiting) == 1 else ''} for rank {own.rank}, which has "
        f"been in your script for {own.age_s:.1f} s (watchdog_s). This may be meant so: the job goes on."
    ]
    shown = sorted([*dict.fromkeys((own.rank, *waiting, *states))][:_MAX_SHOWN])
    lines += [f"  rank {rank}: {_line(states[rank], False)}" for rank in shown]
    lines += [
        f"Rank {own.rank} ({own.process}) has not come to {states[waiting[0]].where}: it is in {own.where}.",
        f"The Python stack of rank {own.rank}, innermost call last:\n{stack.rstrip()}",
        f"If it lasts for {limit_s:g} s, all ranks end with exit code {EXIT_CODE}. To set another limit, change "
        f'"script" in launch_from_torch(watchdog_s={{"step": {step_s:g}, "script": {limit_s:g}}}).',
    ]
    return "\n".join(lines) + "\n"


def _line(state: WatchedState, is_silent: bool) -> str:
    if state.has_left:
        return "has left the job"
    if is_silent:
        return f"gives no sign of life; last seen in {state.where}"
    text = f"in {state.where} for {state.age_s:.0f} s"
    if state.awaited is not None:
        group = f" (group {state.awaited.group})" if state.awaited.group else ""
        text += f", waits for {state.awaited.what} of {list_ranks(list(state.awaited.ranks))}{group}"
    return text


def _conclusion(
    states: Mapping[int, WatchedState], silent: Collection[int], suspicion: Suspicion, finding: SuspectFinding
) -> list[str]:
    suspect = suspicion.rank
    state = states[suspect]
    chain = ", ".join(f"rank {one} waits for rank {other}" for one, other in pairwise(suspicion.path))
    if suspicion.kind == "cycle":
        lines = [f"Ranks wait for each other: {chain}, rank {suspect} waits for rank {suspicion.path[0]}."]
    elif suspicion.kind == "network":
        awaited = () if state.awaited is None else state.awaited.ranks
        hosts = {states[rank].process.host for rank in (suspect, *awaited)}
        who = f"the connection between {'their hosts' if len(hosts) > 1 else 'them'}"
        # Torch does not tell the others whether it has begun.
        who += ", or one of them that stands still in torch" if state.connects else ""
        who += f": {chain}." if chain else "."
        lines = [f"All ranks that rank {suspect} waits for have come, so the suspect is {who}"]
    else:
        lines = [f"The first suspect is rank {suspect} ({state.process})" + (f": {chain}." if chain else ".")]
        lines += _about(state, states, suspect in silent, suspicion, finding)
    if finding.recorder:
        lines.append(f"NCCL's flight recorder on rank {suspect}:\n{finding.recorder.rstrip()}")
    for pid, stack in finding.worker_stacks.items():
        lines.append(f"The Python stack of process {pid}, which loads data for it, innermost call last:\n{stack}")
    if finding.stack:
        lines.append(f"The Python stack of rank {suspect}, innermost call last:\n{finding.stack.rstrip()}")
    elif not finding.condition:
        lines.append(f"Rank {suspect} did not show its Python stack.")
    return lines


def _about(
    state: WatchedState,
    states: Mapping[int, WatchedState],
    is_silent: bool,
    suspicion: Suspicion,
    finding: SuspectFinding,
) -> list[str]:
    """What can be told of a suspect."""
    rank, lines = state.rank, []
    if finding.condition and finding.stack:
        lines.append(f"Its process {finding.condition}. It is in {state.where}.")
    elif finding.condition:
        lines.append(f"Its process {finding.condition}, so it cannot show its stack. {finding.exit_reason}".rstrip())
    elif is_silent and finding.stack:
        lines.append(f"Rank {rank} runs no Python code: code in C holds its interpreter.")
    elif is_silent:
        lines.append(f"Nobody sees its process: its host may be down, or cut off. {finding.exit_reason}".rstrip())
    elif state.has_left:
        lines.append(f"It has left the job. {finding.exit_reason}".rstrip())
    elif state.section == "script" and len(suspicion.path) > 1:
        waiting = states[suspicion.path[-2]]
        lines.append(f"Rank {rank} has not come to {waiting.where}: it is in {state.where}.")
    elif state.section == "data":
        lines.append(f"Rank {rank} is {state.where}, which gives none.")
    else:
        lines.append(f"Rank {rank} waits for no rank: it is in {state.where}.")
    if finding.stopped_children:
        pids = ", ".join(map(str, finding.stopped_children))
        lines.append(f"Processes that it started are stopped: {pids}.")
    if finding.waiting_children:
        pids = ", ".join(map(str, finding.waiting_children))
        lines.append(f"Processes that it started wait in the kernel, as where a disk does not answer: {pids}.")
    return lines
