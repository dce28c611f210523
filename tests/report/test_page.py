"""The page of a report, without a browser: what is in it, and that it loads nothing."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from recordings import recorded

from hybridpp.errors import ConfigError
from hybridpp.report.page import render_page

NASTY = '</script><script>alert(1)</script> & "quotes" <b>\''


class Elements(HTMLParser):
    """The elements of a page, with those that are not closed, and what its data are."""

    VOID = ("meta", "link", "input", "br", "hr", "img")

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.text, self.data = [], [], [], "", ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag

    def handle_data(self, text):
        tag, attributes = self.open[-1] if self.open else ("", {})
        if attributes.get("id") == "data":
            self.data += text
        elif tag not in ("script", "style"):
            self.text += text


def parsed(recording, estimate=None):
    page, _ = render_page(recording, estimate)
    elements = Elements(page)
    assert not elements.open
    return page, elements, json.loads(elements.data)


def test_a_page_has_its_parts_and_closes_what_it_opens():
    _, elements, data = parsed(recorded(num_steps=3))
    assert elements.tags.count("canvas") == 2
    assert elements.tags.count("table") == 6
    assert "Model on 2 ranks" in elements.text
    for part in ("Timeline", "Where the time goes", "Memory over time", "Stages and messages", "Predicted against"):
        assert part in elements.text
    assert [step[0] for step in data["steps"]] == [0, 1, 2]
    assert len(data["ranks"]) == len(data["predicted"]) == 2
    # F, B of 4 micro-batches in 3 steps.
    assert [len(rank["actions"]) for rank in data["ranks"]] == [24, 24]
    assert len(data["predicted"][0]) == 8


def test_a_page_asks_for_nothing_over_a_network():
    page, elements, _ = parsed(recorded())
    assert not re.search(r"https?://|//\w+\.\w+/|@import|url\(|import\(|fetch\(|XMLHttpRequest|WebSocket", page)
    assert [value for name, value in elements.attributes if name in ("src", "href")] == ["data:,"]
    policy = dict(elements.attributes)["content"]
    assert policy.startswith("default-src 'none'")


def test_names_cannot_leave_their_place_in_the_page():
    recording = recorded(model=NASTY)
    stages = tuple(stage._replace(modules=NASTY) for stage in recording.stages)
    waits = tuple(wait._replace(group=NASTY) for wait in recording.ranks[0].waits)
    ranks = (replace(recording.ranks[0], waits=waits, device=NASTY), *recording.ranks[1:])
    page, elements, data = parsed(replace(recording, stages=stages, ranks=ranks, settings={"schedule": NASTY}))
    assert elements.tags.count("script") == 2
    _, harmless, _ = parsed(replace(recorded(), settings={"schedule": "1f1b"}))
    assert elements.tags.count("b") == harmless.tags.count("b")
    assert page.count("alert(1)") > 2
    assert "<script>alert" not in page
    assert NASTY in data["groups"]
    assert NASTY in elements.text


@pytest.mark.parametrize(
    "recording",
    [
        recorded(num_ranks=1, num_microbatches=1),
        recorded(memory=False),
        recorded("zb-v", num_ranks=2, num_microbatches=4, dp_size=2, num_steps=2),
        replace(recorded(), ranks=tuple(replace(rank, traffic=(), held={}, waits=()) for rank in recorded().ranks)),
        replace(recorded(), ranks=tuple(replace(rank, phases=()) for rank in recorded().ranks)),
        replace(recorded(), settings={}, versions={}, created=""),
    ],
    ids=["one rank", "no memory", "two stages per rank", "no messages", "no phases", "no settings"],
)
def test_what_is_missing_leaves_the_rest(recording):
    _, elements, data = parsed(recording)
    assert len(data["ranks"]) == len(recording.ranks)
    assert "Where the time goes" in elements.text


def test_a_recording_without_a_step_is_refused():
    with pytest.raises(ConfigError, match=r"has no step: nothing ran inside booster\.record_timeline\. Call"):
        render_page(recorded(num_steps=0))


def test_an_evaluation_says_that_there_is_no_simulation():
    recording = recorded()
    ranks = (replace(rank, actions=tuple(one for one in rank.actions if one.kind == "F")) for rank in recording.ranks)
    _, elements, data = parsed(replace(recording, ranks=tuple(ranks)))
    assert "There is no simulation: the step has no backward pass." in elements.text
    assert data["predicted"] == [None, None]


def test_many_steps_are_drawn_as_far_as_a_page_can():
    recording = recorded(num_ranks=8, num_microbatches=32, num_steps=3, tp_size=4)
    page, elements, data = parsed(
        replace(recording, ranks=tuple(replace(rank, traffic=()) for rank in recording.ranks))
    )
    assert sum(len(rank["actions"]) for rank in data["ranks"]) == 3 * 2048
    assert len(elements.text) < 100_000
    assert len(page) < 5_000_000


def test_only_steps_around_the_median_one_are_drawn_if_there_are_too_many(monkeypatch):
    monkeypatch.setattr("hybridpp.report.page_data._MAX_ACTIONS", 40)
    _, elements, data = parsed(recorded(num_steps=9))
    # 16 actions in a step.
    assert len(data["steps"]) == 2
    assert data["chosen"] in [step[0] for step in data["steps"]]
    assert re.search(r"Of 9 recorded steps, 2 are drawn", elements.text)


def estimate(**changed):
    parts = {"weights": 4 * 2**20, "gradients": 8 * 2**20, "activations": 2**21, "logits": 0}
    ranks = [{"bytes": parts}, {"bytes": parts}]
    return {"time": {"step_ms": 17.0}, "ranks": ranks, **changed}


def test_an_estimate_is_compared_part_by_part():
    _, elements, _ = parsed(recorded(), estimate())
    text = re.sub(r"\s+", " ", elements.text)
    assert "34.00 ms" in text
    assert "-50.0 %" in text
    assert "position 0: weights4.00 MiB4.00 MiB+0.0 %" in text
    assert "position 1: gradients4.00 MiB8.00 MiB+100.0 %" in text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "not what `hybridpp estimate --json` prints: TypeError"),
        (estimate(time={}), "KeyError 'step_ms'"),
        (
            estimate(ranks=[{"bytes": {}}]),
            "is of 1 ranks of a pipeline, and the recording of 2. Estimate with --pp-size 2",
        ),
    ],
)
def test_other_estimates_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        render_page(recorded(), wrong)


@pytest.mark.parametrize(("last_stage_ms", "part"), [(2, "Most"), (4, "The largest part")])
def test_the_headline_says_most_of_the_rest_only_of_more_than_half_of_it(last_stage_ms, part):
    _, summary = render_page(recorded(num_ranks=4, num_microbatches=16, forward_ms=(2, 2, 2, last_stage_ms)))
    assert f" % of the step. {part} of the rest is " in summary.headline
