"""Which results go from rank to rank."""

from collections.abc import Iterator
from typing import NamedTuple

from hybridpp.timeline.span import Span
from hybridpp.timeline.timeline import Timeline

_TAKEN_BY = {"F": 1, "B": -1, "I": -1}  # the stage that takes the result, counted from the one that makes it


class Message(NamedTuple):
    """A result on its way: who made it and who takes it, on another rank."""

    maker: Span
    taker: Span

    @property
    def gap_ms(self) -> float:
        """From the end of the one to the start of the other, in milliseconds; negative where clocks disagree."""
        return self.taker.start_ms - self.maker.end_ms


def messages(timeline: Timeline) -> Iterator[Message]:
    """Every activation and gradient that another rank takes; of several steps, those of the last."""

    def key(span: Span) -> tuple[int, int, int | None]:
        return _TAKEN_BY[span.kind], span.stage, span.microbatch

    in_time = sorted(timeline.spans, key=lambda span: span.start_ms)
    passes = {key(span): span for span in in_time if span.kind in _TAKEN_BY}
    for (step, stage, microbatch), maker in passes.items():
        taker = passes.get((step, stage + step, microbatch))
        if taker is not None and taker.rank != maker.rank:
            yield Message(maker, taker)
