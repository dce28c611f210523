"""The process of a rank, as other processes of its host see it: whether it runs, is stopped or has ended."""

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# States of /proc/<pid>/stat in which no thread of the process will run by itself; in "D", its first one.
_CONDITIONS = {
    "T": "is stopped (SIGSTOP, or job control)",
    "t": "is stopped by a debugger",
    "D": "is in a wait of the kernel that nothing interrupts: a disk, a network file system, or a device",
    "Z": "has ended",
    "X": "has ended",
}
ENDED = "has ended"
"""The condition of a process that is there no more."""
_IN_KERNEL = _CONDITIONS["D"]


class RankProcess(NamedTuple):
    """Identity of a process.

    Attributes:
        host: name of its host.
        view: differs between processes that cannot see each other: of another host, or another container.
        pid: number of the process.
        start: when the kernel started it, so that a later process of that number is not taken for it.
    """

    host: str
    view: str
    pid: int
    start: str

    @classmethod
    def own(cls) -> "RankProcess":
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "RankProcess":
        """A process that runs now, and that this one sees."""
        return cls(socket.gethostname(), _view(), pid, _stat(pid)[1])

    @classmethod
    def ancestor_without(cls, variables: Mapping[str, str]) -> "RankProcess | None":
        """The nearest ancestor that was not started with these variables in its environment: it, or its child, set
        them. None: the system does not tell."""
        pid = os.getppid()
        while pid > 1 and variables.items() <= environment_of(pid).items():
            pid = _parent(pid)
        found = cls.of(pid)
        return found if found.start else None

    @property
    def is_visible(self) -> bool:
        """Whether this process can see it."""
        return self.view == _view() and bool(self.view)

    @property
    def condition(self) -> str:
        """Why none of its threads runs, in words; empty: they may run, or nobody can tell from here."""
        if not self.is_visible:
            return ""
        state, start = _stat(self.pid)
        return _CONDITIONS.get(state, "") if start == self.start else ENDED

    def descriptor(self) -> int | None:
        """A descriptor that can be read when it has ended, to be closed; None: it has, or the system has none."""
        if not hasattr(os, "pidfd_open") or not self.is_visible:
            return None
        try:
            found = os.pidfd_open(self.pid)
        except OSError:  # also Linux before 5.3, and containers that forbid it
            return None
        if _stat(self.pid)[1] == self.start:
            return found
        os.close(found)
        return None

    @property
    def stopped_children(self) -> list[int]:
        """Processes that it started and that are stopped: workers that load data, for example."""
        if not self.is_visible:
            return []
        return [pid for pid in _children(self.pid) if _stat(pid)[0] in ("T", "t")]

    @property
    def is_in_kernel(self) -> bool:
        """Whether its first thread is in a wait of the kernel that nothing interrupts; others may run."""
        return self.condition == _IN_KERNEL

    @property
    def children(self) -> "list[RankProcess]":
        """Processes that it started, and that have not ended."""
        if not self.is_visible:
            return []
        states = {pid: _stat(pid) for pid in _children(self.pid)}
        return [
            self._replace(pid=pid, start=start) for pid, (state, start) in states.items() if state not in ("", "Z", "X")
        ]

    def catches(self, signal_number: int) -> bool:
        """Whether it has a handler of a signal."""
        with contextlib.suppress(OSError, ValueError):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
            return self.is_visible and bool(int(status["SigCgt"], 16) >> (signal_number - 1) & 1)
        return False

    def send(self, signal_number: int) -> bool:
        """Send it a signal; returns whether it is there to get it."""
        if not self.is_visible or _stat(self.pid)[1] != self.start:
            return False
        try:
            os.kill(self.pid, signal_number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def kill_with_stopped_children(self) -> None:
        """End it, if it is there; its stopped children would stay behind."""
        stopped = self.stopped_children if self.send(0) else []
        self.send(signal.SIGKILL)
        for pid in stopped:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _view() -> str:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Copies of a virtual machine have one boot id.
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {socket.gethostname()}"
    return ""


def _stat(pid: int) -> tuple[str, str]:
    """State and start of a process; empty where it is not there, or the system does not tell."""
    with contextlib.suppress(OSError, IndexError):
        # After the name, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    return "", ""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def environment_of(pid: int) -> dict[str, str]:
    """The variables with which a process was started; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        return dict(pair.partition("=")[::2] for pair in pairs)
    return {}


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found
