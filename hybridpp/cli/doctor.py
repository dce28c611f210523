"""``hybridpp doctor``: examine the installation, the hosts and the links of a job."""

import json
import tempfile
from pathlib import Path

import typer

from hybridpp.cli.commands.doctor import DoctorArguments
from hybridpp.cli.commands.run import RunArguments
from hybridpp.cli.doctor_tables import render_report
from hybridpp.cli.output import show, working
from hybridpp.cli.run import run as start_ranks
from hybridpp.cluster import DistCoordinator, current_world, join_as_started
from hybridpp.doctor import DoctorReport, examine

_TIMEOUT_S = 60.0


def run(arguments: DoctorArguments) -> None:
    """Print what was found; every rank examines, and rank 0 prints."""
    report = _report_of_ranks(arguments.ranks) if arguments.ranks > 1 else _own_report(arguments.address)
    if report is None:
        return
    if arguments.answer_to is not None:
        Path(arguments.answer_to).write_text(json.dumps(report.to_plain()))
        return
    show(json.dumps(report.to_plain(), indent=2)) if arguments.json else show(*render_report(report))
    if report.has_errors:
        raise typer.Exit(1)


def _own_report(address: str | None) -> DoctorReport | None:
    """Of the job that this process was started in; None on ranks that have nothing to print."""
    join_as_started(address, _TIMEOUT_S)
    world = current_world()
    with working("examine the host" if world.size == 1 else "measure the links between ranks"):
        report = examine(world)
    if world.size > 1:
        DistCoordinator().destroy()
    return report if world.rank == 0 else None


def _report_of_ranks(num_ranks: int) -> DoctorReport:
    """Of ranks that are started here, as ``hybridpp run`` does."""
    with tempfile.TemporaryDirectory(prefix="hybridpp-doctor-") as folder:
        answer = Path(folder, "answer.json")
        command = ["-m", "hybridpp", "doctor", "--answer-to", str(answer)]
        try:
            start_ranks(RunArguments(arguments=["--standalone", "--nproc-per-node", str(num_ranks), *command]))
        except typer.Exit as ended:
            if ended.exit_code:  # the rank that failed has said why
                raise
        return DoctorReport.from_plain(json.loads(answer.read_text()))
