"""Greedy list scheduling with the real durations: events on one clock, instead of slots."""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hybridpp.schedule import Action, ActionKind, Programs
from hybridpp.simulate.costs import Costs


class Order(Enum):
    """What a rank prefers, of what can start."""

    DEEP_FORWARD = "forwards of its later stages, backward passes, forwards of its first stage"
    BACKWARD = "backward passes, forwards of its later stages, forwards of its first stage"
    FORWARD = "forwards, those of its later stages first; then backward passes"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How ranks choose.

    Args:
        rank_of: the rank of each stage.
        in_flight: by rank, the most forwards without their I or B, counted per stage; at least its number of stages.
        num_unsplit: by rank, how many of the first micro-batches keep an unsplit backward pass.
        order: what goes first.
        patience: a rank waits for an input that arrives within this share of a W's time, rather than begin the W.
    """

    rank_of: tuple[int, ...]
    in_flight: tuple[int, ...]
    num_unsplit: tuple[int, ...]
    order: Order = Order.BACKWARD
    patience: float = 0.0


_F, _B, _I, _W = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT,
)


def greedy_schedule(costs: Costs, num_microbatches: int, rules: Rules, caps: Sequence[float]) -> tuple[Programs, float]:
    """The programs that result if each free rank takes the best action that can start, and when the last one ends.

    The order is that of ``rules``. W is taken where the rank would idle. A forward starts only if its activation and
    one of each later stage of the rank fit, both in bytes and in ``in_flight``. So no rank blocks: take the first
    micro-batch that is not through all forwards. Those before it give back what they hold. Of this and the later ones a
    rank holds only stages before the one that comes next, and when it took the last of these, it left room for it.

    Args:
        costs: of each stage.
        num_microbatches: micro-batches per batch.
        rules: of all ranks.
        caps: the bytes that each rank can hold, enough for one micro-batch of all its stages. Where they are enough
            only without splitting, the rank splits no backward pass.
    """
    stages = [_Stage(stage, costs, rules.rank_of) for stage in range(len(rules.rank_of))]
    stages[0].forwards.extend([0.0] * num_microbatches)
    ranks = [_Rank(rank, stages, num_microbatches, rules, cap) for rank, cap in enumerate(caps)]
    events = [(0.0, rank) for rank in range(len(ranks))]
    end_ms = 0.0
    while events:
        now, number = heapq.heappop(events)
        rank = ranks[number]
        # Where it is still busy, the event at which it is free is yet to come.
        if now >= rank.free_ms and (chosen := rank.choose(now)) is not None:
            end_ms = max(end_ms, rank.run(*chosen, now, events))
            heapq.heappush(events, (rank.free_ms, number))
    return tuple(tuple(rank.program) for rank in ranks), end_ms


class _Stage:
    """A stage's costs, and when the inputs of its next forwards and backward passes are there."""

    def __init__(self, number: int, costs: Costs, rank_of: Sequence[int]):
        self.number, self.rank = number, rank_of[number]
        self.compute_ms = {kind: costs.compute_ms(number, kind) for kind in (_F, _B, _I, _W)}
        self.activation = costs.held_bytes(number, _F)
        self.gradient = -costs.held_bytes(number, _W)
        self.forwards: deque[float] = deque()
        self.backwards: deque[float] = deque()
        self.num_forwards = self.num_backwards = 0
        # For each direction: whether the neighbour is on another rank, and the message's time.
        crosses, message_ms, post = [], [], costs.posting_ms(number)
        for other in (number - 1, number + 1):
            crossing = 0 <= other < len(rank_of) and rank_of[other] != self.rank
            crosses.append(crossing)
            message_ms.append(costs.message_ms(number, other) if crossing else 0.0)
        before, after = crosses
        self.message_ms = {_F: message_ms[1], _B: message_ms[0], _I: message_ms[0], _W: 0.0}
        self.receive_ms = {_F: post * before, _B: post * after, _I: post * after, _W: 0.0}
        self.send_ms = {_F: post * after, _B: post * before, _I: post * before, _W: 0.0}


