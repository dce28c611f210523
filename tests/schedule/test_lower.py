from collections import defaultdict
from textwrap import dedent

import pytest
from covering import one_test_for
from schedule.oracle import every_schedule

from hybridpp.schedule import (
    ActionKind,
    check_program,
    forward_only,
    gpipe,
    lower,
    make_schedule,
    one_f_one_b,
    parse_action,
    placement,
    render,
)
from hybridpp.schedule.dependencies import UNIT_DURATIONS, earliest_times

USES = {
    ActionKind.RECEIVE_ACTIVATION: (ActionKind.FORWARD,),
    ActionKind.RECEIVE_GRADIENT: (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT),
}
SENDS = {
    ActionKind.FORWARD: ActionKind.SEND_ACTIVATION,
    ActionKind.BACKWARD: ActionKind.SEND_GRADIENT,
    ActionKind.INPUT_GRADIENT: ActionKind.SEND_GRADIENT,
}
FILLS_GRADIENTS = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
# What a send is called on the stage that receives it: (difference of stages, kind).
ARRIVES = {
    ActionKind.SEND_ACTIVATION: (1, ActionKind.RECEIVE_ACTIVATION),
    ActionKind.SEND_GRADIENT: (-1, ActionKind.RECEIVE_GRADIENT),
}


def programs_of(*rows):
    return tuple(tuple(map(parse_action, row.split())) for row in rows)


PROGRAMS = {
    **dict(every_schedule(ranks=(1, 2, 3, 4), microbatches=(1, 3, 6), chunks=(1, 2))),
    "forward only": forward_only((0, 1, 2), 4),
    "forward only in a V": forward_only((0, 1, 2, 2, 1, 0), 5),
    "every rank in an order of its own": programs_of(
        "0F0 0F1 0F2 2F0 2F2 2F1 2B1 2B0 2B2 0B0 0B1 0B2", "1F2 1F0 1F1 3F0 3F1 3B0 3B1 3F2 3B2 1B1 1B2 1B0"
    ),
}
# Four ranks show what three do; on up to eight, no device deadlocks: test_device_model.py.
CASES = [
    pytest.param(programs, id=name, marks=[pytest.mark.matrix] if " p=4 " in name else [])
    for name, programs in PROGRAMS.items()
]
every_program = one_test_for("programs", CASES)


def test_1f1b_with_two_stages_and_three_microbatches():
    assert render(lower(one_f_one_b(2, 3))) == (
        "rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2 0REDUCE_GRAD\n"
        "rank 1 | 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2 1REDUCE_GRAD\n"
    )


def test_one_stage_only_reduces():
    assert render(lower(one_f_one_b(1, 2))) == "rank 0 | 0F0 0B0 0F1 0B1 0REDUCE_GRAD\n"


def test_evaluation_sends_activations_only():
    assert render(lower(forward_only((0, 1, 2), 2))) == dedent("""\
        rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1
        rank 1 | 1RECV_F0 1F0 1RECV_F1 1SEND_F0 1F1 1SEND_F1
        rank 2 | 2RECV_F0 2F0 2RECV_F1 2F1
    """)


def test_a_split_backward_sends_after_part_one_and_reduces_after_part_two():
    programs = programs_of("0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1F1 1B1 1W0")
    assert render(lower(programs)) == dedent("""\
        rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0W0 0RECV_B1 0B1 0REDUCE_GRAD
        rank 1 | 1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1B1 1SEND_B1 1W0 1REDUCE_GRAD
    """)


@every_program
def test_what_is_computed_stays_as_it_was(programs):
    assert tuple(tuple(action for action in row if action.kind.computes) for row in lower(programs)) == programs


def test_receives_are_posted_in_send_order_whichever_is_used_first():
    """Rank 1 needs the second message first; it must not take the first one for it."""
    assert render(lower(programs_of("0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0"))) == dedent("""\
        rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0RECV_B0 0B0 0B1 0REDUCE_GRAD
        rank 1 | 1RECV_F0 1RECV_F1 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0 1REDUCE_GRAD
    """)


@every_program
def test_sends_and_receives_between_two_ranks_have_the_same_order(programs):
    check_program(programs)
    rank_of = placement(programs)
    sent, received = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(lower(programs)):
        for action in row:
            if action.kind in ARRIVES:
                step, kind = ARRIVES[action.kind]
                there = action._replace(stage=action.stage + step, kind=kind)
                sent[rank, rank_of[there.stage], kind].append(there)
            elif action.kind in USES:
                source = action.stage + (1 if action.kind is ActionKind.RECEIVE_GRADIENT else -1)
                received[rank_of[source], rank, action.kind].append(action)
    assert sent == received
    assert bool(sent) == (len(programs) > 1)
    assert all(source != target for source, target, _ in sent)


