"""``hybridpp simulate``: its arguments."""

from dataclasses import dataclass
from typing import Annotated, Any

from hybridpp.cli.argtypes import argument, count, option
from hybridpp.cli.command import Command
from hybridpp.cli.commands.sizes import Sizes
from hybridpp.schedule import SCHEDULES


def _cost(help: str) -> Any:
    return option(help, "X,...")


@dataclass(frozen=True, kw_only=True)
class SimulateArguments(Sizes):
    """Simulate the time of a step from the costs of its stages.

    Times are milliseconds per micro-batch, bytes per stage. X is one number for all stages; X,X,... is one per stage.
    """

    schedule: Annotated[
        str | None, argument(f"The schedule: one of {', '.join(SCHEDULES)}, or a .csv or .json file.", "SCHEDULE")
    ] = None
    search: Annotated[bool, option("Search for the fastest schedule that fits, instead.", name="--search")] = False
    memory: Annotated[str | None, option("The memory for a rank's micro-batches, in a search.", "SIZE[,SIZE...]")] = (
        None
    )
    save: Annotated[str | None, option("Write the schedule found to a .csv or .json file.", "FILE")] = None
    forward_ms: Annotated[str | None, _cost("The time of a stage's forward pass (default: 1).")] = None
    input_gradient_ms: Annotated[str | None, _cost("The time of I, a backward's first half (default: 1).")] = None
    weight_gradient_ms: Annotated[str | None, _cost("The time of W, a backward's second half (default: 1).")] = None
    backward_ms: Annotated[str | None, _cost("The time of an unsplit backward (default: I + W).")] = None
    send_ms: Annotated[str | None, _cost("The time of a message between ranks (default: 0).")] = None
    post_ms: Annotated[str | None, _cost("The time that a rank spends on a message (default: 0).")] = None
    reduce_ms: Annotated[str | None, _cost("The time to reduce a stage's gradients (default: 0).")] = None
    activation_bytes: Annotated[str | None, _cost("The bytes held from forward to backward.")] = None
    weight_gradient_bytes: Annotated[str | None, _cost("The bytes held from I to W.")] = None
    costs: Annotated[str | None, option("Take times and bytes from a JSON file.", "FILE")] = None
    measured: Annotated[str | None, option("Take times from a timeline or recording (JSON).", "FILE")] = None
    steps: Annotated[int, count("The number of steps to simulate in a row.")] = 1
    barrier: Annotated[bool, option("Let ranks wait between steps (fp16, clipping).", name="--barrier")] = False
    draw: Annotated[str | None, option("Draw the step into a .svg, .png or .pdf file.", "FILE")] = None
    trace: Annotated[str | None, option("Write a trace for ui.perfetto.dev.", "FILE")] = None


SIMULATE = Command(
    name="simulate",
    arguments=SimulateArguments,
    work="hybridpp.cli.simulate:run",
    examples=(
        "hybridpp simulate 1f1b --stages 4 --microbatches 16 --forward-ms 2,2,2,3",
        "hybridpp simulate --search --stages 4 --microbatches 16 --costs costs.json",
        "hybridpp simulate zb-h1 --stages 2 --microbatches 4 --measured step.json",
    ),
)
