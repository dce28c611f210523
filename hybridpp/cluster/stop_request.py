"""A request to stop the job: a signal sets it on a rank, and the messages of steps tell all ranks.

Every rank sends the number of its signal with its batch, before a step, and with its losses, at the end of a training
step. So the ranks learn of a request from the same message, which they exchange anyway, and leave at the same step.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from hybridpp.cluster.launcher_notes import LauncherNotes
from hybridpp.errors import ConfigError, LaunchError

STOP_SIGNALS = ("SIGTERM", "SIGUSR1")
"""What tells a job to stop: SLURM, Kubernetes and torchrun send the first, SLURM's ``--signal=USR1@120`` the second."""


class StopRequest:
    """A request to stop, as one rank knows it.

    Args:
        signals: names of the signals that make one; none are caught before :meth:`begin_step`.
        notes: for the launcher.

    Attributes:
        own: number of the signal that this process got; 0: none.
        agreed: number of the signal that a rank got, on every rank since the same step; 0: none.
        orphaned: that the launcher of this rank has ended, as a clause; empty: it has not, or nobody knows.
        notes: for the launcher.
    """

    def __init__(self, signals: Sequence[str] = (), notes: LauncherNotes | None = None):
        self.own, self.agreed = 0, 0
        self.orphaned = ""
        self._was_asked = False
        self.notes = notes or LauncherNotes()
        self._signals = CaughtSignals(signals, self._received)
        self._has_begun = self._has_done_step = False

    @property
    def signals(self) -> tuple[int, ...]:
        """Numbers of the signals that make one."""
        return self._signals.numbers

    @property
    def is_agreed(self) -> bool:
        """Whether the job is to stop, for the script, which asks."""
        self._was_asked = True
        return self.agreed > 0

    def begin_step(self) -> None:
        """A step begins: from the first one on, a signal is a request.

        Before it, nothing would be lost, and a rank may compute for long without a message: signals end it at once.

        Raises:
            LaunchError: the launcher has ended, and the script, which never asks whether to stop, does not.
        """
        if self.orphaned and self.agreed and not self._was_asked:
            raise LaunchError(
                f"{self.orphaned}, and the script goes on: nobody would end it. Its last steps are lost. A script that "
                "saves and ends where booster.interrupted is True loses none."
            )
        if not self._has_begun:
            self._has_begun = True
            self._signals.catch()

    def step_done(self) -> None:
        """A step of training is done."""
        if not self._has_done_step:
            self._has_done_step = True
            self.notes.step_done()

    def heard(self, signals: Iterable[float]) -> None:
        """Take over what all ranks sent in a message. Every rank calls it for the same messages."""
        if not self.agreed:
            self.agreed = int(max(signals))

    def ignore(self) -> None:
        """Let signals do again what they did before."""
        self._signals.release()

    def _received(self, number: int) -> None:
        self.own = number


class CaughtSignals:
    """Handlers for signals, which call those that were there before.

    Signals that this process ignores, and those with a handler that Python does not know, are left alone. A forked
    child has the handlers of before.

    Args:
        names: of signals; those that the system does not have are left out.
        received: called with the number of a signal.

    Attributes:
        numbers: of the signals.

    Raises:
        ConfigError: a name is not that of a signal that can be caught.
    """

    def __init__(self, names: Sequence[str], received: Callable[[int], None]):
        if isinstance(names, str) or any(name not in _CATCHABLE for name in names):
            raise ConfigError(
                f"stop_signals are names of signals that a process can catch: got {names!r}. Use {STOP_SIGNALS}, or () "
                "to catch none."
            )
        found = (getattr(signal, name, None) for name in names)
        self.numbers = tuple(int(number) for number in found if number is not None)
        self._received = received
        self._before: dict[int, Any] = {}
        self._is_active = False

    def catch(self) -> None:
        """Set the handlers; elsewhere than in the main thread, which alone can, nothing is done."""
        if threading.current_thread() is not threading.main_thread() or self._is_active:
            return
        self._is_active = True
        for number in self.numbers:
            before = signal.getsignal(number)
            if before is not None and before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._handle)
        if self._before and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.release)

    def release(self) -> None:
        """Set the handlers of before, unless others have been set since; may be called again, and anywhere."""
        self._is_active = False
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if self._is_active:
            self._received(number)
        if callable(before):
            before(number, frame)
        elif not self._is_active and before is signal.SIG_DFL:
            # Whoever put a handler before this one calls it: do what would have been done.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_CATCHABLE = {f"SIG{name}" for name in ("TERM", "USR1", "USR2", "HUP", "QUIT", "XCPU")}
