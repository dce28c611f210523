import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from hybridpp.timeline import Span, Timeline, chrome_trace, save_trace, transfers

# Stage 0 on rank 0, stages 1 and 2 on rank 1, stage 3 on rank 0: forward there and back, then the way back. Messages
# of stage 0 overlap.
TIMELINE = Timeline(
    (
        Span(0, 0, "F", 0, 20.0, 21.0),
        Span(0, 0, "SEND_F", 0, 21.0, 22.5),
        Span(0, 0, "F", 1, 21.0, 22.0),
        Span(0, 0, "SEND_F", 1, 22.0, 23.5),
        Span(1, 1, "F", 0, 22.5, 23.5),
        Span(1, 2, "F", 0, 23.5, 24.5),
        Span(0, 3, "F", 0, 26.0, 27.0),
        Span(0, 3, "I", 0, 27.0, 28.0),
        Span(1, 2, "B", 0, 28.0, 30.0),
        Span(0, 3, "W", 0, 28.0, 29.0),
        Span(0, 3, "REDUCE_GRAD", None, 29.0, 30.125),
    )
)
MESSAGES = [("0F0", "1F0"), ("2F0", "3F0"), ("3I0", "2B0")]


def events(phase):
    return [event for event in chrome_trace(TIMELINE)["traceEvents"] if event["ph"] == phase]


def test_messages_go_between_neighbouring_stages_on_different_ranks():
    assert [(producer.name, consumer.name) for producer, consumer in transfers(TIMELINE)] == MESSAGES
    assert [message.gap_ms for message in transfers(TIMELINE)] == [1.5, 1.5, 0]


def test_every_span_is_a_complete_event_in_microseconds_from_the_start():
    assert Counter(event["name"] for event in events("X")) == Counter(span.name for span in TIMELINE.spans)
    (last,) = (event for event in events("X") if event["name"] == "3REDUCE_GRAD")
    assert last == {
        "ph": "X",
        "name": "3REDUCE_GRAD",
        "cat": "REDUCE_GRAD",
        "pid": 0,
        "tid": 1,
        "ts": 9000,
        "dur": 1125,
        "args": {"stage": 3, "microbatch": None},
    }


def test_ranks_are_processes_and_overlapping_messages_get_own_threads():
    names = {(event["name"], event["pid"], event["tid"]): event["args"] for event in events("M")}
    assert names["process_name", 1, 0] == {"name": "rank 1"}
    threads = {key[1:]: value["name"] for key, value in names.items() if key[0] == "thread_name"}
    assert threads == {(0, 0): "compute", (0, 1): "communication 1", (0, 2): "communication 2", (1, 0): "compute"}
    assert {key[1:]: value["sort_index"] for key, value in names.items() if key[0] == "thread_sort_index"} == {
        key: key[1] for key in threads
    }


def test_events_of_a_thread_never_overlap():
    threads = defaultdict(list)
    for event in events("X"):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for times in threads.values():
        times.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(times))


def test_arrows_lead_from_within_the_maker_to_the_start_of_the_taker():
    ends = {event["id"]: event for event in events("f")}
    cells = {event["name"]: event for event in events("X")}
    assert len(events("s")) == len(ends) == len(MESSAGES)
    for start, (producer, consumer) in zip(events("s"), MESSAGES, strict=True):
        end = ends[start["id"]]
        assert start["name"] == end["name"] == ("activation" if "F" in producer else "gradient")
        assert end["bp"] == "e"
        assert cells[producer]["ts"] <= start["ts"] < cells[producer]["ts"] + cells[producer]["dur"]
        assert (start["pid"], start["tid"]) == (cells[producer]["pid"], cells[producer]["tid"])
        assert (end["pid"], end["tid"], end["ts"]) == tuple(cells[consumer][key] for key in ("pid", "tid", "ts"))


def test_the_file_holds_the_trace_as_json(tmp_path):
    save_trace(TIMELINE, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == chrome_trace(TIMELINE)


@pytest.mark.parametrize("third", [1 / 3, 0.1 + 0.2, 1e6 / 7])
def test_rounding_makes_no_events_overlap(third):
    spans = tuple(Span(0, 0, "F", number, number * third, (number + 1) * third) for number in range(50))
    times = [event for event in chrome_trace(Timeline(spans))["traceEvents"] if event["ph"] == "X"]
    for before, after in pairwise(times):
        assert round(before["ts"] + before["dur"], 3) == after["ts"]
