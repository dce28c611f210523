"""What schedules are held against: a clock, and every schedule over a range of sizes."""

from hybridpp.schedule import SCHEDULES, ActionKind, make_schedule

COSTS = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2, ActionKind.INPUT_GRADIENT: 1, ActionKind.WEIGHT_GRADIENT: 1}
SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 5, 7, 9, 11, 16, 26)]
SIZES_WITH_CHUNKS = [
    (p, m, v) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 5, 7, 8, 11, 13, 16) for v in (1, 2, 3, 4)
]


def every_schedule(ranks=(1, 2, 3, 4), microbatches=(1, 2, 3, 5, 8, 11), chunks=(1, 2, 3)):
    """(what it is called, programs) of every schedule that has a name, over a range of sizes."""
    for name, entry in SCHEDULES.items():
        for p in ranks:
            for m in microbatches:
                for v in chunks if entry.takes_chunks else [entry.num_chunks]:
                    yield f"{name} p={p} m={m} v={v}", make_schedule(name, p, m, v)


def makespan(programs):
    """Time to the end of the last action, where messages take none: each rank starts what it can, again and again."""
    num_stages = 1 + max(action.stage for program in programs for action in program)
    ends = {}
    place, clock = [0] * len(programs), [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while place[rank] < len(program):
                stage, kind, microbatch = program[place[rank]]
                needed = {
                    ActionKind.FORWARD: [(stage - 1, "F")],
                    ActionKind.BACKWARD: [(stage, "F"), (stage + 1, "I")],
                    ActionKind.INPUT_GRADIENT: [(stage, "F"), (stage + 1, "I")],
                    ActionKind.WEIGHT_GRADIENT: [(stage, "I")],
                }[kind]
                needed = [(*need, microbatch) for need in needed if 0 <= need[0] < num_stages]
                if not all(need in ends for need in needed):
                    break
                clock[rank] = max([clock[rank], *(ends[need] for need in needed)]) + COSTS[kind]
                ends[stage, "I" if kind is ActionKind.BACKWARD else kind.value, microbatch] = clock[rank]
                place[rank] += 1
                moved = True
    assert place == [len(program) for program in programs], "deadlock"
    return max(clock)


def idle_share(programs):
    """Idle part of all ranks' time, at equal costs of F, I and W."""
    busy = sum(COSTS[action.kind] for program in programs for action in program)
    return 1 - busy / (len(programs) * makespan(programs))
