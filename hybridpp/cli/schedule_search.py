"""The fastest schedule of one layout that fits in memory, for ``estimate`` and ``plan``."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hybridpp.cli.files import write
from hybridpp.errors import ConfigError
from hybridpp.estimate import JobSizes, LayoutEstimate, LayoutEstimator
from hybridpp.schedule import SCHEDULES, save_schedule
from hybridpp.simulate import FoundSchedule, search_schedule

# The room for micro-batches is an estimate; where a layout needs more, the search gets less.
_ATTEMPTS = 3


class SearchedLayout(NamedTuple):
    """A layout with the schedule that was found for it."""

    found: FoundSchedule
    estimate: LayoutEstimate

    def saved_as(self, path: str) -> tuple[LayoutEstimate, list[str]]:
        """Write the schedule to a file; returns the layout that names it, and what to print."""
        lines = [
            f"schedule: {self.found.name}, at most {100 * self.found.gap:.1f} % above the shortest of these stages",
            write(path, partial(save_schedule, self.found.programs)),
        ]
        return replace(self.estimate, settings={**self.estimate.settings, "schedule": path}), lines


def num_chunks(schedule: str | None) -> int:
    """Stages per rank of a named schedule."""
    entry = None if schedule is None else SCHEDULES.get(schedule)
    return 1 if entry is None else entry.num_chunks


def check_file(path: str, pp_size: int | None = None) -> None:
    """Refuse what no schedule can be searched for, before anything is computed.

    Raises:
        ConfigError: there is one stage, or the file is of another kind.
    """
    if pp_size == 1:
        raise ConfigError("--search-schedule is for pipelines: got --pp-size 1. Use 2 or more, or leave it out.")
    if Path(path).suffix not in (".csv", ".json"):
        raise ConfigError(f"--search-schedule writes a .csv or .json file: got {path!r}. Use one of these endings.")


def searched(
    estimator: LayoutEstimator, sizes: JobSizes, settings: Mapping[str, Any], memory_bytes: int
) -> SearchedLayout:
    """Search for the schedule of a layout.

    Raises:
        ScheduleError: not even one micro-batch fits.
        ConfigError: what was found needs more memory than estimated.
    """
    given = estimator.schedule_costs(sizes, settings, memory_bytes)
    room, pp_size = list(given.room), settings["pp_size"]
    excess = 0
    for _ in range(_ATTEMPTS):
        found = search_schedule(given.costs, pp_size, sizes.num_microbatches, memory_bytes=room)
        chosen = {name: value for name, value in settings.items() if name not in _CHOSEN}
        # Settings that all layouts share are not given twice.
        chosen = {name: value for name, value in chosen.items() if name not in estimator.given.settings}
        chosen["schedule"] = found.programs
        if found.recomputed_stages:
            counts = [count * (stage in found.recomputed_stages) for stage, count in enumerate(given.num_blocks)]
            chosen["gradient_checkpoint_config"] = {"num_ckpt_layers_per_stage": counts}
        estimate = estimator.estimate(sizes, chosen)
        excess = estimate.worst.total - memory_bytes
        if excess <= 0:
            return SearchedLayout(found, estimate)
        room = [max(0, own - max(0, rank.total - memory_bytes)) for own, rank in zip(room, estimate.ranks, strict=True)]
    raise ConfigError(
        f"the schedule that was found needs {excess / 2**20:,.1f} MiB more than there is. Use smaller micro-batches, "
        "or more memory."
    )


_CHOSEN = ("schedule", "num_model_chunks", "gradient_checkpoint_config")
