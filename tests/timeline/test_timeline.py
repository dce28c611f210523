import re

import pytest

from hybridpp.errors import ConfigError
from hybridpp.schedule import ActionKind
from hybridpp.timeline import COMPUTE_KINDS, Span, Timeline

# rank 0: 0F0 (2 ms), 0B0 (4 ms); rank 1: 1F0 (2 ms), 1B0 (4 ms), then its gradients for 1 ms.
#          0    2    4         8         12   13
# rank 0 | 0F0            . . . 0B0 . . .
# rank 1 |      1F0  1B0 . . .
SMALL = Timeline(
    (
        Span(0, 0, "B", 0, 108.0, 112.0),
        Span(0, 0, "F", 0, 100.0, 102.0),
        Span(1, 1, "F", 0, 102.0, 104.0),
        Span(1, 1, "B", 0, 104.0, 108.0),
        Span(1, 1, "REDUCE_GRAD", None, 108.0, 109.0),
    )
)


def test_the_times_of_a_timeline_count_from_its_first_computation():
    assert SMALL.num_ranks == 2
    assert SMALL.start_ms == 100
    assert SMALL.makespan_ms == 12
    assert [SMALL.busy_ms(rank) for rank in range(2)] == [6, 6]
    assert SMALL.idle_share == 0.5


def test_waiting_for_the_first_activation_is_not_part_of_the_step():
    early = Timeline((*SMALL.spans, Span(1, 1, "RECV_F", 0, 50.0, 50.5)))
    assert (early.start_ms, early.makespan_ms, early.idle_share) == (100, 12, 0.5)


def test_a_ranks_spans_come_by_time_and_are_named_as_actions():
    assert [span.name for span in SMALL.of_rank(0)] == ["0F0", "0B0"]
    assert [span.name for span in SMALL.of_rank(1)] == ["1F0", "1B0", "1REDUCE_GRAD"]


def test_an_empty_timeline_took_no_time():
    empty = Timeline(())
    assert Timeline((Span(0, 0, "SEND_F", 0, 3.0, 4.0),)).makespan_ms == 1
    assert (empty.num_ranks, empty.makespan_ms, empty.idle_share) == (0, 0, 0)


def test_a_timeline_comes_back_from_json():
    assert Timeline.from_json(SMALL.to_json()) == SMALL


def test_the_kinds_that_compute_are_those_of_schedules():
    assert {kind.value for kind in ActionKind if kind.computes} <= set(COMPUTE_KINDS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tea", "it is no JSON: Expecting value: line 1 column 1 (char 0)."),
        ('{"spans": [[0, 0, "F", 0, 1.0, 1e999]]}', "1e999 is there, which is too large for a number."),
        ("[]", "list indices must be integers or slices, not str."),
        ('{"spans": [[0, 0, "F", 0, 1.0]]}', "not enough values to unpack (expected 6, got 5)."),
    ],
)
def test_other_text_is_no_timeline(text, reason):
    message = (
        f'a timeline is written as {{"spans": [[rank, stage, kind, microbatch, start_ms, end_ms], ...]}}: {reason}'
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Timeline.from_json(text)


@pytest.mark.parametrize("span", [Span(1, 2, "F", 0, 3.0, 2.5), Span(-1, 2, "F", 0, 2.0, 2.5)])
def test_spans_that_cannot_be_are_refused(span):
    message = (
        "a span needs a rank and a stage of at least 0 and ends after it starts: "
        f"got 2F0 on rank {span.rank} from {span.start_ms:g} to 2.5 ms."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Timeline((span,))
