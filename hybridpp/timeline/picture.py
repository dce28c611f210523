"""A timeline as a picture. matplotlib is imported when the first one is drawn."""

import importlib
from collections.abc import Mapping
from pathlib import Path

from hybridpp.errors import ConfigError
from hybridpp.timeline.timeline import Timeline

_SUFFIXES = (".pdf", ".png", ".svg")


def draw(timelines: Timeline | Mapping[str, Timeline], path: str | Path) -> None:
    """Draw a row per rank and a cell per action, labelled with its micro-batch, and the idle share.

    Colors distinguish forwards and backwards, shades the stages of one rank. Messages are thin lines below the cells.

    Args:
        timelines: one, or several by title, as in ``{"simulated": ..., "measured": ...}``; they are drawn below each
            other on one time scale.
        path: of the file to write; it ends in .svg, .png or .pdf.

    Raises:
        ConfigError: the path has another ending, a timeline is empty, or matplotlib is not installed.
    """
    if Path(path).suffix not in _SUFFIXES:
        raise ConfigError(f"a picture's file ends in one of {', '.join(_SUFFIXES)}: got {str(path)!r}.")
    titled = {"": timelines} if isinstance(timelines, Timeline) else timelines
    if not titled or any(timeline.makespan_ms == 0 for timeline in titled.values()):
        raise ConfigError("there is nothing to draw: a timeline has no span that takes time.")
    try:
        gantt = importlib.import_module("hybridpp.timeline.gantt")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ConfigError("a picture needs matplotlib. Install it: pip install 'hybridpp[plot]'.") from error
    gantt.save(titled, Path(path))