class _Rank:
    """A rank's state: what it holds, and its program so far."""

    def __init__(self, number: int, stages: Sequence[_Stage], num_microbatches: int, rules: Rules, cap: float):
        self._stages, self._rules, self._cap = stages, rules, cap
        self._own = [stage for stage in stages if stage.rank == number]
        self._deep_first = self._own[::-1]
        self._num_unsplit = rules.num_unsplit[number]
        if sum(max(stage.activation, stage.gradient) for stage in self._own) > cap:
            self._num_unsplit = num_microbatches
        splits = self._num_unsplit < num_microbatches
        # From F on, a stage counts with all that it will hold until W.
        self._held_by = {
            stage.number: max(stage.activation, stage.gradient) if splits else stage.activation for stage in self._own
        }
        self._room = cap
        self._slots = rules.in_flight[number]
        self._weights: deque[tuple[_Stage, int]] = deque()
        self._needs = {
            stage.number: (sum(self._held_by[other.number] for other in self._own[index:]), len(self._own) - index)
            for index, stage in enumerate(self._own)
        }
        self.free_ms = 0.0
        self.program: list[Action] = []

    def choose(self, now: float) -> tuple[_Stage, ActionKind] | None:
        """The stage and kind of the best action that can start now; None: the rank waits."""
        order = self._rules.order
        forward = self._forward(now)
        if forward and (order is Order.FORWARD or (order is Order.DEEP_FORWARD and forward is not self._own[0])):
            return forward, _F
        if backward := self._backward(now):
            return backward, _B if backward.num_backwards < self._num_unsplit else _I
        if forward:
            return forward, _F
        if self._weights and not self._waits(now):
            return self._weights[0][0], _W
        return None

    def _fits(self, stage: _Stage) -> bool:
        room, slots = self._needs[stage.number]
        return room <= self._room and slots <= self._slots

    def _forward(self, now: float) -> _Stage | None:
        for stage in self._deep_first:
            if stage.forwards and stage.forwards[0] <= now and self._fits(stage):
                return stage
        return None

    def _backward(self, now: float) -> _Stage | None:
        """The one of the oldest micro-batch."""
        best = None
        for stage in self._deep_first:
            if (
                stage.backwards
                and stage.backwards[0] <= now
                and (best is None or stage.num_backwards < best.num_backwards)
            ):
                best = stage
        return best

    def _waits(self, now: float) -> bool:
        """Whether an input arrives so soon that the rank waits for it."""
        if not self._rules.patience:
            return False
        until = now + self._rules.patience * self._weights[0][0].compute_ms[_W]
        return any(
            (stage.backwards and stage.backwards[0] < until)
            or (stage.forwards and stage.forwards[0] < until and self._fits(stage))
            for stage in self._own
        )

    def run(self, stage: _Stage, kind: ActionKind, now: float, events: list[tuple[float, int]]) -> float:
        """Run an action; returns when it ends. Its result becomes an input, and an event of the rank that has it."""
        end = now + stage.receive_ms[kind] + stage.compute_ms[kind]
        self.free_ms = end + stage.send_ms[kind]
        self.program.append(Action(stage.number, kind, self._take(stage, kind)))
        held = self._held_by[stage.number]
        if kind is _W:
            self._room += stage.gradient
            return end
        step = 1 if kind is _F else -1
        self._slots -= step
        self._room += -held if kind is _F else held if kind is _B else held - stage.gradient
        target, queue = stage.number + step, _F if kind is _F else _I
        if target == len(self._stages):
            target, queue = stage.number, _I  # the last stage's backward pass needs its forward only
        if target >= 0:
            consumer = self._stages[target]
            # A receiver spends its own part of the message before the message arrives, if it is free.
            ready = end if target == stage.number else end + stage.message_ms[kind] - consumer.receive_ms[queue]
            ready = max(now, ready)
            (consumer.forwards if queue is _F else consumer.backwards).append(ready)
            heapq.heappush(events, (ready, consumer.rank))
        return end

    def _take(self, stage: _Stage, kind: ActionKind) -> int:
        """Take the next micro-batch of a stage; returns its number."""
        if kind is _W:
            return self._weights.popleft()[1]
        if kind is _F:
            stage.forwards.popleft()
            stage.num_forwards += 1
            return stage.num_forwards - 1
        stage.backwards.popleft()
        stage.num_backwards += 1
        if kind is _I:
            self._weights.append((stage, stage.num_backwards - 1))
        return stage.num_backwards - 1
