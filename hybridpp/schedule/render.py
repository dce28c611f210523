"""Schedules as text, and back."""

import re

from hybridpp.errors import ScheduleError
from hybridpp.schedule.action import Action, Kind, Program, Programs

_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(Kind, key=len, reverse=True))})(\d+)?")


def render(programs: Programs) -> str:
    """One line per rank, as in the docstring of :func:`~hybridpp.schedule.one_f_one_b`."""
    return "".join(f"rank {rank} | {' '.join(map(str, program))}\n" for rank, program in enumerate(programs))


def parse_action(text: str) -> Action:
    """The action written ``2F0``.

    Raises:
        ScheduleError: the text is no action.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"an action is written like 2F0 (stage, one of {', '.join(Kind)}, micro-batch): got {text!r}."
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), Kind(kind), None if microbatch is None else int(microbatch))


def peak_in_flight(program: Program) -> int:
    """The most activations that a rank holds at once: forwards whose backward is still to come."""
    held = peak = 0
    for action in program:
        held += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0)
        peak = max(peak, held)
    return peak
