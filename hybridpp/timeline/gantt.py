"""The matplotlib figure of ``draw``."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from hybridpp.timeline.span import Span
from hybridpp.timeline.timeline import Timeline

Color: TypeAlias = tuple[float, float, float]


class _Look(NamedTuple):
    color: str
    label: str


_LOOKS = {
    "F": _Look("#3a6ea5", "F forward"),
    "B": _Look("#2b8a6b", "B backward"),
    "I": _Look("#52b2a0", "I gradient of the input"),
    "W": _Look("#e3a33b", "W gradient of the weights"),
}
_OTHER = _Look("#6b6b76", "messages and sums")
_SHADE = _Look("#33333a", "")  # of the chunks in the legend
_IDLE = "#f1f1f4"
_CELL, _LINE = 0.86, 0.07  # heights in rows: of compute spans, and of communication below them
_FONT_PT, _SMALLEST_PT = 8.0, 5.0
_DIGIT = 0.64  # width of a digit, in font sizes
_WIDTHS_IN, _CELL_IN = (8.0, 20.0), 0.2  # smallest and largest width of the figure, and the preferred width of a cell


def save(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Draw the timelines below each other on one time scale. Equal timelines give equal files."""
    cells = max(len(timeline.of_rank(0)) for timeline in timelines.values())
    width_in = min(max(_WIDTHS_IN[0], cells * _CELL_IN), _WIDTHS_IN[1])
    heights = [0.36 * timeline.num_ranks + 0.55 for timeline in timelines.values()]
    figure = Figure(figsize=(width_in, sum(heights) + 0.55), layout="constrained")
    rows = figure.subplots(len(heights), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    longest_ms = max(timeline.makespan_ms for timeline in timelines.values())
    for axes, (title, timeline) in zip(rows, timelines.items(), strict=True):
        _Rows(axes, timeline, points_per_ms=72 * (width_in - 0.9) / longest_ms).draw(title)
    rows[0].set_xlim(0, longest_ms)
    rows[-1].set_xlabel("ms")
    handles = _legend(timelines)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=_FONT_PT)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hybridpp"}):
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=metadata)


class _Rows:
    """One timeline on its axes."""

    def __init__(self, axes: Axes, timeline: Timeline, points_per_ms: float):
        self._axes = axes
        self._timeline = timeline
        self._points_per_ms = points_per_ms
        # Every cell has room for the longest number, so that equal cells all show their numbers or none does.
        self._num_digits = max((len(str(span.microbatch)) for span in timeline.spans if span.computes), default=1)

    def draw(self, title: str) -> None:
        timeline, axes = self._timeline, self._axes
        facts = f"{timeline.makespan_ms:,.4g} ms, {100 * timeline.idle_share:.1f} % idle"
        axes.set_title(f"{title}: {facts}" if title else facts, fontsize=10, loc="left")
        axes.set_facecolor(_IDLE)
        axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
        axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
        axes.tick_params(left=False, labelsize=_FONT_PT)
        axes.spines[["top", "right", "left"]].set_visible(False)
        for rank in range(timeline.num_ranks):
            self._row(rank)

    def _row(self, rank: int) -> None:
        spans = self._timeline.of_rank(rank)
        chunks = {stage: chunk for chunk, stage in enumerate(sorted({span.stage for span in spans}))}
        colors = [_color(_LOOKS.get(span.kind, _OTHER), chunks[span.stage], len(chunks)) for span in spans]
        shapes = [self._shape(span) for span in spans]
        # A gap between cells, narrow enough to leave small cells visible.
        gaps = [min(0.6, 0.1 * span.duration_ms * self._points_per_ms) if span.computes else 0 for span in spans]
        self._axes.add_collection(PatchCollection(shapes, facecolors=colors, edgecolors="white", linewidths=gaps))
        for span, color in zip(spans, colors, strict=True):
            if span.computes and span.microbatch is not None:
                self._number(span, color)

    def _shape(self, span: Span) -> Rectangle:
        height = _CELL if span.computes else _LINE
        top = span.rank - _CELL / 2 if span.computes else span.rank + _CELL / 2
        return Rectangle((span.start_ms - self._timeline.start_ms, top), span.duration_ms, height)

    def _number(self, span: Span, color: Color) -> None:
        size = min(_FONT_PT, span.duration_ms * self._points_per_ms / (_DIGIT * self._num_digits + 0.6))
        if size >= _SMALLEST_PT:
            middle = (span.start_ms + span.end_ms) / 2 - self._timeline.start_ms
            shade = "white" if _luminance(color) < 0.55 else "#222222"
            self._axes.text(
                middle, span.rank, str(span.microbatch), size=size, color=shade, ha="center", va="center_baseline"
            )


def _color(look: _Look, chunk: int, num_chunks: int) -> Color:
    """The color of a kind; later stages on the same rank are paler."""
    red, green, blue = to_rgb(look.color)
    pale = 0.5 * chunk / max(1, num_chunks - 1)
    return red + (1 - red) * pale, green + (1 - green) * pale, blue + (1 - blue) * pale


def _luminance(color: Color) -> float:
    red, green, blue = color
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _legend(timelines: Mapping[str, Timeline]) -> list[Artist]:
    """The kinds that occur, and the shades if ranks have several stages."""
    kinds = {span.kind for timeline in timelines.values() for span in timeline.spans}
    num_chunks = max(
        len({span.stage for span in timeline.of_rank(rank)})
        for timeline in timelines.values()
        for rank in range(timeline.num_ranks)
    )
    handles: list[Artist] = [
        Patch(color=look.color, label=look.label) for kind, look in _LOOKS.items() if kind in kinds
    ]
    if num_chunks > 1:
        for chunk in range(num_chunks):
            handles.append(Patch(color=_color(_SHADE, chunk, num_chunks), label=f"chunk {chunk}"))
    if kinds - _LOOKS.keys():
        handles.append(Line2D([], [], color=_OTHER.color, linewidth=3, label=_OTHER.label))
    return handles
