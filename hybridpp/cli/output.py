"""What commands print: tables that fit a terminal, plain text in a pipe, progress on stderr."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# The width that a column of names gets, if there is any.
_LEAST = 16
_PIECE = re.compile(r"[^./,=]*[./,=]+|[^./,=]+")


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
            for numbers, widths in _parts(_columns(part), console.width):
                console.print(_rich_table(part, numbers, widths))
        else:
            console.print(part, markup=False, highlight=False, soft_wrap=True)


def _columns(table: TextTable) -> list[tuple[str, ...]]:
    """The title, the total and the cells of each column."""
    totals = [*table.totals, *[""] * (len(table.titles) - len(table.totals))]
    return list(zip(table.titles, totals, *table.rows, strict=True))


def _rich_table(table: TextTable, numbers: Sequence[int], widths: Sequence[int] | None) -> Table:
    """Some columns of a table, with these widths; None: those that they take."""
    columns = _columns(table)
    rich_table = Table(
        box=box.SIMPLE_HEAD,
        show_footer=bool(table.totals),
        header_style="bold",
        pad_edge=False,
        padding=(0, 1) if widths is None else (0, 1, 0, 0),
    )
    shown = []
    for at, number in enumerate(numbers):
        fixed = None if widths is None else widths[at]
        cells = columns[number] if fixed is None else [_folded(cell, fixed) for cell in columns[number]]
        justify: Literal["left", "right"] = "left" if number in table.left else "right"
        title, total, *rest = map(Text, cells)
        rich_table.add_column(title, footer=total, justify=justify, overflow="fold", width=fixed)
        shown.append(rest)
    for row in zip(*shown, strict=True):
        rich_table.add_row(*row)
    return rich_table


def _parts(columns: Sequence[tuple[str, ...]], width: int) -> list[tuple[list[int], list[int] | None]]:
    """The columns of each of the tables that a table becomes, and their widths; None: those that they take.

    Columns take what their longest word takes, and the narrowest of the others what is left. Where words do not fit
    side by side, long names are folded, at their dots. Where even that is too little, the last columns follow in a
    table of their own, beside the first column again.
    """
    most = [max(map(len, column)) for column in columns]
    everything = list(range(len(columns)))
    if sum(most) + _WIDE * (len(columns) - 1) + 2 <= width:
        return [(everything, None)]
    words = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in columns]
    least = [min(word, max(_LEAST, _longest_piece(column))) for word, column in zip(words, columns, strict=True)]
    least = [min(one, max(_LEAST, width // 2)) for one in least]
    parts: list[list[int]] = [[0]]
    for number in everything[1:]:
        if len(parts[-1]) > 1 and _taken([*parts[-1], number], least) > width:
            parts.append([0])
        parts[-1].append(number)
    return [(part, _widths(part, (most, words, least), width)) for part in parts]


def _widths(part: Sequence[int], sizes: tuple[Sequence[int], Sequence[int], Sequence[int]], width: int) -> list[int]:
    """Widths of columns: the least, what their words take, then what they take in one line, as far as there is room."""
    most, words, least = sizes
    found = {number: least[number] for number in part}
    for wanted in (words, most):
        for number in sorted(part, key=lambda number: wanted[number]):
            left = width - _taken(part, found)
            found[number] = min(max(wanted[number], found[number]), found[number] + max(0, left))
    return [found[number] for number in part]


def _taken(part: Sequence[int], widths: Mapping[int, int] | Sequence[int]) -> int:
    return sum(widths[number] for number in part) + _NARROW * (len(part) - 1) + 2


def _longest_piece(column: Sequence[str]) -> int:
    return max(len(piece) for cell in column for word in cell.split() or [""] for piece in _pieces(word))


def _pieces(word: str) -> list[str]:
    """The parts of a long name; a number is one."""
    return _PIECE.findall(word) if any(map(str.isalpha, word)) else [word]


def _folded(text: str, width: int) -> str:
    """Text in lines of a width: folded between words, of longer words at dots and the like, else anywhere."""
    lines = [""]
    for word in text.split(" "):
        gap = " " if lines[-1] else ""
        if len(lines[-1]) + len(gap) + len(word) <= width:
            lines[-1] += gap + word
            continue
        if lines[-1]:
            lines.append("")
        for piece in [word] if len(word) <= width else _pieces(word):
            if len(lines[-1]) + len(piece) > width and lines[-1]:
                lines.append("")
            lines[-1] += piece  # rich folds one that is too long
    return "\n".join(lines)


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
