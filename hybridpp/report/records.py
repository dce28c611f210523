"""What a recording has of each rank and stage."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridpp.timeline import COMPUTE_KINDS

HELD = ("weights", "gradients", "masters", "moments", "buffers", "host")
"""What of a rank's memory lasts over steps; ``host`` is what a rank with a device keeps in host memory."""


MEMORY_KINDS = ("device", "allocated", "resident", "shared", None)
"""What :attr:`RankRecord.memory_kind` may be."""


class RankAction(NamedTuple):
    """An action that a rank ran. Times are milliseconds, on one clock for all ranks.

    Attributes:
        step: number of the recorded step, from 0.
        stage: of the model.
        kind: as in :class:`hybridpp.timeline.Span`.
        microbatch: None: it belongs to no micro-batch.
        ready_ms: when the rank came to it; until ``start_ms`` it waited for a message.
        start_ms: when it began to run.
        end_ms: when it ended.
        memory: bytes that the rank had in use after it; None: not known.
        peer: rank at the other end of its message; None: it has none.
        message_bytes: of its message.
        collective_bytes: of the tensors that it gave to collectives.
        waited_ms: of its time, what the rank waited for others in collectives.
    """

    step: int
    stage: int
    kind: str
    microbatch: int | None
    ready_ms: float
    start_ms: float
    end_ms: float
    memory: int | None = None
    peer: int | None = None
    message_bytes: int = 0
    collective_bytes: int = 0
    waited_ms: float = 0.0

    @property
    def computes(self) -> bool:
        """Whether it ran a part of the model."""
        return self.kind in COMPUTE_KINDS


class Phase(NamedTuple):
    """A part of a step on a rank: ``read`` (the batch), ``actions``, ``end`` (sums, loss), ``update`` (of weights)."""

    step: int
    name: str
    start_ms: float
    end_ms: float


class RankWait(NamedTuple):
    """A wait for other ranks outside of actions, with the name of the group that it was in."""

    step: int
    group: str
    start_ms: float
    end_ms: float


class RankTraffic(NamedTuple):
    """Communications of one kind in one group and step: how many, and bytes of the tensors that the rank gave."""

    step: int
    group: str
    kind: str
    num_calls: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank did.

    Attributes:
        rank: of the world.
        dp, pp, tp: its place.
        device: that it computed on.
        memory_kind: what ``memory`` counts: ``device`` (torch's tensors), ``allocated`` (by malloc), ``resident``
            (pages of the process), ``shared`` (not read: all ranks are one process); None: not read.
        peak_bytes: the most that was in use at any time before, too; None: not known.
        held: bytes by the names of :data:`HELD`.
        actions, phases, waits, traffic: in the order in which they began.
    """

    rank: int
    dp: int
    pp: int
    tp: int
    device: str
    memory_kind: str | None = None
    peak_bytes: int | None = None
    held: Mapping[str, int] = field(default_factory=dict)
    actions: tuple[RankAction, ...] = ()
    phases: tuple[Phase, ...] = ()
    waits: tuple[RankWait, ...] = ()
    traffic: tuple[RankTraffic, ...] = ()

    def values(self) -> dict[str, Any]:
        """As JSON has it: rows of numbers for what there are many of."""
        return {
            name: [list(row) for row in value] if name in ROWS else value
            for name, value in ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "RankRecord":
        """The record that :meth:`values` returned; unknown names are left out."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        if known.get("memory_kind") not in MEMORY_KINDS:
            raise TypeError(f"memory_kind must be one of {MEMORY_KINDS}: got {known['memory_kind']!r}")
        return cls(**known | {name: tuple(_row(kind, row) for row in values[name]) for name, kind in ROWS.items()})


class StageRecord(NamedTuple):
    """A stage of the model.

    Attributes:
        position: of the ranks that hold it, in their pipelines.
        modules: their names, shortened.
        parameters: elements of the complete model that it holds.
    """

    position: int
    modules: str
    parameters: int


ROWS: dict[str, Any] = {"actions": RankAction, "phases": Phase, "waits": RankWait, "traffic": RankTraffic}
"""The fields of a :class:`RankRecord` that are rows, with what a row is."""


_INTEGERS = ("step", "stage", "message_bytes", "collective_bytes", "num_calls", "num_bytes")
_INTEGERS_OR_NONE = ("microbatch", "memory", "peer")


def _row(kind: Any, row: Any) -> Any:
    made = kind(*row)
    for name, value in zip(kind._fields, made, strict=True):
        if name.endswith("_ms") and not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number: got {value!r}")
        if name in _INTEGERS and not isinstance(value, int):
            raise TypeError(f"{name} must be an integer: got {value!r}")
        if name in _INTEGERS_OR_NONE and not isinstance(value, int | None):
            raise TypeError(f"{name} must be an integer or null: got {value!r}")
    return made
