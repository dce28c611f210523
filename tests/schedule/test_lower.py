from collections import defaultdict
from itertools import pairwise
from textwrap import dedent

import pytest

from hybridpp.schedule import Kind, forward_only, lower, one_f_one_b, parse_action, render

USES = {Kind.RECEIVE_ACTIVATION: Kind.FORWARD, Kind.RECEIVE_GRADIENT: Kind.BACKWARD}
SENDS = {Kind.FORWARD: Kind.SEND_ACTIVATION, Kind.BACKWARD: Kind.SEND_GRADIENT}
# What a send is called on the stage that receives it: (difference of stages, kind).
ARRIVES = {Kind.SEND_ACTIVATION: (1, Kind.RECEIVE_ACTIVATION), Kind.SEND_GRADIENT: (-1, Kind.RECEIVE_GRADIENT)}
TWO_STAGES_PER_RANK = tuple(
    tuple(map(parse_action, row.split()))
    for row in ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")
)
PROGRAMS = [
    *(one_f_one_b(p, m) for p, m in [(1, 2), (2, 1), (2, 4), (3, 5), (4, 2), (5, 8)]),
    forward_only((0, 1, 2), 4),
    TWO_STAGES_PER_RANK,
]
every_program = pytest.mark.parametrize("programs", PROGRAMS, ids=lambda programs: f"{len(programs)} ranks")


def test_1f1b_with_two_stages_and_three_microbatches():
    assert render(lower(one_f_one_b(2, 3))) == (
        "rank 0 | 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2 0REDUCE_GRAD\n"
        "rank 1 | 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2 1REDUCE_GRAD\n"
    )


def test_one_stage_only_reduces():
    assert render(lower(one_f_one_b(1, 2))) == "rank 0 | 0F0 0B0 0F1 0B1 0REDUCE_GRAD\n"


def test_evaluation_sends_activations_only():
    assert render(lower(forward_only((0, 1, 2), 2))) == dedent("""\
        rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1
        rank 1 | 1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1
        rank 2 | 2RECV_F0 2RECV_F1 2F0 2F1
    """)


def test_what_goes_back_in_two_parts_is_sent_after_the_first_and_reduced_after_the_last():
    programs = tuple(tuple(map(parse_action, row.split())) for row in ("0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1F1 1B1 1W0"))
    assert render(lower(programs)) == dedent("""\
        rank 0 | 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0I0 0RECV_B1 0W0 0B1 0REDUCE_GRAD
        rank 1 | 1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1B1 1SEND_B1 1W0 1REDUCE_GRAD
    """)


@every_program
def test_what_is_computed_stays_as_it_was(programs):
    assert tuple(tuple(action for action in row if action.kind.computes) for row in lower(programs)) == programs


@every_program
def test_every_send_has_its_receive_in_the_same_order_between_each_two_ranks(programs):
    rank_of = {action.stage: rank for rank, row in enumerate(programs) for action in row}
    sent, received = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(lower(programs)):
        for action in row:
            if action.kind in ARRIVES:
                step, kind = ARRIVES[action.kind]
                there = action._replace(stage=action.stage + step, kind=kind)
                sent[rank, rank_of[there.stage], kind].append(there)
            elif action.kind in USES:
                source = action.stage + (1 if action.kind is Kind.RECEIVE_GRADIENT else -1)
                received[rank_of[source], rank, action.kind].append(action)
    assert sent == received
    assert bool(sent) == (len(programs) > 1)


@every_program
def test_a_result_leaves_right_after_it_was_computed(programs):
    for row in lower(programs):
        for before, action in pairwise(row):
            if action.kind in ARRIVES:
                assert action == before._replace(kind=SENDS[before.kind])


@every_program
def test_at_most_one_input_is_received_that_is_not_used_yet(programs):
    for row in lower(programs):
        posted = set()
        for action in row:
            if action.kind in USES:
                posted.add(action._replace(kind=USES[action.kind]))
            elif action.kind.computes:
                posted.discard(action)
                assert len(posted) <= 1
        assert not posted


@every_program
def test_gradients_are_reduced_once_per_stage_after_its_last_backward(programs):
    for row in lower(programs):
        for stage in {action.stage for action in row}:
            places = [place for place, action in enumerate(row) if action == (stage, Kind.REDUCE_GRADIENTS, None)]
            backwards = [p for p, action in enumerate(row) if action[:2] == (stage, Kind.BACKWARD)]
            assert len(places) == bool(backwards)
            if backwards:
                between = {action.kind for action in row[backwards[-1] + 1 : places[0]]}
                assert places[0] > backwards[-1]
                assert between <= {Kind.SEND_GRADIENT}
