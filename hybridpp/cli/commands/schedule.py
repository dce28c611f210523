"""``hybridpp schedule``: its arguments."""

from dataclasses import dataclass
from typing import Annotated

from hybridpp.cli.argtypes import argument, option
from hybridpp.cli.command import Command
from hybridpp.cli.commands.sizes import Sizes
from hybridpp.schedule import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class ScheduleArguments(Sizes):
    """Print, draw, check and compare pipeline schedules.

    A schedule is a name and its sizes, or a .csv or .json file.
    """

    words: Annotated[
        list[str] | None,
        argument(f"The schedule: one of {', '.join(SCHEDULES)}, or a file.", "NAME | FILE | check FILE"),
    ] = None
    compare: Annotated[bool, option("Print a table of all schedules at these sizes.", name="--compare")] = False
    draw: Annotated[str | None, option("Draw the schedule into a .svg, .png or .pdf file.", "FILE")] = None
    save: Annotated[str | None, option("Write the schedule to a .csv or .json file.", "FILE")] = None


SCHEDULE = Command(
    name="schedule",
    arguments=ScheduleArguments,
    work="hybridpp.cli.schedule:run",
    examples=(
        "hybridpp schedule --compare --stages 4 --microbatches 16",
        "hybridpp schedule zb-h1 --stages 4 --microbatches 8 --draw zb-h1.svg",
        "hybridpp schedule check mine.csv",
    ),
)
