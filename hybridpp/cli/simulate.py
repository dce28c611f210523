"""``hybridpp simulate``: the time of a step, from the costs of its stages."""

from functools import partial
from statistics import fmean, quantiles

from hybridpp.cli.argtypes import per_stage
from hybridpp.cli.commands.simulate import SimulateArguments
from hybridpp.cli.files import read, write
from hybridpp.cli.output import show
from hybridpp.cli.schedule_source import programs_of
from hybridpp.errors import ConfigError
from hybridpp.report import FORMAT, Recording
from hybridpp.schedule import Programs, placement
from hybridpp.simulate import Costs, Simulation, simulate, simulate_draws
from hybridpp.text_table import TextTable
from hybridpp.timeline import Timeline, draw, save_trace

_COSTS = (
    "forward_ms",
    "input_gradient_ms",
    "weight_gradient_ms",
    "backward_ms",
    "send_ms",
    "post_ms",
    "reduce_ms",
    "activation_bytes",
    "weight_gradient_bytes",
)


def run(arguments: SimulateArguments) -> None:
    """Print a line per rank, and the step's time."""
    programs = programs_of(arguments.schedule, arguments)
    measured = None if arguments.measured is None else _measured(arguments.measured)
    simulation = simulate(
        programs,
        _costs(arguments, len(placement(programs)), measured),
        arguments.steps,
        barrier=arguments.barrier,
    )
    lines = _table(simulation, arguments.steps)
    if measured is not None:
        lines += _expected(programs, measured)
    if arguments.draw is not None:
        timelines = {"measured": measured} if measured else {}
        lines.append(write(arguments.draw, partial(draw, {**timelines, arguments.schedule: simulation.timeline})))
    if arguments.trace is not None:
        lines.append(write(arguments.trace, partial(save_trace, simulation.timeline)))
    show(*lines)


def _measured(path: str) -> Timeline:
    """A timeline, or the first pipeline of a recording."""
    text = read(path)
    if FORMAT in text[:200]:
        return Recording.from_json(text, repr(path)).timeline()
    return Timeline.from_json(text)


def _costs(arguments: SimulateArguments, num_stages: int, measured: Timeline | None) -> Costs:
    given = {
        name: per_stage(f"--{name.replace('_', '-')}", text)
        for name in _COSTS
        if (text := getattr(arguments, name)) is not None
    }
    sources = [
        flag for flag, used in (("--costs", arguments.costs), ("--measured", measured), ("the times", given)) if used
    ]
    if len(sources) > 1:
        raise ConfigError(f"costs need one source: got {' and '.join(sources)}. Remove one.")
    if arguments.costs is not None:
        return Costs.from_json(read(arguments.costs))
    if measured is not None:
        return Costs.from_timeline(measured, 1 + max((span.stage for span in measured.spans), default=0))
    return Costs(num_stages=num_stages, **given)


def _expected(programs: Programs, measured: Timeline) -> list[str]:
    """The expected time of steps whose actions vary as measured, if the programs have the measured actions."""
    kinds = {(span.stage, span.kind) for span in measured.spans}
    if not all((action.stage, action.kind) in kinds for program in programs for action in program):
        return []  # another schedule was measured, so there are no times to draw from
    times = [draw_.timeline.makespan_ms for draw_ in simulate_draws(programs, measured)]
    *_, most = quantiles(times, n=20)
    return [f"with times that vary as measured: {fmean(times):,.1f} ms; 95 % of steps take at most {most:,.1f}"]


def _table(simulation: Simulation, num_steps: int) -> list[str | TextTable]:
    timeline = simulation.timeline
    titles = ["rank", "busy ms", "idle", "activations"]
    rows = [
        [
            f"{rank}",
            f"{timeline.busy_ms(rank):,.1f}",
            f"{100 * (1 - timeline.busy_ms(rank) / (timeline.makespan_ms or 1)):.1f} %",
            f"{simulation.peak_activations[rank]}",
        ]
        for rank in range(timeline.num_ranks)
    ]
    if any(simulation.peak_bytes):
        titles.append("MiB held")
        rows = [[*row, f"{held / 2**20:,.1f}"] for row, held in zip(rows, simulation.peak_bytes, strict=True)]
    each = f" ({timeline.makespan_ms / num_steps:,.1f} each)" if num_steps > 1 else ""
    steps = f"{num_steps} steps" if num_steps > 1 else "step"
    total = f"{steps}: {timeline.makespan_ms:,.1f} ms{each}, {100 * simulation.idle_share:.1f} % idle"
    return [TextTable(titles, rows), "", total]
