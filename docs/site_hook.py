"""Puts pages that lie outside docs/ on the site; links between pages work there as in the repository."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# File of the repository -> page of the site. Each has one source, which is the file.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "results.md",
    "plugins/README.md": "plugins.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    target = page.file.src_uri
    source = next((source for source, name in PAGES.items() if name == target), f"docs/{target}")

    def moved(link: re.Match[str]) -> str:
        image, text, path, anchor = link.groups()
        if re.match(r"[a-z]+:", path):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        uri = PAGES.get(path, path.removeprefix("docs/"))
        if path not in PAGES and (not path.startswith("docs/") or not files.get_file_from_path(uri)):
            # The site has no such page: the text says which file of the repository it is.
            return text if (ROOT / path).exists() else link[0]
        return f"{image}[{text}]({posixpath.relpath(uri, posixpath.dirname(target) or '.')}{anchor or ''})"

    return LINK.sub(moved, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name objects as :class:`Name`, which Markdown does not know."""
    return re.sub(r":(?:class|meth|func|mod|attr|exc|data):(?=<code)", "", html)


def on_post_page(output: str, **_: Any) -> str:
    """Only pages that are opened from a disk need the script with which their search runs, from another host."""
    script = re.escape('<script src="https://unpkg.com/iframe-worker/shim"></script>')
    only_there = r"""<script>if (location.protocol === "file:")
  document.write('<script src="https://unpkg.com/iframe-worker/shim"><\\/script>')</script>"""
    return re.sub(script, only_there, output)
