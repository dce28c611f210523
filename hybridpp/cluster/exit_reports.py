"""Exit reports: each rank records in the job's store how it ended, for ranks that wait for it."""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType

from hybridpp.errors import (
    ConfigError,
    LaunchError,
    PartitionError,
    PeerTimeoutError,
    ScheduleError,
    UnlikeCallsError,
)
from hybridpp.nn.torch_private import PrefixStore, Store

ExitReason = Callable[[int], str]
"""Returns how a rank ended, as sentences, given the rank; an empty text if it left no report."""


def no_exit_reason(rank: int) -> str:
    """The exit reason of a rank without a report."""
    return ""


# Errors in settings and in the order of calls, which are raised on every rank alike.
_OF_ALL_RANKS = (ConfigError, LaunchError, PartitionError, ScheduleError, UnlikeCallsError)
# Time that a rank waits for the same failure of rank 0 before it prints its own error.
_PATIENCE_S = 2.0
_LOOK_S = 0.02


class ExitReports:
    """The exit reports of the job's ranks.

    Attributes:
        store: of this attempt of the job.
        rank: this process.
    """

    def __init__(self, store: Store, rank: int):
        self.store: Store = PrefixStore("hybridpp endings", store)
        self.rank = rank
        self._has_reported = False

    def report_success(self) -> None:
        """Report that this rank leaves the job without an error. Only the first report of a rank is recorded."""
        self._set(f"left {self.rank}", "")

    def report_error(self, error: BaseException) -> None:
        """Report the error that this rank ends with."""
        self._set(f"failed {self.rank}", _text(error))

    def exit_reason(self, rank: int) -> str:
        """See :data:`ExitReason`."""
        if self._get(f"left {rank}") is not None:
            return (
                f"Rank {rank} left the job without an error: its script ended, or it called destroy(). What rank "
                f"{self.rank} is in must be called on every rank: put no `if coordinator.is_master()` around "
                "booster.save_model and the like, which write on rank 0 alone by themselves."
            )
        error = self._get(f"failed {rank}")
        return "" if error is None else f"It ended with {error}"

    def is_as_on_rank_0(self, error: BaseException) -> bool:
        """Whether rank 0 ends with the same error; waits up to 2 s for it."""
        until = time.monotonic() + _PATIENCE_S
        while (of_rank_0 := self._get("failed 0")) is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return of_rank_0 == _text(error)

    def _set(self, key: str, text: str) -> None:
        if self._has_reported:
            return
        self._has_reported = True
        # The process that hosts the store may have ended.
        with contextlib.suppress(RuntimeError):
            self.store.set(key, text)

    def _get(self, key: str) -> str | None:
        with contextlib.suppress(RuntimeError):
            if self.store.check([key]):
                return self.store.get(key).decode()
        return None


def timeout_error(peer: str, timeout_s: float) -> PeerTimeoutError:
    """The error of a rank whose wait has timed out."""
    return PeerTimeoutError(
        f"{peer} sent nothing for {timeout_s:.0f} s. It hangs, or runs other code: what communicates must be called on "
        "all ranks. Where one rank may work alone for so long, raise timeout_s of launch_from_torch or launch."
    )


def report_exit(exit_reports: ExitReports) -> Callable[[], None]:
    """Have this process report how it ends, unless it is killed; returns a function that stops that.

    Errors in settings are the same on every rank: rank 0 prints them, and others only if theirs differ.
    """
    before, process = sys.excepthook, os.getpid()

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if exit_reports.rank > 0 and isinstance(error, _OF_ALL_RANKS) and exit_reports.is_as_on_rank_0(error):
            sys.stderr.write(f"[rank {exit_reports.rank}] {kind.__name__}, as on rank 0, which prints it.\n")
        else:
            before(kind, error, trace)
        exit_reports.report_error(error)

    def report_success() -> None:
        # A forked child is not a rank.
        if os.getpid() == process:
            exit_reports.report_success()

    def stop() -> None:
        atexit.unregister(report_success)
        if sys.excepthook is report:
            sys.excepthook = before

    sys.excepthook = report
    atexit.register(report_success)
    return stop


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
