"""Simulate ranks that share the cores of a host: what they compute takes longer, the more of them compute at once."""

from hybridpp.simulate.costs import Costs
from hybridpp.simulate.prepared import KINDS, PreparedPrograms, StepEnds


def ends_on_cores(prepared: PreparedPrograms, costs: Costs, copies: int, cores: float) -> StepEnds:
    """When ranks are done if all together have some cores, which those that compute share equally.

    Args:
        prepared: programs of a pipeline.
        costs: of each stage; the time that a rank spends on messages takes a core, too.
        copies: ranks at each place of the pipeline: replicas, and those that share its layers.
        cores: of all of them.
    """
    return _Cores(prepared, costs, copies, cores).run()


class _Cores:
    def __init__(self, prepared: PreparedPrograms, costs: Costs, copies: int, cores: float):
        self._prepared, self._share = prepared, cores / copies
        stages = range(len(prepared.ranks))
        duration = [costs.compute_ms(stage, kind) for stage in stages for kind in KINDS]
        post = [costs.posting_ms(cost // len(KINDS)) for cost in range(len(duration))]
        self._message = [costs.message_ms(stage, stage + 1) for stage in stages[:-1]]
        steps = prepared.steps
        self._work = [duration[s.cost] + (s.received + s.sent) * post[s.cost] for s in steps]
        self._computing = [duration[s.cost] for s in steps]
        self._queues: list[list[int]] = [[] for _ in prepared.programs]
        for number in reversed(range(len(steps))):
            self._queues[steps[number].rank].append(number)
        self._made: list[float | None] = [None] * len(steps)
        self._left: dict[int, float] = {}
        self._now = 0.0

    def run(self) -> StepEnds:
        busy = [0.0] * len(self._queues)
        while True:
            arrival = self._start()
            if not self._left and arrival is None:
                break
            rate = min(1.0, self._share / len(self._left)) if self._left else 0.0
            shortest = min(self._left.values()) / rate if self._left else None
            passed = min(one for one in (shortest, None if arrival is None else arrival - self._now) if one is not None)
            self._now = arrival if passed != shortest and arrival is not None else self._now + passed
            for number in list(self._left):
                left = self._left[number] - passed * rate
                if passed == shortest and left <= 1e-12 * self._work[number]:
                    self._made[number] = self._now
                    rank = self._prepared.steps[number].rank
                    busy[rank] += self._computing[number]
                    self._queues[rank].pop()
                    del self._left[number]
                else:
                    self._left[number] = left
        made = [0.0 if one is None else one for one in self._made]
        return StepEnds(tuple(busy), max(made), tuple(made[index] for index in self._prepared.last))

    def _start(self) -> float | None:
        """Start what can start now; returns when the next message arrives for a rank that waits for it."""
        soonest: float | None = None
        for queue in self._queues:
            if not queue or queue[-1] in self._left:
                continue
            step = self._prepared.steps[queue[-1]]
            arrived: float | None = 0.0
            if step.source >= 0:
                made = self._made[step.source]
                arrived = None if made is None else made + self._message[step.boundary]
            if arrived is not None and arrived <= self._now:
                self._left[queue[-1]] = self._work[queue[-1]]
            elif arrived is not None:
                soonest = arrived if soonest is None else min(soonest, arrived)
        return soonest
