import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridpp.errors import ConfigError
from hybridpp.timeline import Span, Timeline, draw

ROOT = Path(__file__).parents[2]
# Two ranks of two stages each, the second half as fast; the gradients of one stage are summed up.
TIMELINE = Timeline(
    (
        *(
            Span(rank, rank + 2 * chunk, "F", 37, 5.0 + chunk + rank, 6.0 + chunk + rank)
            for rank in (0, 1)
            for chunk in (0, 1)
        ),
        Span(1, 3, "I", 37, 8.0, 9.0),
        Span(1, 3, "W", 37, 9.0, 10.0),
        Span(0, 2, "B", 41, 9.0, 11.0),
        Span(1, 3, "REDUCE_GRAD", None, 10.0, 13.0),
    )
)


def words(path):
    """The texts of an SVG, in the order in which they are drawn."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_a_picture_tells_ranks_microbatches_kinds_and_the_idle_share(tmp_path):
    draw(TIMELINE, tmp_path / "one.svg")
    found = words(tmp_path / "one.svg")
    assert {"rank 0", "rank 1", "ms", "8 ms, 50.0 % idle"} <= set(found)
    assert found.count("37") == 6
    assert found.count("41") == 1
    assert found[-7:] == [
        "F forward",
        "B backward",
        "I gradient of the input",
        "W gradient of the weights",
        "chunk 0",
        "chunk 1",
        "messages and sums",
    ]


def test_the_legend_knows_the_chunks_of_every_rank(tmp_path):
    uneven = Timeline(tuple(span for span in TIMELINE.spans if (span.rank, span.stage) != (0, 2)))
    draw(uneven, tmp_path / "uneven.svg")
    assert {"chunk 0", "chunk 1"} <= set(words(tmp_path / "uneven.svg"))


def test_two_timelines_stand_below_each_other_on_one_scale(tmp_path):
    late = Timeline(tuple(span._replace(end_ms=span.end_ms + 400) for span in TIMELINE.spans if span.kind == "F"))
    draw({"simulated": TIMELINE, "measured": late}, tmp_path / "two.svg")
    found = words(tmp_path / "two.svg")
    assert found.index("simulated: 8 ms, 50.0 % idle") < found.index(
        f"measured: 403 ms, {100 * late.idle_share:.1f} % idle"
    )
    # On the longer one's scale, the cells of the shorter are too narrow for their numbers.
    assert found.count("37") == 4
    assert "41" not in found


def test_equal_timelines_give_equal_files(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw(TIMELINE, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_the_files_ending_chooses_the_format(tmp_path, suffix, start):
    draw(TIMELINE, str(tmp_path / f"picture{suffix}"))
    assert (tmp_path / f"picture{suffix}").read_bytes().startswith(start)


def test_drawing_leaves_pyplot_and_its_settings_alone(tmp_path):
    code = (
        "import sys; from hybridpp.timeline import Span, Timeline, draw\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"draw(Timeline((Span(0, 0, 'F', 0, 0.0, 1.0),)), {str(tmp_path / 'x.svg')!r})\n"
        "import matplotlib\n"
        "assert matplotlib.rcParams['svg.hashsalt'] is None\n"
        "assert not {'matplotlib.pyplot', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)


def test_other_endings_are_refused():
    with pytest.raises(ConfigError, match=r"^a picture's file ends in one of \.pdf, \.png, \.svg: got 'x\.jpg'\.$"):
        draw(TIMELINE, "x.jpg")


@pytest.mark.parametrize(
    "timelines", [Timeline(()), {}, {"a": TIMELINE, "b": Timeline((Span(0, 0, "F", 0, 1.0, 1.0),))}]
)
def test_an_empty_timeline_is_not_drawn(tmp_path, timelines):
    with pytest.raises(ConfigError, match=r"^there is nothing to draw: a timeline has no span that takes time\.$"):
        draw(timelines, tmp_path / "x.svg")


def test_without_matplotlib_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "hybridpp.timeline.gantt", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ConfigError, match=r"^a picture needs matplotlib\. Install it: pip install 'hybridpp\[plot\]'\.$"
    ):
        draw(TIMELINE, tmp_path / "x.svg")


def test_another_missing_module_is_not_taken_for_matplotlib(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "hybridpp.timeline.gantt", raising=False)
    monkeypatch.setitem(sys.modules, "hybridpp.timeline.timeline", None)
    with pytest.raises(ModuleNotFoundError, match="timeline"):
        draw(TIMELINE, tmp_path / "x.svg")
