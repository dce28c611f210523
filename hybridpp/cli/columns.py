"""Tables as text."""

from collections.abc import Sequence


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A line of titles, a rule, and a line per row; the first column is set to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return " | ".join([first.strip().ljust(widths[0]), *others])

    return "\n".join([line(titles), "-+-".join("-" * width for width in widths), *map(line, rows)])
