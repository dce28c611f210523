"""Exit reports: each rank records how it ended, for ranks that wait for it, and for those that fail after it."""

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hybridpp.cluster.failure_text import failure_line
from hybridpp.cluster.patient_store import ask
from hybridpp.errors import PeerTimeoutError
from hybridpp.nn.torch_private import PrefixStore, Store

ExitReason = Callable[[int], str]
"""Returns how a rank ended, as sentences, given the rank; an empty text if it left no report."""

NO_REPORT = "It has reported no error: it was killed, as where memory runs out, or its own output says why."
"""Of a rank that is gone, where its exit reason is empty."""

_LOOK_S = 0.02
_FIRST_ERROR = "text of the first error"


def no_exit_reason(rank: int) -> str:
    """The exit reason of a rank without a report."""
    return ""


class ExitReports:
    """The exit reports of the job's ranks.

    They are in the store of this attempt of the job. Before there is one, and after the rank that hosts it has ended,
    ranks of one host find in a folder what they must not all say.

    Args:
        store: of this attempt of the job; None: there is none yet.
        rank: this process.
        folder: that the ranks of this host share; None: there is none.

    Attributes:
        store: its part of it.
        rank: as given.
        folder: as given.
    """

    def __init__(self, store: Store | None, rank: int, folder: Path | None = None):
        self.store: Store | None = None if store is None else PrefixStore("hybridpp endings", store)
        self.rank, self.folder = rank, folder
        self._has_reported = False

    def report_success(self) -> None:
        """Report that this rank leaves the job without an error. Only the first report of a rank is recorded."""
        self._report(f"left {self.rank}", "")

    def report_error(self, error: BaseException) -> None:
        """Report the error that this rank ends with."""
        self._report(f"failed {self.rank}", f"{type(error).__name__}: {error}")

    def exit_reason(self, rank: int) -> str:
        """See :data:`ExitReason`."""
        if self.has_left(rank):
            return (
                f"Rank {rank} left the job without an error: its script ended, or it called destroy(). What rank "
                f"{self.rank} is in must be called on every rank: put no `if coordinator.is_master()` around "
                "booster.save_model and the like, which write on rank 0 alone by themselves."
            )
        error = self._get(f"failed {rank}")
        return "" if error is None else f"It ended with {error}"

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left the job without an error."""
        return self._get(f"left {rank}") is not None

    def claim_first_error(self, error: BaseException) -> bool:
        """Whether no rank had an error of its own before this one; then the others can learn of it."""
        if not self.is_first("error"):
            return False
        self._set(_FIRST_ERROR, failure_line(error))
        return True

    def first_error(self, patience_s: float) -> str | None:
        """The first error, as a line; None: there was none after ``patience_s``."""
        until = time.monotonic() + patience_s
        while (text := self._get(_FIRST_ERROR)) is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return text

    def is_like_first_error(self, error: BaseException, patience_s: float) -> bool:
        """Whether the first error says what this one says: numbers, as those of ranks, may differ."""
        first = self.first_error(patience_s)
        if first is None:
            return False
        known, own = _without_numbers(first), _without_numbers(failure_line(error))
        # One may quote the text of the other: "saving failed on rank 0: ...".
        return known.partition(": ")[2] in own or own.partition(": ")[2] in known

    def is_first_of_kind(self, error: BaseException) -> bool:
        """Whether no rank has asked this of an error that says the same."""
        return self.is_first(hashlib.sha256(_without_numbers(failure_line(error)).encode()).hexdigest()[:16])

    def is_first(self, what: str) -> bool:
        """Whether no rank has asked this before."""
        with self._asked():
            if (store := self.store) is not None:
                return int(ask(lambda: store.add(f"first {what}", 1))) == 1
        return self.is_first_here(what)

    def is_first_here(self, what: str) -> bool:
        """Whether no rank of this host has asked this before; True where they share no folder."""
        with contextlib.suppress(OSError):
            if self.folder is not None:
                (self.folder / f"first {what}").touch(exist_ok=False)
                return True
        return self.folder is None or not (self.folder / f"first {what}").exists()

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """The store is asked inside, as long as the process that hosts it lives and answers; in vain once."""
        try:
            yield
        except RuntimeError:
            self.store = None

    def _report(self, key: str, text: str) -> None:
        if not self._has_reported:
            self._has_reported = True
            self._set(key, text)

    def _set(self, key: str, text: str) -> None:
        with self._asked():
            if (store := self.store) is not None:
                ask(lambda: store.set(key, text))
        with contextlib.suppress(OSError):
            if self.folder is not None and key == _FIRST_ERROR:
                temporary = self.folder / f"{key}.{self.rank}"
                temporary.write_text(text)
                temporary.replace(self.folder / key)

    def _get(self, key: str) -> str | None:
        with self._asked():
            if (store := self.store) is not None:
                found: bytes | None = ask(lambda: store.get(key) if store.check([key]) else None)
                if found is not None:
                    return found.decode()
        with contextlib.suppress(OSError):
            if self.folder is not None and key == _FIRST_ERROR:
                return (self.folder / key).read_text()
        return None


def timeout_error(peer: str, timeout_s: float, location: str = "", *, by_network: bool = False) -> PeerTimeoutError:
    """The error of a rank whose wait has timed out.

    Args:
        peer: for whom it waited.
        timeout_s: how long.
        location: where it is, in words.
        by_network: whether messages go over a network, which may be cut.
    """
    why = "It hangs, runs other code, or is cut off" if by_network else "It hangs, or runs other code"
    here = f", while this rank was in {location}" if location else ""
    return PeerTimeoutError(
        f"{peer} sent nothing for {timeout_s:.0f} s{here}. {why}: what communicates must "
        "be called on all ranks. Where one rank may work alone for so long, raise timeout_s of launch_from_torch or "
        "launch."
    )


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)
