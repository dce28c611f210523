"""``hybridpp simulate``: the time of a step, from the costs of its stages."""

from functools import partial
from statistics import fmean, quantiles

from hybridpp.cli.argtypes import per_stage
from hybridpp.cli.commands.simulate import SimulateArguments
from hybridpp.cli.files import read, write
from hybridpp.cli.output import show, working
from hybridpp.cli.schedule_source import programs_of, sizes
from hybridpp.errors import ConfigError
from hybridpp.report import FORMAT, Recording
from hybridpp.schedule import Programs, placement, save_schedule
from hybridpp.simulate import Costs, Simulation, search_schedule, simulate, simulate_draws
from hybridpp.sizes import parse_bytes
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
    measured = None if arguments.measured is None else _measured(arguments.measured)
    lines: list[str | TextTable] = []
    if arguments.search:
        name, programs, costs, lines = _found(arguments, measured)
    else:
        name, programs = _given(arguments)
        costs = _costs(arguments, len(placement(programs)), measured)
    simulation = simulate(programs, costs, arguments.steps, barrier=arguments.barrier)
    lines += _table(simulation, arguments.steps)
    if measured is not None:
        lines += _expected(programs, measured)
    if arguments.draw is not None:
        timelines = {"measured": measured} if measured else {}
        lines.append(write(arguments.draw, partial(draw, {**timelines, name: simulation.timeline})))
    if arguments.save is not None:
        lines.append(write(arguments.save, partial(save_schedule, programs)))
    if arguments.trace is not None:
        lines.append(write(arguments.trace, partial(save_trace, simulation.timeline)))
    show(*lines)


def _measured(path: str) -> Timeline:
    """A timeline, or the first pipeline of a recording."""
    text = read(path)
    if FORMAT in text[:200]:
        return Recording.from_json(text, repr(path)).timeline()
    return Timeline.from_json(text)


def _given(arguments: SimulateArguments) -> tuple[str, Programs]:
    """The schedule that is named."""
    if arguments.schedule is None:
        raise ConfigError("there is nothing to simulate. Name a schedule or a file, or pass --search.")
    if arguments.memory is not None or arguments.save is not None:
        flag = "--memory" if arguments.memory is not None else "--save"
        raise ConfigError(f"{flag} is for a search: got it with {arguments.schedule}. Leave one out, or add --search.")
    return arguments.schedule, programs_of(arguments.schedule, arguments)


def _found(
    arguments: SimulateArguments, measured: Timeline | None
) -> tuple[str, Programs, Costs, list[str | TextTable]]:
    """The schedule that a search finds, with the costs of its stages if some recompute, and what is said of it."""
    if arguments.schedule is not None:
        raise ConfigError(f"--search finds a schedule: got {arguments.schedule}, too. Leave one of them out.")
    num_ranks, num_microbatches = sizes(arguments)
    costs = _costs(arguments, num_ranks * (arguments.chunks or 1), measured)
    memory = None
    if arguments.memory is not None:
        each = tuple(float(parse_bytes("--memory", one)) for one in arguments.memory.split(","))
        memory = each if len(each) > 1 else each[0]
    with working("search"):
        found = search_schedule(costs, num_ranks, num_microbatches, memory_bytes=memory)
    lines: list[str | TextTable] = [
        f"found: {found.name}, {found.step_ms:,.1f} ms, at most {100 * found.gap:.1f} % above the shortest possible"
    ]
    if found.recomputed_stages:
        layers = ", ".join("all" if stage in found.recomputed_stages else "0" for stage in range(costs.num_stages))
        stages = ", ".join(map(str, found.recomputed_stages))
        lines.append(f"stages that recompute: {stages} (num_ckpt_layers_per_stage: {layers})")
    return found.name, found.programs, costs.with_recomputation(found.recomputed_stages), [*lines, ""]


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
