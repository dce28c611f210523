"""``hybridpp schedule``: print, draw, save, check and compare schedules."""

from functools import partial

from hybridpp.cli.commands.schedule import ScheduleArguments
from hybridpp.cli.files import write
from hybridpp.cli.output import show
from hybridpp.cli.schedule_source import load_plan, programs_of, sizes
from hybridpp.errors import ConfigError
from hybridpp.schedule import (
    SCHEDULES,
    ActionKind,
    Programs,
    lower,
    make_schedule,
    peak_activations,
    placement,
    render_grid,
    save_schedule,
)
from hybridpp.simulate import Costs, simulate
from hybridpp.text_table import TextTable
from hybridpp.timeline import Timeline, draw

_UNITS = "F, I and W take one slot each, B two, messages none"


def run(arguments: ScheduleArguments) -> None:
    """Print the grid, the table, or the result of the check."""
    writes = arguments.draw is not None or arguments.save is not None
    match arguments.words or []:
        case [] if arguments.compare and not writes:
            show(*compare(*sizes(arguments), arguments.chunks))
        case ["check", path] if not arguments.compare and not writes:
            show(f"OK: {summary(load_plan(path, arguments))}")
        case [text] if not arguments.compare and text != "check":
            _show(text, arguments)
        case _:
            raise ConfigError(
                "these arguments do not go together. Use hybridpp schedule NAME or hybridpp schedule FILE, with or "
                "without --draw and --save, hybridpp schedule check FILE, or hybridpp schedule --compare."
            )


def _show(text: str, arguments: ScheduleArguments) -> None:
    programs = programs_of(text, arguments)
    lines = [render_grid(programs), summary(programs)]
    if arguments.draw is not None:
        lines.append(write(arguments.draw, partial(draw, {text: _timeline(programs)})))
    if arguments.save is not None:
        lines.append(write(arguments.save, partial(save_schedule, programs)))
    show(*lines)


def _timeline(programs: Programs) -> Timeline:
    return simulate(programs, Costs(num_stages=len(placement(programs)))).timeline


def summary(programs: Programs) -> str:
    """Sizes, idle share and memory in a line."""
    num_microbatches = len({action.microbatch for program in programs for action in program})
    peaks = " ".join(map(str, peak_activations(programs)))
    return (
        f"{len(programs)} ranks, {len(placement(programs))} stages, {num_microbatches} micro-batches, "
        f"{100 * _timeline(programs).idle_share:.1f} % idle, peak activations by rank {peaks}"
    )


def compare(num_ranks: int, num_microbatches: int, num_chunks: int | None) -> list[str | TextTable]:
    """A table with a line per schedule, and a legend."""
    rows = []
    for name, entry in SCHEDULES.items():
        programs = make_schedule(name, num_ranks, num_microbatches, num_chunks if entry.takes_chunks else None)
        rows.append((name, *_facts(programs, num_microbatches)))
    return [
        TextTable(("schedule", "ranks", "stages", "idle", "activations", "messages"), rows),
        "",
        *(f"{entry.name}: {entry.summary}" for entry in SCHEDULES.values()),
        "",
        f"idle: share of the ranks' time; {_UNITS}",
        "activations: the largest number that a rank holds, in micro-batches of 1/ranks of the model",
        "messages: between ranks, per micro-batch",
    ]


def _facts(programs: Programs, num_microbatches: int) -> tuple[str, ...]:
    num_ranks, num_stages = len(programs), len(placement(programs))
    sends = (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)
    num_messages = sum(action.kind in sends for program in lower(programs) for action in program)
    return (
        f"{num_ranks}",
        f"{num_stages}",
        f"{100 * _timeline(programs).idle_share:.1f} %",
        f"{max(peak_activations(programs)) * num_ranks / num_stages:.1f}",
        f"{num_messages / num_microbatches:g}",
    )
