"""The spans of all ranks of a pipeline in one step."""

import json
from dataclasses import dataclass
from typing import Any

from hybridpp.errors import ConfigError, text_of
from hybridpp.strict_json import parse_strictly
from hybridpp.timeline.span import Span


@dataclass(frozen=True)
class Timeline:
    """Spans of every rank, in any order. The clock may start anywhere.

    Raises:
        ConfigError: a span ends before it starts, or its rank or stage is negative.
    """

    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        for span in self.spans:
            if not span.start_ms <= span.end_ms or min(span.rank, span.stage) < 0:
                raise ConfigError(
                    "a span needs a rank and a stage of at least 0 and ends after it starts: "
                    f"got {span.name} on rank {span.rank} from {span.start_ms:g} to {span.end_ms:g} ms."
                )

    @property
    def num_ranks(self) -> int:
        """Number of ranks, from rank 0 to the highest that has a span."""
        return max((span.rank for span in self.spans), default=-1) + 1

    @property
    def start_ms(self) -> float:
        """When the first rank starts to compute, on the timeline's clock.

        Ranks of later stages post their first receive before that, while the batch is still being read.
        """
        starts = [span.start_ms for span in self.spans if span.computes]
        return min(starts or [span.start_ms for span in self.spans], default=0.0)

    @property
    def makespan_ms(self) -> float:
        """From the start of the first computation to the end of the last span, over all ranks."""
        return max((span.end_ms for span in self.spans), default=self.start_ms) - self.start_ms

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they do not compute, from 0 to 1."""
        total = self.num_ranks * self.makespan_ms
        computing = sum(span.duration_ms for span in self.spans if span.computes)
        return 1.0 - computing / total if total else 0.0

    def busy_ms(self, rank: int) -> float:
        """The time in which a rank computes, in milliseconds."""
        return sum(span.duration_ms for span in self.spans if span.rank == rank and span.computes)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """A rank's spans, sorted by start."""
        return tuple(sorted((span for span in self.spans if span.rank == rank), key=lambda span: span[4:]))

    def to_json(self) -> str:
        """As JSON: an object whose ``spans`` are ``[rank, stage, kind, microbatch, start_ms, end_ms]``."""
        return json.dumps({"columns": Span._fields, "spans": self.spans})

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """The timeline that :meth:`to_json` wrote.

        Raises:
            ConfigError: the text is not a timeline.
        """
        try:
            return cls(tuple(_span(row) for row in parse_strictly(text)["spans"]))
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f'a timeline is written as {{"spans": [[{", ".join(Span._fields)}], ...]}}: {text_of(error)}.'
            ) from error


def _span(row: Any) -> Span:
    rank, stage, kind, microbatch, start_ms, end_ms = row
    return Span(
        int(rank),
        int(stage),
        str(kind),
        None if microbatch is None else int(microbatch),
        float(start_ms),
        float(end_ms),
    )
