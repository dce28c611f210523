"""Recordings of steps that ran: when each rank ran each action, and what it held and sent."""

import platform
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from hybridpp.cluster import gather_numbers, gather_objects
from hybridpp.errors import ConfigError
from hybridpp.nn.name_ranges import name_ranges
from hybridpp.pipeline import DeviceRecorder, HostRecorder, memory_reader
from hybridpp.report import Phase, RankAction, RankRecord, RankTraffic, RankWait, Recording, StageRecord
from hybridpp.timeline import Timeline
from hybridpp_plugins.engine import Engine
from hybridpp_plugins.held_state import held_bytes
from hybridpp_plugins.settings import PluginSettings

_PACKAGES = ("hybridpp", "torch", "transformers")


class TimelineRecording:
    """The steps of one boosted model inside :meth:`hybridpp.Booster.record_timeline`.

    Attributes:
        recorder: of this rank.
    """

    def __init__(self, engine: Engine, settings: PluginSettings):
        self._engine, self._settings = engine, settings
        self._layout = layout = engine.layout
        self._recording: Recording | None = None
        # In-process ranks have one memory, of which nothing says whose it is.
        self._shares_memory = layout.world.size > 1 and layout.control.process_group is None
        memory = None if self._shares_memory else memory_reader(engine.device)
        position, device = layout.pp.rank, engine.device
        self.recorder: HostRecorder | DeviceRecorder = (
            DeviceRecorder(position, device, memory) if device.type == "cuda" else HostRecorder(position, memory)
        )
        # All ranks leave this exchange within about one message latency: the common zero of their clocks.
        gather_numbers(layout.control, "at the start of booster.record_timeline", [])
        self._zero_ms = time.monotonic_ns() / 1e6

    def finish(self) -> None:
        """Gather what all ranks recorded. Collective: all ranks."""
        own = {
            "host": socket.gethostname(),
            "zero_ms": self._zero_ms,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
            "record": self._own_record().values(),
        }
        rows = gather_objects(self._layout.control, "at the end of booster.record_timeline", own)
        # Ranks of one host have one clock, on which the first of them left the exchange when it was over.
        zeros: dict[str, float] = {}
        for row in rows:
            zeros[row["host"]] = min(row["zero_ms"], zeros.get(row["host"], row["zero_ms"]))
        ranks = [_shifted(RankRecord.of(row["record"]), zeros[row["host"]]) for row in rows]
        self._recording = Recording(
            model=type(self._engine.model).__name__,
            created=rows[0]["created"],
            versions=rows[0]["versions"],
            settings=self._own_settings(),
            stages=tuple(self._stages()),
            ranks=tuple(ranks),
        )

    @property
    def timeline(self) -> Timeline:
        """The timeline of this replica's pipeline, of the first of the ranks that share layers.

        Raises:
            ConfigError: the recording is still running.
        """
        return self.recording.timeline(self._layout.here.dp)

    @property
    def recording(self) -> Recording:
        """All that was recorded, the same on all ranks: what ``save`` writes.

        Raises:
            ConfigError: the recording is still running.
        """
        if self._recording is None:
            raise ConfigError("a timeline is complete when its `with` block has ended. Read it after the block.")
        return self._recording

    def save(self, path: str | Path) -> None:
        """Write the recording on rank 0, for ``hybridpp report``; other ranks do nothing. May be called by all.

        Args:
            path: of a folder, in which it is ``recording.json``, or of a .json file; replaced if it is there.

        Raises:
            ConfigError: the recording is still running.
        """
        recording = self.recording
        if self._layout.world.rank == 0:
            recording.save(path)

    def _own_record(self) -> RankRecord:
        engine, recorder, here = self._engine, self.recorder, self._layout.here
        actions = [
            RankAction(
                ran.step,
                ran.action.stage,
                str(ran.action.kind),
                ran.action.microbatch,
                ran.ready_ms,
                ran.start_ms,
                ran.end_ms,
                ran.memory,
                ran.peer,
                ran.message_bytes,
                ran.collective_bytes,
                ran.waited_ms,
            )
            for ran in recorder.actions()
        ]
        is_cuda = engine.device.type == "cuda"
        return RankRecord(
            rank=self._layout.world.rank,
            dp=here.dp,
            pp=here.pp,
            tp=here.tp,
            device=torch.cuda.get_device_name(engine.device) if is_cuda else "cpu",
            memory_kind="shared" if self._shares_memory else recorder.memory_kind,
            peak_bytes=torch.cuda.max_memory_allocated(engine.device) if is_cuda else None,
            held=held_bytes(engine),
            actions=tuple(actions),
            phases=tuple(
                Phase(mark.step, mark.phase, mark.time_ms, after.time_ms)
                for mark, after in pairwise(recorder.marks())
                if mark.phase
            ),
            waits=tuple(RankWait(*wait) for wait in recorder.waits()),
            traffic=tuple(RankTraffic(*row) for row in recorder.traffic()),
        )

    def _own_settings(self) -> dict[str, Any]:
        settings, layout = self._settings, self._layout
        schedule: Any = settings.pipeline.schedule
        return {
            "tp_size": layout.tp.size,
            "pp_size": layout.pp.size,
            "dp_size": layout.dp.size,
            "schedule": schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "programs"),
            "precision": str(settings.precision),
            "zero_stage": settings.zero.zero_stage,
            "recomputes": settings.pipeline.recomputation is not None,
            "compiles": settings.compile.is_on,
        }

    def _stages(self) -> Iterator[StageRecord]:
        staged, sizes = self._engine.staged, self._engine.original.sizes
        for stage, position in enumerate(self._engine.planner.placement):
            units = [unit for unit, stages in staged.unit_stages.items() if stage in stages]
            parameters = sum(sizes[name] for name, stages in staged.owners.items() if stage in stages)
            yield StageRecord(position, ", ".join(name_ranges(units)), parameters)


@contextmanager
def recorded(engine: Engine, settings: PluginSettings) -> Iterator[TimelineRecording]:
    """A context that records the steps of a model. Collective: all ranks, at the start and at the end."""
    engine.recording = recording = TimelineRecording(engine, settings)
    progress, optimizer = engine.layout.world.progress, engine.optimizer
    observer, progress.observer = progress.observer, recording.recorder
    while_updating = None if optimizer is None else optimizer.while_updating

    @contextmanager
    def updating(inner: AbstractContextManager[None]) -> Iterator[None]:
        recording.recorder.mark("update")
        try:
            with inner:
                yield
        finally:
            recording.recorder.mark("")

    if optimizer is not None and while_updating is not None:
        optimizer.while_updating = lambda: updating(while_updating())
    try:
        yield recording
    finally:
        engine.recording, progress.observer = None, observer
        if optimizer is not None and while_updating is not None:
            optimizer.while_updating = while_updating
    recording.finish()


def _shifted(record: RankRecord, zero_ms: float) -> RankRecord:
    """A record whose clock begins at a common zero; times to a tenth of a microsecond."""

    def moved(row: Any) -> Any:
        times = {name: getattr(row, name) for name in ("ready_ms", "start_ms", "end_ms") if hasattr(row, name)}
        return row._replace(**{name: round(time_ms - zero_ms, 4) for name, time_ms in times.items()})

    return RankRecord(
        **{
            **{name: getattr(record, name) for name in record.__dataclass_fields__},
            "actions": tuple(moved(row)._replace(waited_ms=round(row.waited_ms, 4)) for row in record.actions),
            "phases": tuple(moved(row) for row in record.phases),
            "waits": tuple(moved(row) for row in record.waits),
        }
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout that is not installed
            continue
    return found
