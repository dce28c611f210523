"""What a stage holds of a micro-batch, from a run of the complete model."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from hybridpp.estimate.model_run import ModelRun, peak, total
from hybridpp.partition import StagePlan, TensorSpec


class Held(NamedTuple):
    """Bytes of a micro-batch.

    Attributes:
        activations: what is not one of the others.
        logits: what runs after the last block: the head's results, the loss, and their gradients.
    """

    activations: int
    logits: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.activations + self.logits


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of one stage for one micro-batch.

    Attributes:
        held: from F until B, or until I.
        forward: the most during F, with what was received for it.
        backward: the most during B, or I, with what was held.
        waiting: from I until W; 0 if the backward pass is not split.
        incoming, outgoing: bytes of a message from the stage before, and to the next one.
        incoming_gradients, outgoing_gradients: the same of the messages of gradients for those.
        unheld: how much of ``outgoing`` is not part of ``held``.
    """

    held: Held
    forward: Held
    backward: Held
    waiting: int = 0
    incoming: int = 0
    outgoing: int = 0
    incoming_gradients: int = 0
    outgoing_gradients: int = 0
    unheld: int = 0


def stage_memory(
    run: ModelRun, plan: StagePlan, last_block: int, splits: bool = False, times_larger: float = 1
) -> StageMemory:
    """Memory of a stage.

    Args:
        run: of the complete model.
        plan: of the stage, in a trace with the same calls.
        last_block: the last call of a block in the complete model.
        splits: whether the run's weight gradients were computed apart.
        times_larger: how much larger the run's micro-batch is than the trace's.
    """
    own = [index for index, stage in enumerate(plan.stages) if stage == plan.stage] if plan.calls else None
    first, last = (own[0], own[-1]) if own else (0, len(run.calls) - 1)
    return _Stage(run, plan, first, last, last_block).memory(splits, times_larger)


class _Stage:
    def __init__(self, run: ModelRun, plan: StagePlan, first: int, last: int, last_block: int):
        self._run, self._plan = run, plan
        self._forward = run.forward_window(first, last)
        self._backward = run.backward_window(first, last)
        begin, end = self._forward
        index, at = run.saved
        saved_here = numpy.zeros(len(run.sizes), dtype=bool)
        saved_here[index[(at > begin) & (at <= end + 1)]] = True
        saved_at_all = numpy.zeros(len(run.sizes), dtype=bool)
        saved_at_all[index] = True
        inside = (run.born > begin) & (run.born <= end)
        # What container code makes before the stage's first unit: every stage makes it.
        made_before = (run.born <= begin) & ~run.in_unit & (run.died > begin) & (saved_here | ~saved_at_all)
        self._own = inside | made_before
        # Of what was received, and its own: what is there after F.
        self._held = saved_here & (run.born <= end) & (run.died > end)
        # What runs after the last block, forwards and backwards.
        self._logits = self._after_last_block(last_block)

    def _after_last_block(self, last_block: int) -> NDArray[numpy.bool_]:
        run = self._run
        if not run.calls:
            return numpy.zeros(len(run.memory), dtype=bool)
        start, stop = run.calls[last_block].end, run.calls[last_block].gradient
        chosen: NDArray[numpy.bool_] = (run.born > start) & (run.born <= (run.loss if stop is None else stop))
        return chosen

    def memory(self, splits: bool, times_larger: float) -> StageMemory:
        run, plan = self._run, self._plan

        def sent(specs: Iterable[TensorSpec]) -> int:
            return round(times_larger * _bytes(specs))

        incoming, outgoing = sent(plan.incoming_specs), sent(plan.outgoing_specs)
        return StageMemory(
            held=self._split(self._held),
            forward=self._forward_peak(incoming),
            backward=self._backward_peak(),
            waiting=self._waiting() if splits else 0,
            incoming=incoming,
            outgoing=outgoing,
            incoming_gradients=sent(spec for spec in plan.incoming_specs if spec.requires_grad),
            outgoing_gradients=sent(spec for spec in plan.outgoing_specs if spec.requires_grad),
            unheld=max(0, outgoing - total(run.sizes, self._sent() & self._held)),
        )

    def _split(self, chosen: NDArray[numpy.bool_]) -> Held:
        sizes = self._run.sizes
        return Held(total(sizes, chosen & ~self._logits), total(sizes, chosen & self._logits))

    def _forward_peak(self, incoming: int) -> Held:
        run = self._run
        _, at = peak(run.sizes[self._own], run.born[self._own], run.died[self._own], self._forward)
        found = self._split(self._own & (run.born <= at) & (run.died > at))
        return found._replace(activations=found.activations + incoming)

    def _backward_peak(self) -> Held:
        run, (begin, end) = self._run, self._backward
        made = (run.born > begin) & (run.born <= end)
        # Gradients of the stage's results. What later stages leave (small gradients, inputs of W) is not used up here.
        used_here = (run.died > begin) & (run.died <= min(end, run.pass_end))
        made |= (run.born > run.loss) & (run.born <= begin) & used_here
        here = self._held | made
        _, at = peak(run.sizes[here], run.born[here], run.died[here], self._backward)
        return self._split(here & (run.born <= at) & (run.died > at))

    def _waiting(self) -> int:
        run, (begin, end) = self._run, self._backward
        here = self._held | ((run.born > begin) & (run.born <= end))
        return total(run.sizes, here & (run.born <= run.backward_end) & (run.died > run.backward_end))

    def _sent(self) -> NDArray[numpy.bool_]:
        chosen = numpy.zeros(len(self._run.sizes), dtype=bool)
        for value in self._plan.outgoing:
            results = self._run.calls[value.call].results
            index = results[value.leaf] if value.leaf < len(results) else None
            if index is not None:
                chosen[index] = True
        return chosen


def _bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