def times_of(programs, durations=UNIT_DURATIONS):
    """When each message is sent, with the sender's rank and position, by its receive."""
    return {
        receive: (interval.end, rank, position)
        for rank, program in enumerate(programs)
        for position, action in enumerate(program)
        for interval in [earliest_times(programs, durations)[action]]
        if action.kind in SENDS
        for step, kind in [ARRIVES[SENDS[action.kind]]]
        for receive in [action._replace(stage=action.stage + step, kind=kind)]
    }


UNEVEN = {
    ActionKind.FORWARD: 3,
    ActionKind.BACKWARD: 5,
    ActionKind.INPUT_GRADIENT: 3,
    ActionKind.WEIGHT_GRADIENT: 2,
}


@pytest.mark.parametrize("durations", [UNIT_DURATIONS, UNEVEN], ids=["unit", "uneven"])
@every_program
def test_all_ranks_post_messages_in_one_order_when_their_time_has_come(programs, durations):
    times, intervals = times_of(programs, durations), earliest_times(programs, durations)
    for row in lower(programs, durations):
        posted = []
        for action in row:
            if action.kind in ARRIVES:
                step, kind = ARRIVES[action.kind]
                action = action._replace(stage=action.stage + step, kind=kind)
            if action.kind in USES:
                posted.append(times[action])
            elif action in intervals:
                assert all(time <= intervals[action].start for time, *_ in posted)
                left = [a for a in row[row.index(action) :] if a.kind in USES]
                assert all(times[receive][0] > intervals[action].start for receive in left)
        assert posted == sorted(posted)


@every_program
def test_a_result_leaves_before_the_next_one_is_computed(programs):
    for row in lower(programs):
        for place, action in enumerate(row):
            if action.kind in ARRIVES:
                computed = [before for before in row[:place] if before.kind.computes][-1]
                assert action == computed._replace(kind=SENDS[computed.kind])


@every_program
def test_what_is_used_was_received_before(programs):
    rank_of = placement(programs)
    for rank, row in enumerate(lower(programs)):
        posted = set()
        for action in row:
            if action.kind in USES:
                posted.add(action)
                continue
            for receive, kinds in USES.items():
                source = action.stage + (1 if receive is ActionKind.RECEIVE_GRADIENT else -1)
                if action.kind in kinds and 0 <= source < len(rank_of) and rank_of[source] != rank:
                    posted.remove(action._replace(kind=receive))
        assert not posted


def most_posted(row):
    """The most receives of a lowered program that are posted and not used up: their action is not done yet."""
    posted, most = set(), 0
    for action in row:
        if action.kind in USES:
            posted |= {action._replace(kind=kind) for kind in USES[action.kind]}
            most = max(most, len({used[::2] for used in posted}))
        elif action in posted:
            posted -= {action, *(action._replace(kind=kind) for kind in USES[ActionKind.RECEIVE_GRADIENT])}
    return most


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved", "interleaved-zb"]
)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_posted_receives_do_not_grow_with_the_number_of_microbatches(name, num_ranks):
    few, many = (max(map(most_posted, lower(make_schedule(name, num_ranks, m)))) for m in (40, 80))
    assert few == many <= 6


def test_gpipe_with_chunks_posts_what_it_holds():
    """Rank 0 gets the activations for its second stage while it still computes its first one."""
    assert [max(map(most_posted, lower(gpipe(2, m, 2)))) for m in (9, 40)] == [8, 39]


def test_evaluation_posts_few_receives_in_any_placement():
    for where in ((0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2)):
        assert max(map(most_posted, lower(forward_only(where, 40)))) <= 3


@every_program
def test_gradients_are_reduced_once_per_stage_after_the_last_addition(programs):
    for row in lower(programs):
        for stage in {action.stage for action in row}:
            places = [place for place, action in enumerate(row) if action == (stage, ActionKind.REDUCE_GRADIENTS, None)]
            adding = [p for p, action in enumerate(row) if action.stage == stage and action.kind in FILLS_GRADIENTS]
            assert len(places) == bool(adding)
            if adding:
                assert places[0] > adding[-1]
                assert not any(action.kind.computes for action in row[adding[-1] + 1 : places[0]])
