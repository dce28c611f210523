"""Every page is on the site that `make docs` builds, and names errors and objects that exist."""

import ast
import importlib
import re

from covering import one_test_for
from support import ROOT

import hybridpp
import hybridpp.errors
import hybridpp.optim
import hybridpp.schedule

NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
API = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.M)
MESSAGES = re.findall(r"^\| `([^`]+)` \| `(\w+)`", (ROOT / "docs/errors.md").read_text(), re.M)


def test_every_page_is_in_the_navigation():
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    outside = re.findall(r'^    "\S+": "(\S+)",$', (ROOT / "docs/site_hook.py").read_text(), re.M)
    assert sorted(re.findall(r"(\S+\.md)$", NAV, re.M)) == sorted(pages | set(outside))


@one_test_for("name", API)
def test_the_reference_names_what_exists(name):
    module, _, last = name.rpartition(".")
    assert hasattr(importlib.import_module(module), last)


def test_every_public_name_is_in_the_reference():
    named = {name.rpartition(".")[2] for name in API}
    assert set(hybridpp.__all__) <= named
    assert set(hybridpp.schedule.__all__) <= named
    schedulers = {name for name in hybridpp.optim.__all__ if name.endswith("LR")}
    assert len(schedulers) > 10
    assert schedulers <= named


def test_the_search_of_layouts_is_in_the_reference():
    assert {"hybridpp.estimate.search.search", "hybridpp.estimate.search.SearchSpace"} <= set(API)


def texts():
    """Every text of the code, with {} for each value that is put into it."""
    for package in ("hybridpp", "plugins"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_errors_are_quoted_as_the_code_has_them():
    code = "\n".join(texts())
    assert len(MESSAGES) > 60
    assert [message for message, _ in MESSAGES if message.replace("…", "{}") not in code] == []
    assert [error for _, error in MESSAGES if not hasattr(hybridpp.errors, error)] == []


def test_every_class_of_errors_that_ends_a_job_is_on_the_page():
    module = hybridpp.errors
    classes = {name for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__}
    classes = {name for name in classes if isinstance(getattr(module, name), type)}
    # The base class, what a subclass of another says, and what only in-process ranks raise.
    classes -= {"HybridppError", "PeerTimeoutError", "RefusedByPeerError", "DeadlockError"}
    assert sorted(classes - {error for _, error in MESSAGES}) == []
