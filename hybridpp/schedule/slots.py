"""Schedules made by looking ahead one slot at a time, as if F, I and W took equally long, and B twice that."""

from collections import deque
from collections.abc import Sequence, Set
from typing import Protocol

from hybridpp.schedule.action import Action, Kind, Programs
from hybridpp.schedule.order import needs, result


class Chooser(Protocol):
    """One rank's rule."""

    def choose(self, done: Set[Action]) -> Action | None:
        """What to do in this slot, given the results of all earlier ones; None to idle."""


def run_slots(choosers: Sequence[Chooser]) -> Programs:
    """What the ranks do when each asks its rule in every slot, until all idle in the same one.

    A B takes the slot after its own as well. A result is there from the slot after its action on, on every rank. Rules
    that idle all at once before their work is done have locked each other out; whoever writes them has to rule that
    out.
    """
    done: set[Action] = set()
    rows: list[list[Action]] = [[] for _ in choosers]
    begun: list[Action | None] = [None] * len(choosers)
    while True:
        slot = [half or chooser.choose(done) for half, chooser in zip(begun, choosers, strict=True)]
        if not any(slot):
            return tuple(map(tuple, rows))
        for rank, action in enumerate(slot):
            if action is None:
                continue
            if begun[rank] is None:
                rows[rank].append(action)
            goes_on = action.kind is Kind.BACKWARD and begun[rank] is None
            begun[rank] = action if goes_on else None
            if not goes_on:
                done.add(result(action))


class SplitBackward:
    """What one rank holds while its backwards are split: activations, and weight gradients that are still to do.

    Args:
        num_stages: of the whole pipeline.
        limit: the most activations to hold, from F until W.
    """

    def __init__(self, num_stages: int, limit: int):
        self._num_stages = num_stages
        self._room = limit
        self._weights: deque[Action] = deque()

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another activation."""
        return not self._room

    def is_ready(self, action: Action, done: Set[Action]) -> bool:
        """Whether what an F, I or B needs is there."""
        return all(need in done for need in needs(action, self._num_stages))

    def can_start(self, action: Action, done: Set[Action]) -> bool:
        """Whether what an F, I or B needs is there, and room for what an F will hold."""
        return not (action.kind is Kind.FORWARD and self.is_full) and self.is_ready(action, done)

    def take(self, queue: deque[Action]) -> Action:
        """Do the first F, I or B of a queue; an I leaves a W to do."""
        action = queue.popleft()
        if action.kind is Kind.FORWARD:
            self._room -= 1
        elif action.kind is Kind.BACKWARD:
            self._room += 1
        else:
            self._weights.append(action._replace(kind=Kind.WEIGHT_GRADIENT))
        return action

    def take_weight_gradient(self) -> Action | None:
        """Do the oldest W, if there is one."""
        if not self._weights:
            return None
        self._room += 1
        return self._weights.popleft()
