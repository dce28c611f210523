import random
from textwrap import dedent

import pytest
from covering import one_test_for
from schedule.oracle import every_schedule

from hybridpp.schedule import ActionKind, completed_sends, forward_only, lower, make_schedule, one_f_one_b, parse_action

ARRIVES = {
    ActionKind.SEND_ACTIVATION: (1, ActionKind.RECEIVE_ACTIVATION),
    ActionKind.SEND_GRADIENT: (-1, ActionKind.RECEIVE_GRADIENT),
}
RECEIVES = (ActionKind.RECEIVE_ACTIVATION, ActionKind.RECEIVE_GRADIENT)
NEEDS = {
    ActionKind.FORWARD: ActionKind.RECEIVE_ACTIVATION,
    ActionKind.BACKWARD: ActionKind.RECEIVE_GRADIENT,
    ActionKind.INPUT_GRADIENT: ActionKind.RECEIVE_GRADIENT,
}
SMALL = dict(every_schedule(ranks=(1, 2, 3), microbatches=(1, 2, 5), chunks=(1, 2)))
SMALL["orders of their own"] = tuple(
    tuple(map(parse_action, row.split()))
    for row in (
        "0F0 0F1 0F2 2F0 2F2 2F1 2B1 2B0 2B2 0B0 0B1 0B2",
        "1F2 1F0 1F1 3F0 3F1 3B0 3B1 3F2 3B2 1B1 1B2 1B0",
    )
)
SMALL["forward only"] = forward_only((0, 1, 2, 1, 0), 3)
CASES = [pytest.param(programs, id=name) for name, programs in SMALL.items()]


def receive_of(send):
    step, kind = ARRIVES[send.kind]
    return send._replace(stage=send.stage + step, kind=kind)


def show(lowered):
    """Every action, behind the sends that are done by then."""
    return "".join(
        f"rank {rank} | "
        + " ".join(
            f"({' '.join(map(str, sends))}) {action}" if sends else str(action)
            for action, sends in zip(row, done, strict=True)
        )
        + "\n"
        for rank, (row, done) in enumerate(zip(lowered, completed_sends(lowered), strict=True))
    )


def test_a_gradient_that_came_back_says_that_the_activation_was_received():
    assert show(lower(one_f_one_b(2, 2))) == dedent("""\
        rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 (0SEND_F0 0SEND_F1) 0RECV_B1 0B1 0REDUCE_GRAD
        rank 1 | 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD
    """)


class Run:
    """Lowered programs, run one action at a time; a compute action waits for what is received for it."""

    def __init__(self, lowered):
        self.lowered = lowered
        self.place = [0] * len(lowered)
        self.sent, self.posted = set(), set()
        self.receives = {action for row in lowered for action in row if action.kind in RECEIVES}

    def can_step(self, rank):
        if self.place[rank] == len(self.lowered[rank]):
            return False
        action = self.lowered[rank][self.place[rank]]
        needed = action._replace(kind=NEEDS[action.kind]) if action.kind in NEEDS else None
        return needed not in self.receives or needed in self.sent

    def step(self, rank):
        action = self.lowered[rank][self.place[rank]]
        if action.kind in ARRIVES:
            self.sent.add(receive_of(action))
        elif action.kind in RECEIVES:
            self.posted.add(action)
        self.place[rank] += 1


@one_test_for("programs", CASES)
def test_whoever_is_late_the_receives_are_posted(programs):
    """Ranks run in any order; at every place the receives of the sends that are done by then are there."""
    lowered = lower(programs)
    done = completed_sends(lowered)
    dice = random.Random(0)
    for _ in range(10):
        run = Run(lowered)
        speed = [dice.random() ** 4 for _ in lowered]
        while ranks := [rank for rank in range(len(lowered)) if run.can_step(rank)]:
            (rank,) = dice.choices(ranks, [speed[rank] for rank in ranks])
            for send in done[rank][run.place[rank]]:
                assert receive_of(send) in run.posted
            run.step(rank)
        assert run.place == [len(row) for row in lowered]


@one_test_for("programs", CASES)
def test_no_send_is_done_earlier_than_it_is_said_to_be(programs):
    """Hold up the rank that should post the receive right before it: how far does the sender get?"""
    lowered = lower(programs)
    done = completed_sends(lowered)
    where = {action: (rank, place) for rank, row in enumerate(lowered) for place, action in enumerate(row)}
    for rank, row in enumerate(lowered):
        listed = {send: place for place, sends in enumerate(done[rank]) for send in sends}
        assert sum(map(len, done[rank])) == len(listed), "each send is listed once"
        for send in (action for action in row if action.kind in ARRIVES):
            held_up = where[receive_of(send)]
            run = Run(lowered)
            moved = True
            while moved:
                moved = False
                for other in range(len(lowered)):
                    while run.can_step(other) and (other, run.place[other]) != held_up:
                        run.step(other)
                        moved = True
            # The sender began the action it is at without the receive, so that is certain from the next one on.
            earliest = max(run.place[rank], where[send][1]) + 1
            assert listed.get(send, len(row)) == min(earliest, len(row))


def most_open(lowered):
    """The most sends that a rank has posted and that are not done yet."""
    most = 0
    for row, done in zip(lowered, completed_sends(lowered), strict=True):
        sent = 0
        for action, sends in zip(row, done, strict=True):
            sent += (action.kind in ARRIVES) - len(sends)
            most = max(most, sent)
    return most


@one_test_for("name", ["1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", "zb-v"])
@one_test_for("num_ranks", [2, 4])
def test_open_sends_do_not_grow_with_the_number_of_microbatches(name, num_ranks):
    """GPipe's do: nothing comes back before all has gone forward."""
    few, many = (most_open(lower(make_schedule(name, num_ranks, m))) for m in (3 * num_ranks, 40))
    assert few == many <= 2 * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_runs_ahead_waits_for_the_oldest_of_its_sends(num_ranks):
    """In evaluation nothing comes back: without a limit, the first rank would hold whatever it has sent."""
    lowered = lower(forward_only(range(num_ranks), 40))
    for rank, done in enumerate(completed_sends(lowered, max_open=3)):
        open_sends = [0]
        for action, sends in zip(lowered[rank], done, strict=True):
            open_sends.append(open_sends[-1] - len(sends) + (action.kind is ActionKind.SEND_ACTIVATION))
        assert max(open_sends) == (3 if rank < num_ranks - 1 else 0)
