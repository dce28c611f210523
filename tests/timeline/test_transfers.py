import pytest

from hybridpp.timeline import Span, transfers


class Spans:
    def __init__(self, *spans):
        self.spans = spans


def between(*spans):
    return [(sent.producer.name, sent.consumer.name, sent.gap_ms) for sent in transfers(Spans(*spans))]


def test_activations_go_to_the_next_stage_and_gradients_go_back():
    spans = [Span(0, 0, "F", 0, 0, 1), Span(1, 1, "F", 0, 3, 4), Span(1, 1, "B", 0, 4, 6), Span(0, 0, "B", 0, 7, 9)]
    assert between(*spans) == [("0F0", "1F0", 2), ("1B0", "0B0", 1)]


@pytest.mark.parametrize("kind", ["W", "SEND_F"])
def test_other_actions_produce_nothing_that_is_sent(kind):
    assert between(Span(0, 0, kind, 0, 0, 1), Span(1, 1, kind, 0, 3, 4)) == []


def test_stages_of_one_rank_send_each_other_nothing():
    assert between(Span(0, 0, "F", 0, 0, 1), Span(0, 1, "F", 0, 1, 2)) == []


def test_of_several_steps_the_last_counts():
    first = [Span(0, 0, "F", 0, 0, 1), Span(1, 1, "F", 0, 3, 4)]
    assert between(*first, Span(0, 0, "F", 0, 10, 11), Span(1, 1, "F", 0, 16, 17)) == [("0F0", "1F0", 5)]
