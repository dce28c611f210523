import json

import pytest
from recordings import recorded

from hybridpp.timeline import Timeline


@pytest.fixture
def command():
    return "report"


def test_it_prints_the_summary_and_writes_the_page_beside_the_recording(printed, tmp_path):
    recorded("1f1b", 4, 8).save(tmp_path / "run")
    text = printed("run", "--trace", "trace.json")
    assert text.startswith("Model on 4 ranks\n")
    # (m + p - 1) slots of 6 ms, and 4 ms before and after them.
    assert "Step          |      70 ms | one step" in text
    assert 'schedule="zb-h1" would take' in text
    assert text.endswith("wrote run/report.html\nwrote trace.json\n")
    assert "<title>Model on 4 ranks - hybridpp report</title>" in (tmp_path / "run" / "report.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_file_is_a_recording_too_and_its_page_may_be_elsewhere(printed, tmp_path):
    recorded().save(tmp_path / "mine.json")
    assert "wrote page.html" in printed("mine.json", "--output", "page.html")
    estimate = {"time": {"step_ms": 30.0}, "ranks": [{"bytes": {"weights": 2**20}}] * 2}
    (tmp_path / "estimate.json").write_text(json.dumps(estimate))
    printed("mine.json", "--output", "page.html", "--estimate", "estimate.json")
    assert "From hybridpp estimate" in (tmp_path / "page.html").read_text()


def test_wrong_input_is_told_in_two_lines(refused, tmp_path):
    recorded().save(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("{}")
    (tmp_path / "timeline.json").write_text(Timeline(()).to_json())
    (tmp_path / "newer.json").write_text(json.dumps({"format": "hybridpp-recording", "version": 7}))
    assert "there is no 'nowhere'" in refused("nowhere")
    assert "the folder 'empty' has no recording.json" in refused("empty")
    assert "it is other JSON" in refused("text.json")
    assert "it is a timeline alone" in refused("timeline.json")
    assert "of version 7, and this hybridpp reads versions up to 1" in refused("newer.json")
    assert "--output is an HTML file: got 'page.pdf'" in refused("run", "--output", "page.pdf")
    assert "missing.json cannot be read" in refused("run", "--estimate", "missing.json")
    (tmp_path / "broken.json").write_text("{")
    assert "broken.json is no estimate: it is no JSON" in refused("run", "--estimate", "broken.json")
    assert "nowhere/page.html cannot be written" in refused("run", "--output", "nowhere/page.html")


def test_other_schedules_are_simulated_from_a_recording(printed, tmp_path, command):
    recorded().save(tmp_path / "run")
    (tmp_path / "timeline.json").write_text(recorded().timeline().to_json())
    from hybridpp.cli import main

    sizes = ("--stages", "2", "--microbatches", "4")
    assert main(["simulate", "zb-h1", *sizes, "--measured", "run/recording.json"]) == 0
    assert main(["simulate", "zb-h1", *sizes, "--measured", "timeline.json"]) == 0


def test_a_link_where_the_page_would_be_is_replaced_and_not_followed(printed, tmp_path):
    recorded().save(tmp_path / "run")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run" / "report.html").symlink_to(tmp_path / "mine")
    printed("run")
    assert (tmp_path / "mine").read_text() == "mine"
    assert "hybridpp report" in (tmp_path / "run" / "report.html").read_text()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["recording.json", "report.html"]
