"""Recordings of steps that never ran: from simulated times, with memory and messages."""

from itertools import pairwise

from hybridpp.report import Phase, RankAction, RankRecord, RankTraffic, RankWait, Recording, StageRecord
from hybridpp.schedule import make_schedule, placement
from hybridpp.simulate import Costs, simulate

MIB = 2**20


def recorded(
    schedule="1f1b",
    num_ranks=2,
    num_microbatches=4,
    *,
    dp_size=1,
    tp_size=1,
    num_steps=1,
    memory=True,
    model="Model",
    forward_ms=2.0,
    backward_ms=4.0,
):
    """A recording whose steps take what the simulator says; each is read in 1 ms and ends in 2, with an update of 1.

    A micro-batch leaves 1 MiB from its forward until its backward pass, above 100 MiB.
    """
    programs = make_schedule(schedule, num_ranks, num_microbatches)
    where = placement(programs)
    costs = Costs(
        num_stages=len(where),
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        input_gradient_ms=backward_ms if isinstance(backward_ms, tuple) else backward_ms / 2,
        weight_gradient_ms=2.0,
    )
    timeline = simulate(programs, costs).timeline
    ranks = []
    for dp in range(dp_size):
        for pp in range(num_ranks):
            for tp in range(tp_size):
                ranks.append(_rank(timeline, len(ranks), (dp, pp, tp), num_steps, memory))
    return Recording(
        model=model,
        created="2026-01-02T03:04:05+00:00",
        versions={"torch": "2.13.0"},
        settings={"tp_size": tp_size, "pp_size": num_ranks, "dp_size": dp_size, "schedule": schedule},
        stages=tuple(StageRecord(position, f"blocks.{stage}", 1000) for stage, position in enumerate(where)),
        ranks=tuple(ranks),
    )


def _rank(timeline, rank, place, num_steps, memory):
    actions, phases, free_ms = [], [], 0.0
    length_ms = timeline.makespan_ms + 4
    held = 100 * MIB
    for step in range(num_steps):
        begin_ms = step * length_ms + 1
        free_ms = begin_ms
        for span in timeline.of_rank(place[1]):
            start_ms, end_ms = begin_ms + span.start_ms, begin_ms + span.end_ms
            held += {"F": MIB, "B": -MIB, "I": -MIB}.get(span.kind, 0)
            actions.append(
                RankAction(
                    *(step, span.stage, str(span.kind), span.microbatch),
                    *(free_ms, start_ms, end_ms, held if memory else None),
                )
            )
            free_ms = end_ms
        ends_ms = [begin_ms - 1, begin_ms, free_ms, begin_ms + timeline.makespan_ms + 2]
        names = ("read", "actions", "end")
        phases += [Phase(step, name, *ends) for name, ends in zip(names, pairwise(ends_ms), strict=True)]
        phases.append(Phase(step, "update", ends_ms[-1], ends_ms[-1] + 1))
    return RankRecord(
        rank=rank,
        dp=place[0],
        pp=place[1],
        tp=place[2],
        device="cpu",
        memory_kind="allocated" if memory else None,
        held={"weights": 4 * MIB, "gradients": 4 * MIB, "moments": 8 * MIB},
        actions=tuple(actions),
        phases=tuple(phases),
        waits=(RankWait(0, "all ranks", 0.2, 0.7),),
        traffic=tuple(RankTraffic(step, "pp", "send", 4, 4 * MIB) for step in range(num_steps)),
    )
