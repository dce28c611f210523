"""The pictures of docs/report.md, from a report of `make vit`.

make vit ARGS="--epochs 6 --record outputs/run"
hybridpp report outputs/run
PYTHONPATH=.:tests python tests/report/pictures.py outputs/run/report.html docs
"""

import base64
import sys
import tempfile
from pathlib import Path

from headless_browser import Page, browser_page

WIDTH = 1280
# From the top of the first element to the bottom of the second.
PARTS = {
    "report-timeline.png": ("header", "#memory-box"),
    "report-tables.png": ("section[aria-labelledby=time]", "section[aria-labelledby=prediction]"),
}


def main(report: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, browser_page(Path(scratch)) as page:
        page.open(report, size=(WIDTH, 900))
        page.run('document.getElementById("predicted").click()')
        page.settle()
        for name, (first, last) in PARTS.items():
            top, bottom = edge(page, first, "top") - 12, edge(page, last, "bottom") + 12
            clip = {"x": 0, "y": max(0, top), "width": WIDTH, "height": bottom - max(0, top), "scale": 1}
            shown = page.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
            (folder / name).write_bytes(base64.b64decode(shown["data"]))
        assert page.complaints == [], page.complaints


def edge(page: Page, selector: str, side: str) -> float:
    """Where an element is on the page."""
    return page.run(f"document.querySelector({selector!r}).getBoundingClientRect().{side} + scrollY")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
