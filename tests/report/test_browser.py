"""The page of a report in a real browser: what it draws, and how it is moved. Skipped where there is no browser."""

from pathlib import Path

import pytest
from headless_browser import browser_page
from recordings import recorded

from hybridpp.report.page import render_page


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser_page(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def opened(tab, tmp_path):
    def open_page(recording, **options):
        path = Path(tmp_path) / "report.html"
        path.write_text(render_page(recording)[0], encoding="utf-8")
        tab.requested.clear()
        tab.complaints.clear()
        tab.open(path, **options)
        return tab

    yield open_page
    assert tab.complaints == []
    assert all(url.startswith(("file://", "data:")) for url in tab.requested), tab.requested


def pixels(tab, canvas):
    """How many colours a canvas has."""
    return tab.run(f"""(() => {{
        const canvas = document.getElementById("{canvas}");
        const bytes = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return new Set(new Uint32Array(bytes.buffer)).size;
    }})()""")


def center(tab, rank, action):
    """Where an action is on the screen."""
    tab.run('document.getElementById("gantt").scrollIntoView()')
    x, y = tab.run(f"report.center({rank}, {action})")
    left, top = tab.run('(({left, top}) => [left, top])(document.getElementById("gantt").getBoundingClientRect())')
    return left + x, top + y


def readout(tab):
    return tab.run('document.getElementById("readout").textContent')


def test_the_step_is_drawn_and_an_action_is_explained(opened):
    tab = opened(recorded(num_steps=3))
    # F and B of four micro-batches on two ranks; parts of the steps beside it.
    assert tab.run("report.drawn()") >= 16
    assert pixels(tab, "gantt") > 8
    assert pixels(tab, "memory") > 4
    tab.mouse("mouseMoved", *center(tab, 1, 8))
    text = readout(tab)
    assert "rank 1 (replica 0, position 1, shard 0)" in text
    assert "forward of stage 1, micro-batch 0" in text
    assert "101 MiB in use" in text


def test_it_zooms_and_pans_with_mouse_and_keys(opened):
    tab = opened(recorded(num_steps=3))
    fitted = tab.run("report.view()")
    x, y = center(tab, 0, 8)
    tab.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400, modifiers=2)
    zoomed = tab.run("report.view()")
    assert zoomed[1] - zoomed[0] < 0.6 * (fitted[1] - fitted[0])
    assert fitted[0] < zoomed[0] < zoomed[1] < fitted[1]
    tab.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    tab.mouse("mouseMoved", x - 80, y, button="left", buttons=1)
    tab.mouse("mouseReleased", x - 80, y, button="left", clickCount=1)
    assert tab.run("report.view()")[0] > zoomed[0]
    tab.run('document.getElementById("gantt").focus()')
    tab.press("0")
    assert tab.run("report.view()") == pytest.approx(fitted)
    tab.press("a")
    assert tab.run("report.view()") == pytest.approx([0, 102_000])
    before = tab.run("report.view()")
    tab.press("+")
    after = tab.run("report.view()")
    assert after[1] - after[0] == pytest.approx(0.7 * (before[1] - before[0]))
    tab.press("n")
    tab.press("n")
    assert "rank 0" in readout(tab)
    assert "micro-batch 1" in readout(tab)


def test_another_step_and_the_simulated_rows_can_be_chosen(opened):
    tab = opened(recorded(num_steps=3))
    drawn, height = tab.run("report.drawn()"), tab.run('document.getElementById("gantt").clientHeight')
    tab.run('document.getElementById("predicted").click()')
    tab.settle()
    assert tab.run("report.drawn()") == drawn + 16
    assert tab.run('document.getElementById("gantt").clientHeight') > height
    tab.run("""(() => {
        const menu = document.getElementById("step");
        menu.value = "2";
        menu.dispatchEvent(new Event("change"));
    })()""")
    tab.settle()
    assert tab.run("report.view()[0]") > 60_000


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_readable_and_nothing_is_wider_than_a_laptop(opened, dark):
    tab = opened(recorded(num_steps=2), dark=dark, size=(1280, 720))
    assert tab.run("document.documentElement.scrollWidth") == 1280
    smallest = """Math.min(...[...document.querySelectorAll("body *")].filter((one) => one.innerText)
        .map((one) => parseFloat(getComputedStyle(one).fontSize)))"""
    assert tab.run(smallest) >= 12
    light = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).every((part) => part > 200)"
    assert tab.run(light) is not dark


@pytest.mark.parametrize(
    ("recording", "least"),
    [
        (recorded(num_ranks=1, num_microbatches=1, memory=False), 2),
        (recorded("zb-v", num_ranks=2, num_microbatches=4, dp_size=2), 48),
        (recorded(num_ranks=8, num_microbatches=32, tp_size=8, num_steps=2), 2000),
    ],
    ids=["one rank without memory", "two stages per rank", "64 ranks and 8,192 actions"],
)
def test_small_and_large_recordings_are_drawn(opened, recording, least):
    tab = opened(recording)
    assert tab.run("report.drawn()") >= least
    has_memory = recording.ranks[0].memory_kind is not None
    assert tab.run('document.getElementById("memory-box").hidden') is not has_memory
