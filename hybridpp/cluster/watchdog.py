"""The watchdog of a rank: a thread that sees when the job makes no progress, has one rank report it, and ends the job.

Every tick it publishes what its rank is doing. A rank that has made no progress for half of its limit reads what all
ranks publish; at the limit it follows who waits for whom. If that leads to a rank that is over its own limit, or that
gives no sign of life, the first rank to find that raises the alarm and reports. A rank that waits for one that works
within its limit (it traces, for an hour) is patient.
"""

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from hybridpp.cluster.child_processes import end_process
from hybridpp.cluster.exit_reports import ExitReason
from hybridpp.cluster.hang_report import (
    EXIT_CODE,
    SuspectFinding,
    Suspicion,
    WatchedState,
    find_suspect,
    pause_report,
    report,
)
from hybridpp.cluster.patient_store import SilentStoreError, ask
from hybridpp.cluster.progress import Awaited, Progress
from hybridpp.cluster.python_stacks import (
    StackDump,
    dump_of,
    has_ended,
    is_compiling,
    stacks,
    user_code,
    worker_stacks,
)
from hybridpp.cluster.rank_process import RankProcess
from hybridpp.cluster.watchdog_board import StoreSilentError, WatchdogBoard
from hybridpp.cluster.watchdog_limits import WatchdogLimits
from hybridpp.nn.torch_private import active_nccl_calls

_LOGGER = logging.getLogger("hybridpp")
_THREADS = "hybridpp watchdog"
# A tick costs about 0.2 ms of a processor.
_MAX_TICK_S = 2.0
# A rank that has published nothing for so many ticks gives no sign of life, if it is half of the limit, too.
_SILENT_TICKS = 4
# How long the reporting rank waits for the suspect, and for others to see that it has reported.
_FINDING_S, _END_S = 2.5, 3.0
_EXIT_REASON_S = 1.0
# From seeing the end to the exit: the reporting rank goes first, as the launcher ends all others then.
_LEAD_S = 0.3
_POLL_S = 0.05
_END_OF_SCRIPT = "the end of the script, which a save in the background holds up"


class WatchedRank(NamedTuple):
    """What a watchdog asks of its rank.

    Attributes:
        progress: what the rank is doing.
        started: returns how many collectives of each group it has started, by
            :func:`~hybridpp.cluster.hang_report.group_key`.
        exit_reason: how another rank has ended.
        is_first_here: whether no other rank of this host has asked this.
    """

    progress: Progress
    started: Callable[[], Mapping[str, int]]
    exit_reason: ExitReason
    is_first_here: Callable[[str], bool] = lambda what: True


