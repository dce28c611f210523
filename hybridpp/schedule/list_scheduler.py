"""Greedy list scheduling, one slot at a time: F, I and W take one slot, B takes two."""

from collections import deque
from collections.abc import Sequence, Set
from typing import Protocol

from hybridpp.schedule.action import Action, ActionKind, Programs
from hybridpp.schedule.dependencies import needs, result


class SlotRule(Protocol):
    """One rank's rule."""

    def choose(self, done: Set[Action]) -> Action | None:
        """The action for this slot, given the results of all earlier slots; None: idle."""


def run_slots(rules: Sequence[SlotRule]) -> Programs:
    """The programs that result if each rank applies its rule in every slot, until all idle in the same slot.

    B takes two slots. A result is available on every rank from the slot after its action. Rules must not idle all at
    once before their work is done.
    """
    done: set[Action] = set()
    rows: list[list[Action]] = [[] for _ in rules]
    begun: list[Action | None] = [None] * len(rules)
    while True:
        slot = [half or rule.choose(done) for half, rule in zip(begun, rules, strict=True)]
        if not any(slot):
            return tuple(map(tuple, rows))
        for rank, action in enumerate(slot):
            if action is None:
                continue
            if begun[rank] is None:
                rows[rank].append(action)
            goes_on = action.kind is ActionKind.BACKWARD and begun[rank] is None
            begun[rank] = action if goes_on else None
            if not goes_on:
                done.add(result(action))


class SplitBackwardState:
    """State of one rank with split backwards: activations held, and weight gradients still to be computed.

    Args:
        num_stages: stages of the pipeline.
        limit: largest number of activations to hold, from F until W.
    """

    def __init__(self, num_stages: int, limit: int):
        self._num_stages = num_stages
        self._room = limit
        self._weights: deque[Action] = deque()

    @property
    def is_full(self) -> bool:
        """Whether the limit of activations is reached."""
        return not self._room

    def is_ready(self, action: Action, done: Set[Action]) -> bool:
        """Whether what an F, I or B needs is available."""
        return all(need in done for need in needs(action, self._num_stages))

    def can_start(self, action: Action, done: Set[Action]) -> bool:
        """Whether what an F, I or B needs is available, and an F does not exceed the limit."""
        return not (action.kind is ActionKind.FORWARD and self.is_full) and self.is_ready(action, done)

    def take(self, queue: deque[Action]) -> Action:
        """Take the first F, I or B of a queue; an I adds a W to be computed."""
        action = queue.popleft()
        if action.kind is ActionKind.FORWARD:
            self._room -= 1
        elif action.kind is ActionKind.BACKWARD:
            self._room += 1
        else:
            self._weights.append(action._replace(kind=ActionKind.WEIGHT_GRADIENT))
        return action

    def take_weight_gradient(self) -> Action | None:
        """Take the oldest W, if there is one."""
        if not self._weights:
            return None
        self._room += 1
        return self._weights.popleft()
