"""Schedules in files: CSV, as ``torch.distributed.pipelining`` reads and writes it, and JSON."""

import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybridpp.errors import ScheduleError, shown, text_of
from hybridpp.schedule.action import Action, Programs
from hybridpp.schedule.render import parse_action
from hybridpp.strict_json import parse_strictly

# What lowering adds, here and in torch; skipped when a file is read.
_COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|UNSHARD|RESHARD)\d*")
# How torch writes a forward and a backward in one slot.
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")


def load_schedule(path: str | Path) -> Programs:
    """Read the compute programs in a file, unchecked (see :func:`~hybridpp.schedule.check_program`).

    A CSV file has one row per rank and one action per cell (``2F0``: stage 2, forward, micro-batch 0); a JSON file has
    the same cells: ``{"ranks": [["0F0", "0B0"]]}``. Empty cells are idle time and are skipped, as is communication,
    which lowering adds. Torch's ``(0F1;1B0)OVERLAP_F_B`` is split into its actions, in order.

    Raises:
        ScheduleError: the file type is unknown, or a cell is not an action.
        OSError: the file cannot be read.
    """
    path = Path(path)
    rows = _read_json(path) if _suffix(path) == ".json" else _read_csv(path)
    return tuple(
        tuple(
            action
            for column, cell in enumerate(row)
            for action in _read_cell(cell, f"{path}, rank {rank}, cell {column}")
        )
        for rank, row in enumerate(rows)
    )


def save_schedule(programs: Programs, path: str | Path) -> None:
    """Write programs to a file, ``.csv`` or ``.json``, that :func:`load_schedule` and torch (CSV) read.

    Raises:
        ScheduleError: the file name has another ending.
        OSError: the file cannot be written.
    """
    path = Path(path)
    rows = [[str(action) for action in program] for program in programs]
    if _suffix(path) == ".json":
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        path.write_text(f'{{\n  "ranks": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".json"):
        raise ScheduleError(f"a schedule's file is .csv or .json: got {shown(str(path))}. Rename it.")
    return suffix


def _read_csv(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ScheduleError(
            f"{path} is not a CSV file: {text_of(error)}. Write one row per rank, like 0F0,0B0."
        ) from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        del rows[-1]
    return rows


def _read_json(path: Path) -> list[list[str]]:
    way_out = 'Write it as {"ranks": [["0F0", "0B0"]]}.'
    try:
        content: Any = parse_strictly(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ScheduleError(f"{path} holds no schedule: {text_of(error)}. {way_out}") from error
    rows = content.get("ranks") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ScheduleError(f"{path} has no list of cells for each rank. {way_out}")
    if not all(isinstance(cell, str) for row in rows for cell in row):
        raise ScheduleError(f"{path} has cells that are not strings. {way_out}")
    return rows


def _read_cell(cell: str, where: str) -> Iterable[Action]:
    cell = cell.strip()
    together = _TOGETHER.fullmatch(cell)
    for part in map(str.strip, together.group(1).split(";") if together else [cell]):
        if not part or _COMMUNICATION.fullmatch(part):
            continue
        try:
            yield parse_action(part)
        except ScheduleError as error:
            raise ScheduleError(f"{where}: {error}") from None
