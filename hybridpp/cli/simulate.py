"""``hybridpp simulate``: the time of a step, from the costs of its stages."""

from argparse import ArgumentParser, Namespace
from functools import partial
from statistics import fmean, quantiles

from hybridpp.cli.argtypes import per_stage, positive
from hybridpp.cli.files import read, write
from hybridpp.cli.schedule_source import add_sizes, programs_of
from hybridpp.errors import ConfigError
from hybridpp.schedule import SCHEDULES, Programs, placement
from hybridpp.simulate import Costs, Simulation, simulate, simulate_draws
from hybridpp.text_table import text_table
from hybridpp.timeline import Timeline, draw, save_trace

_COSTS = {
    "forward_ms": "time of a stage's forward (default: 1)",
    "input_gradient_ms": "time of I, the first half of a backward (default: 1)",
    "weight_gradient_ms": "time of W, the second half of a backward (default: 1)",
    "backward_ms": "time of an unsplit backward (default: I and W together)",
    "send_ms": "time of a message between ranks (default: 0)",
    "post_ms": "time that a rank itself spends on each message (default: 0)",
    "reduce_ms": "time to reduce a stage's gradients over the replicas (default: 0)",
    "activation_bytes": "memory of a stage from its forward to its backward (default: not counted)",
    "weight_gradient_bytes": "memory of a stage from I to W (default: not counted)",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    parser.epilog = "Times are milliseconds per micro-batch. X is one number for all stages; X,X,... is one per stage."
    parser.add_argument(
        "schedule", metavar="NAME | FILE", help=f"one of {', '.join(SCHEDULES)}; or a .csv or .json file"
    )
    add_sizes(parser)
    for name, help_text in _COSTS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=per_stage, metavar="X[,X...]", help=help_text)
    parser.add_argument("--costs", metavar="FILE", help="take these from a JSON file instead")
    parser.add_argument("--measured", metavar="FILE", help="take times from a measured timeline (JSON) instead")
    parser.add_argument("--steps", type=positive, default=1, metavar="N", help="steps in a row, each rank on its own")
    parser.add_argument(
        "--barrier", action="store_true", help="all ranks wait for each other between steps, as in fp16 or to clip"
    )
    parser.add_argument(
        "--draw", metavar="FILE", help="draw it, into a .svg, .png or .pdf file; below what was measured"
    )
    parser.add_argument("--trace", metavar="FILE", help="write a trace for https://ui.perfetto.dev (JSON)")


def run(arguments: Namespace) -> str:
    """Returns a line per rank, and the step's time."""
    programs = programs_of(arguments.schedule, arguments)
    measured = None if arguments.measured is None else Timeline.from_json(read(arguments.measured))
    simulation = simulate(
        programs,
        _costs(arguments, len(placement(programs)), measured),
        arguments.steps,
        barrier=arguments.barrier,
    )
    lines = [_table(simulation, arguments.steps)]
    if measured is not None:
        lines += _expected(programs, measured)
    if arguments.draw is not None:
        timelines = {"measured": measured} if measured else {}
        lines.append(write(arguments.draw, partial(draw, {**timelines, arguments.schedule: simulation.timeline})))
    if arguments.trace is not None:
        lines.append(write(arguments.trace, partial(save_trace, simulation.timeline)))
    return "\n".join(lines)


def _costs(arguments: Namespace, num_stages: int, measured: Timeline | None) -> Costs:
    given = {name: value for name in _COSTS if (value := getattr(arguments, name)) is not None}
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


def _table(simulation: Simulation, num_steps: int) -> str:
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
    return f"{text_table(titles, rows)}\n\n{total}"
