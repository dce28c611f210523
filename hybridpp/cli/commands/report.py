"""``hybridpp report``: its arguments."""

from dataclasses import dataclass
from typing import Annotated

from hybridpp.cli.argtypes import argument, option
from hybridpp.cli.command import Command


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Make a page of a recorded step: timeline, idle time, memory, stages.

    The page is one HTML file, which loads nothing. booster.record_timeline records steps, and recording.save(RUN)
    writes them.
    """

    run: Annotated[str, argument("The folder or file that recording.save wrote.", "RUN")]
    output: Annotated[str | None, option("The page to write (default: report.html beside RUN).", "FILE")] = None
    estimate: Annotated[str | None, option("Compare with this output of estimate --json.", "FILE")] = None
    trace: Annotated[str | None, option("Also write a trace for ui.perfetto.dev.", "FILE")] = None


REPORT = Command(
    name="report",
    arguments=ReportArguments,
    work="hybridpp.cli.report:run",
    examples=(
        "hybridpp report outputs/run",
        "hybridpp report outputs/run --estimate estimate.json --trace trace.json",
    ),
)
