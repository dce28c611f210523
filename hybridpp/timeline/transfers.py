"""Results that are sent from rank to rank."""

from collections.abc import Iterator
from typing import NamedTuple

from hybridpp.timeline.span import Span
from hybridpp.timeline.timeline import Timeline

_TAKEN_BY = {"F": 1, "B": -1, "I": -1}  # the consumer's stage relative to the producer's


class Transfer(NamedTuple):
    """A result that is sent: the span that produces it, and the span on another rank that consumes it."""

    producer: Span
    consumer: Span

    @property
    def gap_ms(self) -> float:
        """From the end of the producer to the start of the consumer, in milliseconds; negative if clocks disagree."""
        return self.consumer.start_ms - self.producer.end_ms


def transfers(timeline: Timeline) -> Iterator[Transfer]:
    """Every activation and gradient that another rank consumes; of several steps, those of the last."""

    def key(span: Span) -> tuple[int, int, int | None]:
        return _TAKEN_BY[span.kind], span.stage, span.microbatch

    in_time = sorted(timeline.spans, key=lambda span: span.start_ms)
    passes = {key(span): span for span in in_time if span.kind in _TAKEN_BY}
    for (step, stage, microbatch), producer in passes.items():
        consumer = passes.get((step, stage + step, microbatch))
        if consumer is not None and consumer.rank != producer.rank:
            yield Transfer(producer, consumer)
