"""Layouts that a search has found, as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridpp.estimate import DeviceProfile, LayoutEstimate, SearchResult, plugin_call, why_slower
from hybridpp.text_table import TextTable

_GIB = 2**30
_TITLES = ("", "tp,pp,dp", "zero", "schedule", "batches", "recompute", "GiB", "ms", "slower")
_NOTHING = {"-", "0"}


def render_plan(result: SearchResult, precision: str, device: DeviceProfile, seconds: float) -> list[str | TextTable]:
    """A line per layout, the fastest first; why each is slower than the first; and the plugin call of the first."""
    best = result.best[0]
    rows = [_row(number, estimate, best) for number, estimate in enumerate(result.best, start=1)]
    reasons = [f"{number:>2}  {why_slower(estimate, best)}" for number, estimate in enumerate(result.best[1:], start=2)]
    alike = [f"{number:>2}  {_others(one)}" for number, one in enumerate(result.best, start=1) if one.alike]
    source = "units measured" if best.is_measured else "from FLOPs and bytes"
    return [
        f"{result.num_candidates:,} layouts in {seconds:.0f} s, {result.num_estimated:,} of them simulated, "
        f"{result.num_too_large:,} too large; on {device.name}, {source}",
        "",
        _table(rows),
        f"batches: micro-batches of a replica and their size; {best.global_batch:,} samples in a step",
        "",
        *(["as fast, and no smaller", *alike, ""] if alike else []),
        *(["why slower than the first (which has in brackets)", *reasons, ""] if reasons else []),
        plugin_call(best, precision),
    ]


def _row(number: int, estimate: LayoutEstimate, best: LayoutEstimate) -> tuple[str, ...]:
    given, sizes, time = estimate.settings, estimate.sizes, estimate.time
    slower = time.step_ms / best.time.step_ms - 1
    return (
        str(number),
        f"{given['tp_size']},{given['pp_size']},{estimate.num_replicas}",
        str(given.get("zero_stage", 0)),
        str(given.get("schedule") or "-"),
        f"{sizes.num_microbatches} of {sizes.microbatch_size}",
        _recomputed(given),
        f"{estimate.worst.total / _GIB:.2f}",
        f"{time.step_ms:,.1f}",
        f"{100 * slower:.1f} %" if number > 1 else "",
    )


def _others(estimate: LayoutEstimate) -> str:
    """The layouts that are like this one, by what is different."""
    own = estimate.settings
    by_schedule: dict[str, list[str]] = {}
    for other in estimate.alike:
        schedule = "" if other.get("schedule") == own.get("schedule") else str(other.get("schedule") or "1f1b")
        by_schedule.setdefault(schedule, []).append(str(other.get("zero_stage", 0)))
    parts = [
        f"{f'{schedule} and ' if schedule else ''}zero {', '.join(sorted(stages))}"
        for schedule, stages in sorted(by_schedule.items())
    ]
    return f"also with {'; '.join(parts)}"


def _table(rows: Sequence[tuple[str, ...]]) -> TextTable:
    """The rows, without columns that say of every layout that it has none of something: they fit 80 characters."""
    kept = [number for number, cells in enumerate(zip(*rows, strict=True)) if not set(cells) <= _NOTHING]
    return TextTable([_TITLES[number] for number in kept], [tuple(row[number] for number in kept) for row in rows])


def _recomputed(settings: Mapping[str, Any]) -> str:
    config = settings.get("gradient_checkpoint_config")
    return "-" if config is None else "some" if config else "all"
