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

    run: Annotated[str, argument("Folder or file that recording.save wrote.", "RUN")]
    output: Annotated[str | None, option("To write (default: report.html beside it).", "FILE")] = None
    estimate: Annotated[str | None, option("Compare with estimate --json's output.", "FILE")] = None
    trace: Annotated[str | None, option("Also a trace for ui.perfetto.dev.", "FILE")] = None


REPORT = Command(
    name="report",
    arguments=ReportArguments,
    work="hybridpp.cli.report:run",
    examples=(
        "hybridpp report outputs/run",
        "hybridpp report outputs/run --estimate estimate.json --trace trace.json",
    ),
)