class Watchdog:
    """Watches this rank; make it in the rank's own thread.

    Args:
        board: where the ranks' watchdogs meet.
        rank: what it watches.
        limits: of the sections.
    """

    def __init__(self, board: WatchdogBoard, rank: WatchedRank, limits: WatchdogLimits):
        self._board, self._rank, self._limits = board, rank, limits
        self._tick_s = min(_MAX_TICK_S, min(limits.step, limits.data) / 5)
        self._main = threading.get_ident()
        self._dump = StackDump()
        self._pause_look_s = limits.step
        # By rank: its beat, since when, and whether that has changed as long as this rank has looked.
        self._seen: dict[int, tuple[int, float, bool]] = {}
        self._token: Any = None
        self._since = self._answered = time.monotonic()
        self._state = WatchedState(
            rank=board.rank, process=RankProcess.own(), stack_file=self._dump.descriptor, started={}
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=_THREADS, daemon=True)
        # Whoever reads the states finds one of each rank from now on.
        self._board.publish(self._state.as_text())
        rank.progress.is_watched = True

    def start(self) -> None:
        """Begin to watch, when all ranks have made theirs."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch, when this rank leaves the job; may be called again."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._rank.progress.is_watched = False
        if self._thread.is_alive():
            self._thread.join(_END_S)
        with contextlib.suppress(StoreSilentError):
            self._board.publish(replace(self._state, beat=self._state.beat + 1, has_left=True).as_text())
        self._board.close()
        self._dump.close()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._tick_s):
                self._tick()
        except Exception:
            _LOGGER.exception("[rank %d] the watchdog failed, and watches no more", self._board.rank)

    def _tick(self) -> None:
        own = self._observe()
        try:
            has_alarm = self._board.publish(own.as_text())
            self._answered = time.monotonic()
            if has_alarm:
                self._follow(self._board.get("alarm"))
            limit = self._limits.step if own.waits else self._limits.of_section(own.section, is_awaited=False)
            if own.age_s > limit / 2:
                self._look(own, limit)
            else:
                self._seen.clear()
            if own.section == "script" and not own.waits:
                self._tell_of_pause(own)
        except StoreSilentError:
            self._without_store(own)

    def _observe(self) -> WatchedState:
        """What the rank is doing now."""
        progress, now = self._rank.progress, time.monotonic()
        section, location = progress.section, _text_of(progress.location)
        awaited: Callable[[], Awaited | None] | None = progress.awaited
        device = None if progress.device is None else progress.device.work()
        if section == "script" and progress.in_background is not None and has_ended(self._main):
            section, location, awaited = "save", _END_OF_SCRIPT, progress.in_background
        token = (progress.num_changes, section, location, device)
        if token != self._token:
            self._token, self._since, self._pause_look_s = token, now, self._limits.step
        age_s = now - self._since
        if section in ("step", "script") and age_s > self._tick_s and is_compiling():
            section = "setup"
        self._state = replace(
            self._state,
            beat=self._state.beat + 1,
            section=section,
            location=location,
            age_s=round(age_s, 2),
            code=user_code(self._main),
            awaited=None if awaited is None else awaited(),
            device=device,
            started=self._rank.started(),
        )
        return self._state

    def _look(self, own: WatchedState, limit: float) -> None:
        """Read what all ranks publish; at the limit, decide."""
        now = time.monotonic()
        states = {state.rank: state for state in map(WatchedState.of, self._board.states(range(self._board.size)))}
        states[own.rank] = own
        for rank, state in states.items():
            beat, _, _ = self._seen.get(rank, (None, now, False))
            if beat != state.beat:
                self._seen[rank] = (state.beat, now, beat is not None)
        if own.age_s <= limit:
            return
        # All ranks of which the beat did not change, as long as this rank has looked.
        least = max(_SILENT_TICKS * self._tick_s, limit / 2 - 2 * self._tick_s)
        others = {rank: seen for rank, seen in self._seen.items() if rank != own.rank and not states[rank].has_left}
        silent = {rank for rank, (_, since, _) in others.items() if now - since > least}
        if any(not has_changed for rank, (_, _, has_changed) in others.items() if rank not in silent):
            # Of a rank that is gone, the last state says nothing. In a moment it is known whether it is.
            return
        suspicion = find_suspect(states, silent, own.rank)
        if self._is_over(suspicion, states, silent):
            self._raise_alarm(states, silent, suspicion)

    def _tell_of_pause(self, own: WatchedState) -> None:
        """Report, once, that the script keeps this rank, and others wait for it: it may be meant so, so all go on."""
        limit = self._limits.of_section("script", is_awaited=True)
        if not self._pause_look_s < own.age_s < limit:
            return
        states = {state.rank: state for state in map(WatchedState.of, self._board.states(range(self._board.size)))}
        states[own.rank] = own
        waiting = [
            rank
            for rank, state in states.items()
            if state.waits and state.age_s > self._limits.step / 2 and find_suspect(states, (), rank).rank == own.rank
        ]
        self._pause_look_s = math.inf if waiting else own.age_s + self._limits.step / 2
        if waiting:
            stack = stacks(self._main, _THREADS)
            _write(pause_report(states, own, waiting, stack, step_s=self._limits.step, limit_s=limit))

    def _is_over(self, suspicion: Suspicion, states: Mapping[int, WatchedState], silent: set[int]) -> bool:
        """Whether those that a chain leads to are over their limits."""
        if suspicion.kind == "cycle":
            return all(states[rank].age_s > self._limits.step for rank in suspicion.path)
        state = states[suspicion.rank]
        if suspicion.kind == "network" and state.connects and suspicion.rank not in silent:
            return state.age_s > self._limits.of_section(state.section, is_awaited=True)
        if suspicion.rank in silent or state.has_left or suspicion.kind == "network":
            return True
        if state.has_device_work:
            return state.age_s > self._limits.step
        return state.age_s > self._limits.of_section(state.section, is_awaited=len(suspicion.path) > 1)

    def _raise_alarm(self, states: Mapping[int, WatchedState], silent: set[int], suspicion: Suspicion) -> None:
        suspect = states[suspicion.rank]
        alarm = {
            "suspect": suspect.rank,
            "reporter": self._board.rank,
            "is_silent": suspect.rank in silent,
            "process": suspect.process,
            "stack_file": suspect.stack_file,
            "silent": [states[rank].process for rank in silent],
        }
        self._hold_rank()
        if not self._board.claim(alarm):
            self._follow(self._board.get("alarm"))
            return
        finding = self._ask(suspect, suspect.rank in silent)
        own = states[self._board.rank]
        reason = f"rank {own.rank} has made no progress for {own.age_s:.1f} s (watchdog_s), and reports."
        _write(report(states, silent, suspicion, finding, reason))
        self._board.put("end", True)
        others = set(states) - silent - {own.rank}
        until = time.monotonic() + _END_S
        with contextlib.suppress(StoreSilentError):
            # One that has seen it needs the store, which this rank may host, no more.
            while time.monotonic() < until and any(self._board.get(f"end {rank}") is None for rank in others):
                time.sleep(_POLL_S)
        self._end(states[rank].process for rank in silent)

    def _ask(self, suspect: WatchedState, is_silent: bool) -> SuspectFinding:
        """What the suspect tells; else what this process, or one on its host, sees of it."""
        if suspect.rank == self._board.rank:
            return self._own_finding()
        reason = self._exit_reason(suspect.rank)
        if suspect.process.condition and (is_silent or not suspect.process.is_in_kernel):
            return SuspectFinding(condition=suspect.process.condition, exit_reason=reason)
        if suspect.process.is_visible and is_silent:
            return _seen_from_outside(suspect.process, suspect.stack_file, reason)
        until = time.monotonic() + _FINDING_S
        while time.monotonic() < until:
            found = self._board.get("finding")
            if found is not None:
                return SuspectFinding(**found)
            time.sleep(_POLL_S)
        return _seen_from_outside(suspect.process, suspect.stack_file, reason)

    def _exit_reason(self, rank: int) -> str:
        """How a rank has ended; empty also where the store is busy, as while ranks connect over it."""
        try:
            return ask(lambda: self._rank.exit_reason(rank), _EXIT_REASON_S)
        except SilentStoreError:
            return ""

    def _own_finding(self) -> SuspectFinding:
        process = self._state.process
        return SuspectFinding(
            condition=process.condition if process.is_in_kernel else "",
            stack=stacks(self._main, _THREADS),
            stopped_children=process.stopped_children,
            waiting_children=[child.pid for child in process.children if child.is_in_kernel],
            worker_stacks=worker_stacks(process, self._dump.descriptor),
            recorder=active_nccl_calls(),
        )

    def _follow(self, alarm: Mapping[str, Any]) -> None:
        """Take part in the alarm that another rank has raised, and end."""
        self._hold_rank()
        process = RankProcess(*alarm["process"])
        if alarm["suspect"] == self._board.rank:
            self._board.put("finding", asdict(self._own_finding()))
        elif alarm["is_silent"] and process.is_visible and self._board.is_first(f"neighbour of {alarm['suspect']}"):
            # The reporting rank may be on another host.
            reason = self._exit_reason(alarm["suspect"])
            self._board.put("finding", asdict(_seen_from_outside(process, alarm["stack_file"], reason)))
        until = time.monotonic() + _FINDING_S + 2 * _END_S
        with contextlib.suppress(StoreSilentError):
            while self._board.get("end") is None and time.monotonic() < until:
                time.sleep(_POLL_S)
            self._board.put(f"end {self._board.rank}", True)
        time.sleep(_LEAD_S)
        self._end(RankProcess(*one) for one in alarm["silent"])

    def _without_store(self, own: WatchedState) -> None:
        """Report alone, one rank of each host: the process that hosts the store is stopped, gone or cut off."""
        silent_s = time.monotonic() - self._answered
        limit = self._limits.step if own.awaited else self._limits.of_section(own.section, is_awaited=False)
        if own.age_s <= limit or silent_s <= limit / 2:
            return
        awaited = f", waits for {own.awaited.what} of rank {own.awaited.ranks[0]}" if own.awaited else ""
        if self._rank.is_first_here("silent store"):
            _write(
                f"hybridpp: this job hangs: rank {own.rank} is in {own.where} for {own.age_s:.0f} s{awaited}, and the "
                f"job's store has not answered {own.process.host} for {silent_s:.0f} s. The first suspect is the "
                "process that hosts it (torchrun's agent, or rank 0), or the network to its host. The ranks of this "
                f"host end with exit code {EXIT_CODE}.\n"
            )
        self._end(())

    def _hold_rank(self) -> None:
        """From now on the rank reports nothing: errors show that other ranks end."""
        self._rank.progress.is_ending = True
        sys.excepthook = lambda *_: time.sleep(_END_S)

    def _end(self, silent: Any) -> None:
        """End this process, and those of the host that cannot end themselves."""
        for process in silent:
            process.kill_with_stopped_children()
        end_process(EXIT_CODE)


def _seen_from_outside(process: RankProcess, stack_file: int, reason: str) -> SuspectFinding:
    condition = process.condition
    if condition:
        return SuspectFinding(condition=condition, exit_reason=reason)
    return SuspectFinding(
        stack=dump_of(process, stack_file), exit_reason=reason, stopped_children=process.stopped_children
    )


def _text_of(location: Callable[[], str]) -> str:
    # The main thread goes on meanwhile, and objects of the user's may be part of it.
    try:
        return location()
    except Exception as error:
        return f"a place without a name ({type(error).__name__})"


def _write(text: str) -> None:
    # In one call, so that other ranks' lines are not between; and past the stream, whose lock may be what hangs.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), text.encode(errors="replace"))
