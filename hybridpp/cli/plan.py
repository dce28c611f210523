"""``hybridpp plan``: the fastest layouts of a model on some devices that fit in their memory."""

import json
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hybridpp.cli.argtypes import counts
from hybridpp.cli.commands.plan import PlanArguments
from hybridpp.cli.estimate_flags import estimator_of
from hybridpp.cli.output import show, working
from hybridpp.cli.plan_table import render_plan
from hybridpp.cli.schedule_search import SearchedLayout, check_file, num_chunks, searched
from hybridpp.errors import ConfigError, HybridppError
from hybridpp.estimate import LayoutEstimate, LayoutEstimator, SearchResult, SearchSpace, plugin_call, search, values_of
from hybridpp.sizes import parse_bytes

_GIB = 2**30
# Layouts for which a schedule is searched: each takes some seconds.
_NUM_SEARCHED = 3


def run(arguments: PlanArguments) -> None:
    """Print the table, or JSON."""
    settings = {"enable_sequence_parallelism": True} if arguments.enable_sequence_parallelism else {}
    start = time.perf_counter()
    with working("build the model on the meta device"):
        estimator = estimator_of(arguments, settings)
    device = estimator.given.device
    memory = 0.9 * device.memory_gib * _GIB if arguments.memory is None else parse_bytes("--memory", arguments.memory)
    space = SearchSpace(
        num_devices=arguments.devices,
        memory_bytes=int(memory),
        global_batch=arguments.global_batch,
        tp_sizes=_numbers("--tp-sizes", arguments.tp_sizes),
        pp_sizes=_numbers("--pp-sizes", arguments.pp_sizes),
        microbatch_sizes=_numbers("--microbatch-sizes", arguments.microbatch_sizes),
        zero_stages=_zero_stages(arguments.zero_stages),
        recomputes=(False,) if arguments.no_recompute else (False, True),
        num_kept=arguments.top,
        **({} if arguments.schedules is None else {"schedules": _names(arguments.schedules)}),
    )
    if arguments.search_schedule is not None:
        check_file(arguments.search_schedule)
    with working("search") as now:
        result = search(estimator, space)
        better = None
        if arguments.search_schedule is not None:
            now("search for a schedule")
            better = _searched(estimator, result, int(memory))
    lines: list[str] = []
    if better is not None and arguments.search_schedule is not None:
        estimate, lines = better.saved_as(arguments.search_schedule)
        result = replace(result, best=(estimate, *result.best)[: arguments.top])
    elif arguments.search_schedule is not None:
        lines = ["no schedule that was searched is faster"]
    if arguments.json:
        found = [
            {**values_of(one), "call": plugin_call(one, arguments.precision), "settings": dict(one.settings)}
            for one in result.best
        ]
        values = {"best": found, "num_candidates": result.num_candidates, "notes": list(estimator.notes)}
        show(json.dumps(values, indent=2))
    else:
        table = render_plan(result, arguments.precision, device, time.perf_counter() - start)
        show(*table, *(["", *estimator.notes] if estimator.notes else []), *lines)


def _searched(estimator: LayoutEstimator, result: SearchResult, memory_bytes: int) -> SearchedLayout | None:
    """The best of the layouts that the named schedules make fast, with schedules that are searched; None: it is slower.

    The nearest layout that does not fit is tried, too: another schedule may hold less.
    """
    tried: dict[tuple[Any, ...], LayoutEstimate] = {}
    for one in (*result.best, *([result.least] if result.least else [])):
        settings, chunks = one.settings, num_chunks(one.settings.get("schedule"))
        if settings["pp_size"] > 1 and len(tried) < _NUM_SEARCHED:
            tried.setdefault((settings["tp_size"], settings["pp_size"], one.sizes, chunks), one)
    best: SearchedLayout | None = None
    for one in tried.values():
        with suppress(HybridppError):  # not even one micro-batch fits
            found = searched(estimator, one.sizes, one.settings, memory_bytes)
            if best is None or found.estimate.time.step_ms < best.estimate.time.step_ms:
                best = found
    return best if best and best.estimate.time.step_ms < result.best[0].time.step_ms else None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _numbers(flag: str, text: str | None) -> tuple[int, ...] | None:
    numbers = counts(flag, text)
    return None if numbers is None else tuple(numbers)


def _zero_stages(text: str) -> tuple[int, ...]:
    found = [stage.strip() for stage in text.split(",")]
    if not set(found) <= {"0", "1", "2", "3"}:
        raise ConfigError(f"zero_stage must be 0, 1, 2 or 3: got {text!r}. Separate several by commas, as 0,1.")
    return tuple(map(int, found))
