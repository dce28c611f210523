"""Schedules as text, and back."""

import re

from hybridpp.errors import ScheduleError, shown
from hybridpp.schedule.action import Action, ActionKind, Programs
from hybridpp.schedule.dependencies import count_stages, needs, result, walk

_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(ActionKind, key=len, reverse=True))})(\d+)?")


def render(programs: Programs) -> str:
    """One line per rank: ``rank 0 | 0F0 0F1 0B0 0B1``."""
    return "".join(f"rank {rank} | {' '.join(map(str, program))}\n" for rank, program in enumerate(programs))


def render_grid(programs: Programs) -> str:
    """One line per rank and one column per slot, as in the docstring of :func:`~hybridpp.schedule.one_f_one_b`.

    F, I and W take one slot, B takes two (the second is drawn as dashes), and messages none. A dot is an idle slot.

    Args:
        programs: compute programs that :func:`~hybridpp.schedule.check_program` accepts.
    """
    rows = _slots(programs)
    num_slots = max(map(len, rows), default=0)
    width = max((len(cell) for row in rows for cell in row), default=0)
    names = [f"rank {rank}" for rank in range(len(rows))]
    lines = []
    for name, row in zip(names, rows, strict=True):
        cells = (cell.ljust(width) for cell in row + ["."] * (num_slots - len(row)))
        lines.append(f"{name.ljust(len(names[-1]))} | {' '.join(cells)}".rstrip() + "\n")
    return "".join(lines)


def _slots(programs: Programs) -> list[list[str]]:
    """Each rank's actions, each as early as it can run."""
    num_stages = count_stages(programs)
    rows: list[list[str]] = [[] for _ in programs]
    ends: dict[Action, int] = {}
    for rank, position in walk(programs):
        action = programs[rank][position]
        row = rows[rank]
        start = max((ends[need] for need in needs(action, num_stages)), default=0)
        row += ["."] * (start - len(row))
        row += [str(action), "---"] if action.kind is ActionKind.BACKWARD else [str(action)]
        ends[result(action)] = len(row)
    return rows


def parse_action(text: str) -> Action:
    """The action written ``2F0``.

    Raises:
        ScheduleError: the text is not an action.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"an action is written like 2F0 (stage, one of {', '.join(ActionKind)}, micro-batch): got {shown(text)}."
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), ActionKind(kind), None if microbatch is None else int(microbatch))
