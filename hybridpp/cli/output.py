"""What commands print: tables that fit a terminal, plain text in a pipe, progress on stderr."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from hybridpp.text_table import TextTable

# Spaces between two columns, and between those of a table that must fold.
_WIDE, _NARROW = 3, 2


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
            console.print(_rich_table(part, console.width))
        else:
            console.print(part, markup=False, highlight=False, soft_wrap=True)


def _rich_table(table: TextTable, width: int) -> Table:
    totals = [*table.totals, *[""] * (len(table.titles) - len(table.totals))]
    columns = list(zip(table.titles, totals, *table.rows, strict=True))
    widths = _widths(columns, width)
    rich_table = Table(
        box=box.SIMPLE_HEAD,
        show_footer=bool(table.totals),
        header_style="bold",
        pad_edge=False,
        padding=(0, 1) if widths is None else (0, 1, 0, 0),
    )
    for number, (title, total, *_) in enumerate(columns):
        justify: Literal["left", "right"] = "left" if number in table.left else "right"
        fixed = None if widths is None else widths[number]
        rich_table.add_column(Text(title), footer=Text(total), justify=justify, overflow="fold", width=fixed)
    for row in table.rows:
        rich_table.add_row(*map(Text, row))
    return rich_table


def _widths(columns: Sequence[tuple[str, ...]], width: int) -> list[int] | None:
    """Widths of columns that do not fit side by side; None: they do.

    Columns take what their longest word takes, and the narrowest of the others what is left. Where even that is too
    little, only words of the widest column are folded.
    """
    most = [max(map(len, column)) for column in columns]
    if sum(most) + _WIDE * (len(columns) - 1) + 2 <= width:
        return None
    found = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in columns]
    left = width - _NARROW * (len(columns) - 1) - 2
    if sum(found) > left:
        widest = found.index(max(found))
        found[widest] = max(1, found[widest] + left - sum(found))
    for number in sorted(range(len(columns)), key=lambda number: most[number]):
        found[number] = min(most[number], found[number] + max(0, left - sum(found)))
    return found


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
