"""Every page is on the site that `make docs` builds, and names errors and objects that exist."""

import importlib
import re

import pytest
from support import ROOT

import hybridpp
import hybridpp.errors

NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
API = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.M)
MESSAGES = re.findall(r"^\| `([^`]+)` \| `(\w+)`", (ROOT / "docs/errors.md").read_text(), re.M)


def test_every_page_is_in_the_navigation():
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    outside = re.findall(r'^    "\S+": "(\S+)",$', (ROOT / "docs/site_hook.py").read_text(), re.M)
    assert sorted(re.findall(r"(\S+\.md)$", NAV, re.M)) == sorted(pages | set(outside))


@pytest.mark.parametrize("name", API)
def test_the_reference_names_what_exists(name):
    module, _, last = name.rpartition(".")
    assert hasattr(importlib.import_module(module), last)


def test_every_public_name_is_in_the_reference():
    assert set(hybridpp.__all__) <= {name.rpartition(".")[2] for name in API}


def test_errors_are_quoted_as_the_code_has_them():
    sources = "".join(path.read_text() for path in (ROOT / "hybridpp").rglob("*.py"))
    literals = re.sub(r'"\n\s*f?"', "", sources)
    assert MESSAGES
    assert [message for message, _ in MESSAGES if message not in literals] == []
    assert [error for _, error in MESSAGES if not hasattr(hybridpp.errors, error)] == []
