"""Which rank prints the error that ends it: one mistake is one message, however many ranks it ends.

The first rank that fails prints all. A rank that fails only because another one did prints nothing, or one line where
that one could not say why (it was killed). A rank with the same error prints nothing, one with another error a line.
"""

import atexit
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist

from hybridpp.cluster.child_processes import kill_children
from hybridpp.cluster.exit_reports import ExitReports
from hybridpp.cluster.failure_text import failure_line, failure_text
from hybridpp.cluster.gloo_errors import is_gloo_error
from hybridpp.cluster.progress import Progress
from hybridpp.cluster.stop_request import StopRequest
from hybridpp.errors import DeadlockError, PeerError

# Time that ranks which were not the first leave to it: to write its report, and then to be the first that ends.
_LINGER_S = 1.0


class Telling(Enum):
    """How much a rank prints of its error."""

    ALL = "all"
    LINE = "line"
    NOTHING = "nothing"


class FailureOptions(NamedTuple):
    """How failures are printed.

    Attributes:
        full_traceback: whether frames of hybridpp and torch are shown.
        error_file: where torchrun expects an error in its own form; None: nowhere.
    """

    full_traceback: bool = False
    error_file: Path | None = None


class FailureHook:
    """The ``sys.excepthook`` of a rank.

    Args:
        reports: of this rank.
        size: number of ranks.
        options: how failures are printed.

    Attributes:
        reports: as given, until the job is joined.
    """

    def __init__(self, reports: ExitReports, size: int, options: FailureOptions):
        self.reports, self._size, self._options = reports, size, options
        self._stop, self._progress = StopRequest(), Progress()
        self._leave: Callable[[], None] = lambda: None
        self._before: Callable[..., object] = sys.excepthook
        self._decided: tuple[BaseException, Telling] | None = None
        self._process = os.getpid()

    def install(self) -> None:
        """Print errors from now on, in the place of a hook of an earlier attempt to launch."""
        if isinstance(self._before, FailureHook):
            self._before.remove()
            self._before = sys.excepthook
        sys.excepthook = self

    def joined(
        self, reports: ExitReports, stop: StopRequest, progress: Progress, leave: Callable[[], None] = lambda: None
    ) -> None:
        """The rank has joined its job: report in the job's store, from now on also an end without an error.

        Args:
            reports: in that store.
            stop: a rank that has failed catches no signals any more.
            progress: of the rank; told where it ends because a peer is lost.
            leave: tells the other ranks of an end without an error, beside the reports.
        """
        reports.folder, self.reports, self._stop = self.reports.folder, reports, stop
        self._progress, self._leave = progress, leave
        # Torch has put a hook in front, which collects what is printed until a rank has ended.
        sys.excepthook = self
        atexit.register(self._report_success)

    def remove(self) -> None:
        """Print nothing more, unless another hook was put in front."""
        atexit.unregister(self._report_success)
        if sys.excepthook is self:
            sys.excepthook = self._before

    def decide(self, error: BaseException) -> Telling:
        """What this rank will print of ``error``, which is about to end it; the first decision counts."""
        if self._decided is None or self._decided[0] is not error:
            self._decided = error, self._decide(error)
        return self._decided[1]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print what is to be printed of an error that nobody caught."""
        if os.getpid() != self._process:  # a forked child is not a rank
            self._before(kind, error, trace)
            return
        self._stop.ignore()
        if is_of_peer(error) and not self._progress.lost:  # a save in the background waits no longer, either
            self._progress.lost = failure_line(error)
        # Else the interpreter waits for them at its end.
        kill_children(only_stopped=True)
        telling = self.decide(error)
        if telling is Telling.ALL:
            self._print_all(kind, error, trace)
            self._write_error_file(error)
            return
        sys.stderr.write(self.line_of(error))
        sys.stderr.flush()
        time.sleep(_LINGER_S)

    def line_of(self, error: BaseException) -> str:
        """A line of an error that ends this process; empty where this rank says nothing of it."""
        if self.decide(error) is Telling.NOTHING:
            return ""
        return f"hybridpp: rank {self.reports.rank} of {self._size} ends: {failure_line(error)}\n"

    def _decide(self, error: BaseException) -> Telling:
        reports = self.reports
        reports.report_error(error)
        if not isinstance(error, Exception):  # Ctrl-C reaches all
            return Telling.ALL if reports.is_first("interruption") else Telling.NOTHING
        if is_of_peer(error):
            if reports.first_error(_LINGER_S) is None and reports.is_first("loss of a rank"):
                return Telling.LINE
            return Telling.NOTHING
        if reports.claim_first_error(error):
            return Telling.ALL
        is_known = reports.is_like_first_error(error, _LINGER_S)
        return Telling.NOTHING if is_known or not reports.is_first_of_kind(error) else Telling.LINE

    def _print_all(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_plain = self._before in (sys.__excepthook__, None)
        if is_plain and isinstance(error, Exception | KeyboardInterrupt):
            text = failure_text(error, self.reports.rank, self._size, full=self._options.full_traceback)
            sys.stderr.write(text)
            sys.stderr.flush()
        else:
            self._before(kind, error, trace)

    def _write_error_file(self, error: BaseException) -> None:
        """Let torchrun name this error as the first one, in its table of failures."""
        path = self._options.error_file
        if path is None or path.exists():
            return
        text = f"{failure_line(error)[:300]} (rank {self.reports.rank} has printed it)"
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            path.write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))

    def _report_success(self) -> None:
        # Also called after an error.
        if os.getpid() == self._process and self._decided is None:
            self._leave()
            self.reports.report_success()
            self._stop.notes.ended()


def is_of_peer(error: BaseException) -> bool:
    """Whether a rank has this error because another one failed, hangs or is gone."""
    if isinstance(error, PeerError | DeadlockError | dist.DistNetworkError | dist.DistBackendError):
        return True
    # Of collectives that the script calls itself.
    return is_gloo_error(error)
