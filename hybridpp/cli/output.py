"""What commands print: tables that fit a terminal, plain text in a pipe, progress on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from hybridpp.text_table import TextTable


def show(*parts: str | TextTable) -> None:
    """Print text and tables, one below the other.

    On a terminal, tables fit its width and have colours. Anywhere else they are plain text, which does not depend on a
    width, so that it can be read by programs and compared.
    """
    if not sys.stdout.isatty():
        sys.stdout.write("".join(f"{part}\n" for part in parts))
        return
    console = Console()
    for part in parts:
        if isinstance(part, TextTable):
            console.print(_rich_table(part))
        else:
            console.print(part, markup=False, highlight=False, soft_wrap=True)


def _rich_table(table: TextTable) -> Table:
    rich_table = Table(box=box.SIMPLE_HEAD, show_footer=bool(table.totals), header_style="bold", pad_edge=False)
    totals = [*table.totals, *[""] * (len(table.titles) - len(table.totals))]
    for number, (title, total) in enumerate(zip(table.titles, totals, strict=True)):
        is_left = number in table.left
        rich_table.add_column(Text(title), footer=Text(total), justify="left" if is_left else "right", overflow="fold")
    for row in table.rows:
        rich_table.add_row(*map(Text, row))
    return rich_table


@contextmanager
def bytes_done(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while bytes are read or written, if stderr is a terminal.

    Args:
        what: is done with them, in a word or two.
        num_bytes: in all.

    Yields:
        A function to call with each number of bytes that are done.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=_stderr(), transient=True, disable=_is_plain()) as progress:
        task = progress.add_task(what, total=num_bytes)
        yield lambda number: progress.advance(task, number)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what takes long, if stderr is a terminal.

    Args:
        what: is done, as in ``"trace the model"``.

    Yields:
        A function to call with what is done next.
    """
    if _is_plain():
        yield lambda _: None
        return
    with _stderr().status(what) as status:
        yield status.update


def _stderr() -> Console:
    return Console(stderr=True)


def _is_plain() -> bool:
    return not sys.stderr.isatty()
