"""A timeline for ``chrome://tracing`` and https://ui.perfetto.dev."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from hybridpp.timeline.span import Span
from hybridpp.timeline.timeline import Timeline
from hybridpp.timeline.transfers import transfers

Event: TypeAlias = dict[str, Any]
_COMPUTE = 0  # the thread of compute spans; the threads of communication follow


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline as an object of the Trace Event Format; times are microseconds from the start of the first span.

    A rank is a process with one thread for compute spans and as many for communication as overlap. Arrows lead from the
    producer of a result to its consumer on another rank.
    """
    origin_ms = min((span.start_ms for span in timeline.spans), default=0.0)
    events: list[Event] = []
    for rank in range(timeline.num_ranks):
        spans = timeline.of_rank(rank)
        lanes = [
            [span for span in spans if span.computes],
            *_lanes(span for span in spans if not span.computes),
        ]
        events.extend(_names(rank, len(lanes)))
        events.extend(_complete(span, lane, origin_ms) for lane, members in enumerate(lanes) for span in members)
    return {"traceEvents": [*events, *_arrows(timeline, origin_ms)], "displayTimeUnit": "ms"}


def save_trace(timeline: Timeline, path: str | Path) -> None:
    """Write :func:`chrome_trace` to a file, which Perfetto opens."""
    Path(path).write_text(json.dumps(chrome_trace(timeline)))


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans, sorted by start, spread over threads: within a thread none may overlap."""
    lanes: list[list[Span]] = []
    for span in spans:
        free = next((lane for lane in lanes if lane[-1].end_ms <= span.start_ms), None)
        if free is None:
            lanes.append(free := [])
        free.append(span)
    return lanes


def _names(rank: int, num_lanes: int) -> Iterator[Event]:
    yield from _metadata("process", rank, _COMPUTE, f"rank {rank}", rank)
    for lane in range(num_lanes):
        yield from _metadata("thread", rank, lane, "compute" if lane == _COMPUTE else f"communication {lane}", lane)


def _metadata(what: str, rank: int, lane: int, name: str, order: int) -> Iterator[Event]:
    for key, value in (("name", name), ("sort_index", order)):
        yield {"ph": "M", "pid": rank, "tid": lane, "name": f"{what}_{key}", "args": {key: value}}


def _complete(span: Span, lane: int, origin_ms: float) -> Event:
    start_us, end_us = _us(span.start_ms - origin_ms), _us(span.end_ms - origin_ms)
    return {
        "ph": "X",
        "name": span.name,
        "cat": str(span.kind),
        "pid": span.rank,
        "tid": lane,
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "args": {"stage": span.stage, "microbatch": span.microbatch},
    }


def _arrows(timeline: Timeline, origin_ms: float) -> Iterator[Event]:
    for number, (producer, consumer) in enumerate(transfers(timeline)):
        arrow = {"name": "activation" if producer.kind == "F" else "gradient", "cat": "message", "id": number}
        # An arrow belongs to the span that its time is in, and a span's end is not.
        leaves_us = _us(producer.start_ms + 0.99 * producer.duration_ms - origin_ms)
        arrives_us = _us(consumer.start_ms - origin_ms)
        yield {"ph": "s", **arrow, "pid": producer.rank, "tid": _COMPUTE, "ts": leaves_us}
        yield {"ph": "f", "bp": "e", **arrow, "pid": consumer.rank, "tid": _COMPUTE, "ts": arrives_us}


def _us(time_ms: float) -> float:
    return round(time_ms * 1000, 3)
