"""What a rank is doing: the section of its code, the location there, and for whom it waits. A watchdog reads it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol, TypeAlias

Section: TypeAlias = Literal["script", "setup", "data", "step", "save"]
"""``setup`` makes plugins, boosts, traces, compiles; ``data`` reads a batch; ``script`` is all code of the user's."""


CONNECTION = "a connection"
"""What ranks wait for that connect: each for all others, which it must do as often as this one."""


class Awaited(NamedTuple):
    """What a rank waits for.

    Attributes:
        what: ``"a message"``, ``"a collective"``, :data:`CONNECTION`, or another noun.
        ranks: of the world, of which at least one has not come to it.
        group: name of the group.
        number: of the collective among those of the group, or of the connection; None: a message.
    """

    what: str
    ranks: tuple[int, ...]
    group: str
    number: int | None = None


class DeviceWork(NamedTuple):
    """How far a device is.

    Attributes:
        step: number of the step that was launched last.
        action: the first action that was launched and is not finished, in words; empty: there is none.
        needs: the action of another rank that it waits for, if there is one: rank of the world, label of the action.
        finished: labels of the actions of this step that are finished.
    """

    step: int
    action: str
    needs: tuple[int, str] | None
    finished: tuple[str, ...]


class DeviceObserver(Protocol):
    """Tells how far a device is; called by the watchdog's thread."""

    def work(self) -> DeviceWork:
        """How far it is."""


class CommunicationObserver(Protocol):
    """Sees what a rank communicates, and how long it waits for others; called by the rank's own thread."""

    def started(self, group: str, kind: str, num_bytes: int, peer: int | None) -> None:
        """A communication has started.

        Args:
            group: its name.
            kind: ``"send"``, ``"receive"``, or the collective: ``"all_reduce"``.
            num_bytes: of the tensor that this rank gave or receives.
            peer: rank of the world of a message's other end; None: a collective.
        """

    def wait_began(self, awaited: Awaited) -> None:
        """The rank begins to wait."""

    def wait_ended(self) -> None:
        """The wait is over."""


# More than a watchdog needs.
_ENDING_S = 60.0


def _nowhere() -> str:
    return ""


class Progress:
    """What a rank is doing. Its main thread writes a few attributes; all text is made by the watchdog that reads it.

    Attributes:
        section: of the code that runs.
        location: returns where in the section it is, as text that differs at every other location.
        awaited: returns what it waits for; None: it waits for no rank.
        num_changes: how often a section was entered or left, or a wait began.
        is_watched: whether a watchdog reads it.
        is_ending: whether the watchdog ends the process: the rank's threads are to wait for that, and report nothing.
        device: tells how far the device is; None: nobody knows.
        observer: sees communications and waits, while a step is recorded; else None.
        in_background: returns what the last save in the background waits for, if anything; None: there was none.
        lost: which rank of the job is gone, as sentences, so that no wait for other ranks may last; empty: none is.
        is_connecting: whether ranks connect, where waits for them are in code of a backend.
    """

    __slots__ = (
        *("awaited", "device", "in_background", "is_connecting", "is_ending", "is_watched", "location", "lost"),
        *("num_changes", "observer", "section"),
    )

    def __init__(self) -> None:
        self.section: Section = "script"
        self.location: Callable[[], str] = _nowhere
        self.awaited: Callable[[], Awaited] | None = None
        self.num_changes = 0
        self.is_watched = self.is_ending = self.is_connecting = False
        self.lost = ""
        self.device: DeviceObserver | None = None
        self.observer: CommunicationObserver | None = None
        self.in_background: Callable[[], Awaited | None] | None = None

    def inside(self, section: Section, location: Callable[[], str]) -> "_Inside":
        """A context in which the rank is in a section.

        Args:
            section: the innermost one counts.
            location: see :class:`Progress`.
        """
        return _Inside(self, section, location)

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """A context in which ranks connect."""
        before, self.is_connecting = self.is_connecting, True
        self.num_changes += 1
        try:
            yield
        finally:
            self.is_connecting = before

    def begin_wait(self, awaited: Callable[[], Awaited]) -> None:
        """Note that this rank waits for others; what ends the wait calls :meth:`end_wait`."""
        self.num_changes += 1
        self.awaited = awaited
        if self.observer is not None:
            self.observer.wait_began(awaited())

    def end_wait(self) -> None:
        """Note that the wait is over."""
        self.awaited = None
        if self.observer is not None:
            self.observer.wait_ended()
        if self.is_ending:
            # Other ranks end, too. The errors that this gives here are not what happened.
            time.sleep(_ENDING_S)


class _Inside:
    __slots__ = ("_before", "_location", "_progress", "_section")

    def __init__(self, progress: Progress, section: Section, location: Callable[[], str]):
        self._progress, self._section, self._location = progress, section, location

    def __enter__(self) -> None:
        progress = self._progress
        self._before = (progress.section, progress.location)
        progress.section, progress.location = self._section, self._location
        progress.num_changes += 1

    def __exit__(self, *_: object) -> None:
        progress = self._progress
        progress.section, progress.location = self._before
        progress.num_changes += 1
