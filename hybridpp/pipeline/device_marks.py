"""Marks of actions on a device, so that a watchdog sees what the device has finished: the host only launches."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from hybridpp.cluster import DeviceWork
from hybridpp.schedule import Action, ActionKind

_BEFORE = {ActionKind.FORWARD: -1, ActionKind.BACKWARD: 1, ActionKind.INPUT_GRADIENT: 1}


class DeviceEvent(Protocol):
    """An event of a device, as ``torch.cuda.Event``."""

    def record(self) -> None:
        """Mark what was launched so far."""

    def query(self) -> bool:
        """Whether all of that is finished."""


class _Mark(NamedTuple):
    step: int
    action: Action
    needs: tuple[int, str] | None
    event: DeviceEvent


class DeviceMarks:
    """An event after each action.

    Args:
        ranks: of the world, by position of the pipeline.
        make_event: makes an event; events are used again.
    """

    def __init__(self, ranks: Sequence[int], make_event: Callable[[], DeviceEvent]):
        self._ranks, self._make_event = tuple(ranks), make_event
        self._free: list[DeviceEvent] = []
        # Replaced, not changed, where it gets shorter: the watchdog's thread reads it.
        self._marks: list[_Mark] = []
        self._step = 0
        self._placement: Sequence[int] = ()
        self._own = 0

    def begin(self, placement: Sequence[int], own: int) -> None:
        """Begin a step.

        Args:
            placement: the position of every stage.
            own: this rank's position.
        """
        self._step += 1
        self._placement, self._own = placement, own
        unfinished = [mark for mark in self._marks if not mark.event.query()]
        kept = {id(mark) for mark in unfinished}
        self._free += [mark.event for mark in self._marks if id(mark) not in kept]
        self._marks = unfinished

    def add(self, action: Action) -> None:
        """Mark the end of an action that was launched."""
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        self._marks.append(_Mark(self._step, action, self._needs(action), event))

    def _needs(self, action: Action) -> tuple[int, str] | None:
        """The action of another rank whose result comes by message."""
        stage = action.stage + _BEFORE.get(action.kind, 0)
        if stage == action.stage or not 0 <= stage < len(self._placement) or self._placement[stage] == self._own:
            return None
        kind = ActionKind.FORWARD if action.kind is ActionKind.FORWARD else ActionKind.BACKWARD
        return self._ranks[self._placement[stage]], str(Action(stage, kind, action.microbatch))

    def work(self) -> DeviceWork:
        """How far the device is; called by the watchdog's thread."""
        marks = list(self._marks)
        finished = [mark.event.query() for mark in marks]
        first = next((mark for mark, is_finished in zip(marks, finished, strict=True) if not is_finished), None)
        labels = [
            # Who needs a gradient waits for the input gradient, where the backward pass is split.
            str(mark.action._replace(kind=_SENT_BY.get(mark.action.kind, mark.action.kind)))
            for mark, is_finished in zip(marks, finished, strict=True)
            if is_finished and mark.step == self._step
        ]
        if first is None:
            return DeviceWork(self._step, "", None, tuple(labels))
        return DeviceWork(self._step, first.action.in_words, first.needs, tuple(labels))


_SENT_BY = {ActionKind.INPUT_GRADIENT: ActionKind.BACKWARD}
