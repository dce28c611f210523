"""Timelines of steps that ran: when each rank of a pipeline ran each action."""

import time

import torch

from hybridpp.cluster import gather_numbers, gather_objects
from hybridpp.errors import ConfigError
from hybridpp.pipeline import DeviceRecorder, HostRecorder
from hybridpp.timeline import Span, Timeline
from hybridpp_plugins.layout import Layout


class TimelineRecording:
    """The steps of one boosted model inside :meth:`hybridpp.Booster.record_timeline`."""

    def __init__(self, layout: Layout, device: torch.device):
        self._layout = layout
        self._timeline: Timeline | None = None
        # All ranks leave this exchange within about one message latency: the common zero of their clocks.
        gather_numbers(layout.control, "at the start of booster.record_timeline", [])
        self._zero_ms = time.monotonic_ns() / 1e6
        position = layout.pp.rank
        self.recorder: HostRecorder | DeviceRecorder = (
            DeviceRecorder(position, device) if device.type == "cuda" else HostRecorder(position)
        )

    def finish(self) -> None:
        """Gather the spans of all ranks. Collective: all ranks."""
        own_spans = [
            span._replace(start_ms=span.start_ms - self._zero_ms, end_ms=span.end_ms - self._zero_ms)
            for span in self.recorder.spans()
        ]
        rows = gather_objects(self._layout.control, "at the end of booster.record_timeline", own_spans)
        layout = self._layout
        pipeline = [layout.rank_of(layout.here.dp, position) for position in range(layout.grid.pp_size)]
        self._timeline = Timeline(tuple(Span(*fields) for rank in pipeline for fields in rows[rank]))

    @property
    def timeline(self) -> Timeline:
        """The timeline of this replica's pipeline.

        Raises:
            ConfigError: the recording is still running.
        """
        if self._timeline is None:
            raise ConfigError("a timeline is complete when its `with` block has ended. Read it after the block.")
        return self._timeline
