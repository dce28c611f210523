"""What must come before what."""

from collections.abc import Iterator

from hybridpp.schedule.action import Action, Kind, Programs


def result(action: Action) -> Action:
    """What others wait for: a whole backward hands on the same gradient as its first part, I."""
    return Action(action.stage, Kind.INPUT_GRADIENT, action.microbatch) if action.kind is Kind.BACKWARD else action


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The results (see :func:`result`) that must be there before a compute action starts."""
    stage, kind, microbatch = action
    if kind is Kind.FORWARD:
        return (Action(stage - 1, kind, microbatch),) if stage else ()
    if kind is Kind.WEIGHT_GRADIENT:
        return (Action(stage, Kind.INPUT_GRADIENT, microbatch),)
    forward = Action(stage, Kind.FORWARD, microbatch)
    if stage == num_stages - 1:
        return (forward,)
    return (forward, Action(stage + 1, Kind.INPUT_GRADIENT, microbatch))


def count_stages(programs: Programs) -> int:
    """One more than the highest stage; 0 where nothing is done."""
    return 1 + max((action.stage for program in programs for action in program), default=-1)


def walk(programs: Programs) -> Iterator[tuple[int, int]]:
    """Every cell (rank, place) of compute programs, each after what it needs.

    Ends early where the programs deadlock: the cells that never run are not among those yielded.
    """
    num_stages = count_stages(programs)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    place = [0] * len(programs)
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        program = programs[rank]
        while place[rank] < len(program):
            action = program[place[rank]]
            missing = next((need for need in needs(action, num_stages) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, place[rank]
            place[rank] += 1
            done.add(result(action))
            ready += waiting.pop(result(action), ())
