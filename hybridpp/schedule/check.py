"""Whether a schedule runs to its end, found out without running it."""

from collections import Counter, defaultdict

from hybridpp.errors import ScheduleError
from hybridpp.schedule.action import Action, Kind, Programs


def check_program(programs: Programs, num_stages: int, num_microbatches: int) -> None:
    """Accept compute programs (before lowering) in which everything happens once and nothing waits for ever.

    Raises:
        ScheduleError: an action is missing, repeated or out of place, the programs deadlock, or a rank takes messages
            in another order than they are sent in; the first bad cell is named.
    """
    _check_complete(programs, num_stages, num_microbatches)
    _check_order(programs, num_stages)
    _check_messages(programs)


def _check_complete(programs: Programs, num_stages: int, num_microbatches: int) -> None:
    cells = Counter(action for program in programs for action in program)
    rank_of: dict[int, int] = {}
    for rank, program in enumerate(programs):
        for place, action in enumerate(program):
            where = f"rank {rank}, place {place}"
            inside = 0 <= action.stage < num_stages and 0 <= (action.microbatch or 0) < num_microbatches
            if not action.kind.computes or action.microbatch is None or not inside:
                raise ScheduleError(
                    f"{action} ({where}) is no compute action of {num_stages} stages and {num_microbatches} "
                    "micro-batches."
                )
            if cells[action] > 1:
                raise ScheduleError(f"{action} ({where}) stands {cells[action]} times. Keep one.")
            if rank_of.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"{action} ({where}) puts stage {action.stage} on a second rank; it is on rank "
                    f"{rank_of[action.stage]} already."
                )
    kinds = [Kind.FORWARD, *([Kind.BACKWARD] if any(action.kind is Kind.BACKWARD for action in cells) else [])]
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            for kind in kinds:
                if Action(stage, kind, microbatch) not in cells:
                    raise ScheduleError(
                        f"{Action(stage, kind, microbatch)} is missing. Add it to stage {stage}'s rank."
                    )


def _needs(action: Action, num_stages: int) -> list[Action]:
    if action.kind is Kind.FORWARD:
        return [action._replace(stage=action.stage - 1)] if action.stage else []
    needs = [action._replace(kind=Kind.FORWARD)]
    return needs if action.stage == num_stages - 1 else [*needs, action._replace(stage=action.stage + 1)]


def _check_order(programs: Programs, num_stages: int) -> None:
    done: set[Action] = set()
    place = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while place[rank] < len(program) and all(need in done for need in _needs(program[place[rank]], num_stages)):
                done.add(program[place[rank]])
                place[rank] += 1
                moved = True
    for rank, program in enumerate(programs):
        if place[rank] < len(program):
            action = program[place[rank]]
            missing = [str(need) for need in _needs(action, num_stages) if need not in done]
            raise ScheduleError(
                f"{action} (rank {rank}, place {place[rank]}) waits for ever for {', '.join(missing)}. "
                "Move it behind what it needs."
            )


def _check_messages(programs: Programs) -> None:
    """Between two ranks, messages of one kind arrive in the order they are sent in."""
    rank_of = {action.stage: rank for rank, program in enumerate(programs) for action in program}
    sent: defaultdict[tuple[int, int, Kind], list[Action]] = defaultdict(list)
    taken: defaultdict[tuple[int, int, Kind], list[Action]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for action in program:
            step = 1 if action.kind is Kind.FORWARD else -1
            sent[rank, rank_of.get(action.stage + step, rank), action.kind].append(action)
            taken[rank_of.get(action.stage - step, rank), rank, action.kind].append(
                action._replace(stage=action.stage - step)
            )
    for (source, target, kind), actions in sent.items():
        if source == target:
            continue
        for makes, takes in zip(actions, taken[source, target, kind], strict=True):
            if makes != takes:
                raise ScheduleError(
                    f"rank {target} takes the result of {takes} where rank {source} sends that of {makes}. "
                    "Let both ranks keep one order."
                )
