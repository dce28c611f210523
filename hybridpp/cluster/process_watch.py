"""Watches processes: a rank is not to wait when one of the job is lost, nor to train on when its launcher has ended.

Where a rank waits for a peer that has ended, the system tells it. But it may wait for one that waits for that peer, and
so on: the loss would pass from rank to rank, each of which takes seconds to end; and while connections are made, nobody
would notice it. So a thread of each rank sleeps until a process of the job on this host ends; then waits for other
ranks end, too (:attr:`~hybridpp.cluster.progress.Progress.lost`). Nothing is sent, so no rank is needed for that.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping

from hybridpp.cluster.child_processes import end_process
from hybridpp.cluster.exit_codes import FAILED
from hybridpp.cluster.exit_reports import NO_REPORT
from hybridpp.cluster.failure_hook import FailureHook
from hybridpp.cluster.progress import Progress
from hybridpp.cluster.rank_process import ENDED, RankProcess
from hybridpp.cluster.stop_request import StopRequest
from hybridpp.errors import LaunchError, PeerError

# After the end of a peer: what it has sent is taken first, and may say more than that it is gone.
_NOTICE_S = 1.0
# After which a wait that nothing has ended, in code of a backend, ends with its process.
_BACKSTOP_S = 4.0
# For what a rank does before it ends, when its launcher has: as long as `hybridpp run` gives its ranks.
_SHUTDOWN_S = 600.0
# How often a rank looks that knows of such an end, and where the system cannot wake it.
_LOOK_S, _POLL_S = 0.2, 1.0
_LAUNCHER = -1
# Begins as the names of a watchdog's threads, whose reports leave them out.
_THREAD = "hybridpp watchdog of processes"


class ProcessWatch:
    """Watches the other ranks of this host, and the launcher.

    Args:
        progress: of this rank; told of a lost peer.
        stop: which the end of the launcher is a request of.
        failures: prints what ends this rank; None: nothing does.
        launcher: the process that started this rank and looks after it; None: none does, or nobody knows which.
    """

    def __init__(
        self,
        progress: Progress,
        stop: StopRequest,
        failures: FailureHook | None = None,
        launcher: RankProcess | None = None,
    ):
        self._progress, self._stop, self._failures, self._launcher = progress, stop, failures, launcher
        self._exit_reason: Callable[[int], str] = lambda rank: ""
        self._has_left: Callable[[int], bool] = lambda rank: False
        # By descriptor, which rank it tells of; and processes of ranks without one.
        self._descriptors: dict[int, int] = {}
        self._polled: dict[int, RankProcess] = {}
        self._lost: tuple[int, float] | None = None
        self._orphan_since: float | None = None
        self._wait: tuple[int, float] = (-1, 0.0)
        self._poll = select.poll()
        self._woken, self._wake = os.pipe()
        self._poll.register(self._woken, select.POLLIN)
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)

    def start(self, peers: Mapping[int, RankProcess]) -> None:
        """Begin to watch, while no rank may leave the job.

        Args:
            peers: of this host, by rank; without this rank.
        """
        launcher = {} if self._launcher is None else {_LAUNCHER: self._launcher}
        for rank, process in {**peers, **launcher}.items():
            descriptor = process.descriptor()
            if descriptor is None:
                self._polled[rank] = process
            else:
                self._descriptors[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)
        if self._descriptors or self._polled:
            self._thread.start()

    def joined(self, exit_reason: Callable[[int], str], has_left: Callable[[int], bool]) -> None:
        """The rank has joined its job, which ranks may leave from now on.

        Args:
            exit_reason: why a rank has ended.
            has_left: whether a rank has left the job in order.
        """
        self._exit_reason, self._has_left = exit_reason, has_left

    def stop(self) -> None:
        """Watch no more; may be called again."""
        if self._is_stopped:
            return
        self._is_stopped = True
        os.write(self._wake, b"\0")
        if self._thread.is_alive():
            self._thread.join()
        for descriptor in (*self._descriptors, self._woken, self._wake):
            os.close(descriptor)

    def _run(self) -> None:
        while True:
            pause_s = _POLL_S if self._polled else None
            if self._lost is not None or self._orphan_since is not None:
                pause_s = _LOOK_S
            found = [descriptor for descriptor, _ in self._poll.poll(None if pause_s is None else pause_s * 1e3)]
            if self._is_stopped:
                return
            ended = [rank for rank, process in self._polled.items() if process.condition == ENDED]
            for rank in ended:
                del self._polled[rank]
            for descriptor in found:
                ended.append(self._descriptors.pop(descriptor))
                self._poll.unregister(descriptor)
                os.close(descriptor)
            for rank in sorted(ended):
                self._ended(rank)
            if self._lost is not None:
                self._look_at_waits(*self._lost)
            if self._orphan_since is not None and time.monotonic() - self._orphan_since > _SHUTDOWN_S:
                why = self._launcher_is_gone()
                self._end(LaunchError(f"{why}, and the script was not done {_SHUTDOWN_S:g} s later."))

    def _ended(self, rank: int) -> None:
        if rank == _LAUNCHER:
            self._orphan_since = time.monotonic()
            self._stop_job()
        elif self._lost is None and not self._has_left(rank):
            self._lost = rank, time.monotonic()

    def _stop_job(self) -> None:
        """Tell this rank to stop, as the launcher would by a signal."""
        self._stop.orphaned = self._launcher_is_gone()
        if self._failures is None or self._failures.reports.is_first_here("end of the launcher"):
            _write(
                f"hybridpp: {self._stop.orphaned}, so this job stops. A script that looks at booster.interrupted saves "
                "and ends; else its last steps are lost.\n"
            )
        os.kill(os.getpid(), next(iter(self._stop.signals), signal.SIGTERM))

    def _launcher_is_gone(self) -> str:
        return f"the launcher of the ranks ({self._launcher}) has ended"

    def _look_at_waits(self, lost: int, since: float) -> None:
        """Let waits for other ranks end by an error; where one does not, end the process."""
        progress, now = self._progress, time.monotonic()
        if now - since < _NOTICE_S or progress.is_ending:
            return
        if not progress.lost:
            reason = "" if progress.is_connecting else self._exit_reason(lost)  # the store may be in use
            progress.lost = f"rank {lost} is gone: its process has ended. {reason or NO_REPORT}"
        if progress.awaited is None and not progress.is_connecting:
            self._wait = -1, now
        elif self._wait[0] != progress.num_changes:
            self._wait = progress.num_changes, now
        elif now - self._wait[1] > (_NOTICE_S if progress.is_connecting else _BACKSTOP_S):
            self._end(PeerError(progress.lost))

    def _end(self, error: Exception) -> None:
        if self._failures is not None:
            _write(self._failures.line_of(error))
        end_process(FAILED)


def _write(text: str) -> None:
    # Nobody may read it any more; and past the stream, whose lock another thread may hold for ever.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), text.encode(errors="replace"))
