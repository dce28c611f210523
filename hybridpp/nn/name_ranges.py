"""Names of modules, short enough for a table."""

import re
from collections.abc import Sequence


def name_ranges(calls: Sequence[str]) -> list[str]:
    """Names in order of first occurrence; names that differ only in a number are merged.

    Example:
        >>> name_ranges(["embed", "layers.0", "layers.1", "layers.2", "norm", "norm"])
        ['embed', 'layers.0-2', 'norm x2']
    """
    times: dict[str, int] = {}
    for name in calls:
        times[name] = times.get(name, 0) + 1
    numbers: dict[tuple[str, str, int], list[str]] = {}
    for name, count in times.items():
        found = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        prefix, number, suffix = found.groups() if found else (name, "", "")
        numbers.setdefault((prefix, suffix, count), []).append(number)
    return [
        f"{prefix}{run}{suffix}" + (f" x{count}" if count > 1 else "")
        for (prefix, suffix, count), members in numbers.items()
        for run in _runs(members)
    ]


def _runs(numbers: Sequence[str]) -> list[str]:
    """``["0", "1", "2", "5"]`` as ``["0-2", "5"]``."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs and number and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
