"""Tables as text."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextTable:
    """A table; ``str`` of it is what :func:`text_table` makes, whatever the width of a terminal.

    Attributes:
        titles: of the columns.
        rows: the cells of each row, as many as titles.
        totals: cells of the last line; fewer than titles leave the last columns empty.
        left: numbers of the columns that are aligned to the left; the others are to the right.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    totals: Sequence[str] = ()
    left: Collection[int] = (0,)

    def __str__(self) -> str:
        return text_table(self.titles, self.rows, self.totals, self.left)


def text_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], totals: Sequence[str] = (), left: Collection[int] = (0,)
) -> str:
    """A line of titles, a rule, a line per row and, below another rule, one of totals, if there are any.

    Args:
        titles: of the columns.
        rows: the cells of each row, as many as titles.
        totals: cells of the last line; fewer than titles leave the last columns empty.
        left: numbers of the columns that are aligned to the left; the others are to the right.
    """
    last = [[*totals, *[""] * (len(titles) - len(totals))]] if totals else []
    widths = [max(map(len, column)) for column in zip(titles, *rows, *last, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return " | ".join(cell.ljust(width) if n in left else cell.rjust(width) for n, (cell, width) in cells).rstrip()

    rule = "-+-".join("-" * width for width in widths)
    return "\n".join([line(titles), rule, *map(line, rows), *[rule] * bool(last), *map(line, last)])
