"""``hybridpp report``: a page of recorded steps."""

import secrets
from functools import partial
from pathlib import Path
from typing import Any

from hybridpp.cli.commands.report import ReportArguments
from hybridpp.cli.files import read, reading, write
from hybridpp.cli.output import show, working
from hybridpp.errors import ConfigError, text_of
from hybridpp.report import find_recording, load_recording
from hybridpp.report.page import ReportSummary, render_page
from hybridpp.strict_json import parse_strictly
from hybridpp.text_table import TextTable
from hybridpp.timeline import save_trace


def run(arguments: ReportArguments) -> None:
    """Write the page, and print its summary."""
    file = find_recording(arguments.run)
    output = Path(arguments.output) if arguments.output else file.with_name("report.html")
    if output.suffix not in (".html", ".htm"):
        raise ConfigError(f"--output is an HTML file: got {str(output)!r}. Use a name that ends in .html.")
    estimate = None if arguments.estimate is None else _estimate(arguments.estimate)
    with reading(str(file)):
        recording = load_recording(file)
    with working("make the page"):
        page, summary = render_page(recording, estimate)
    lines = [*_described(summary), write(str(output), partial(_save, page))]
    if arguments.trace is not None:
        lines.append(write(arguments.trace, partial(save_trace, recording.all_ranks())))
    show(*lines)


def _save(page: str, path: str) -> None:
    """Write the page; a link that lies there is replaced, as the folder of a recording may come from anyone."""
    file = Path(path)
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with unfinished.open("x", encoding="utf-8") as opened:
            opened.write(page)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _estimate(path: str) -> Any:
    try:
        return parse_strictly(read(path))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} is no estimate: {text_of(error)}. Write the output of `hybridpp estimate --json` to it."
        ) from error


def _described(summary: ReportSummary) -> list[str | TextTable]:
    rows = [(tile.label, tile.value, tile.note) for tile in summary.tiles]
    lines: list[str | TextTable] = [summary.title, "", TextTable(("what", "value", ""), rows, left=(0, 2)), ""]
    lines.append(summary.headline)
    lines += [f"{cost.ms:,.3g} ms: {cost.what}. {cost.way_out}" for cost in summary.costs]
    return [*lines, ""]
