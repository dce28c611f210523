"""Every example of docs/cutting.md cuts a model where it says; every page's links lead somewhere."""

import re
from functools import cache

import pytest
import torch
from support import ROOT, image_batch
from test_readme import blocks

import hybridpp
from hybridpp import Booster
from hybridpp.cluster import Loopback

SHARED, CUT, *EXAMPLES = blocks("docs/cutting.md", "python")
PAGES = [str(page.relative_to(ROOT)) for folder in (".", "docs", "plugins") for page in (ROOT / folder).glob("*.md")]
# The last block of the first of two stages.
ENDS = ["vit.layers.1", "vit.layers.1", "vit.layers.0", "vit.layers.2", "layer1", "layer1", None]


@pytest.mark.parametrize(("example", "end"), list(zip(EXAMPLES, ENDS, strict=True)))
def test_the_example_cuts_where_it_says(example, end):
    def boost():
        torch.manual_seed(0)
        namespace = {}
        exec(SHARED + example, namespace)
        sample = {"pixel_values": image_batch(2)["pixel_values"]}
        if "Network()" in example:
            sample = sample["pixel_values"]
        booster = Booster(plugin=namespace["plugin"], device="cpu")
        return {
            name.rpartition(".")[0]
            for name, _ in booster.boost(namespace["model"], sample=sample).model.named_parameters()
        }

    first, last = Loopback(2).run(boost)
    assert first
    assert last
    assert not first & last
    if end is not None:
        found = [part for part in first if part.startswith(end)]
        following = end[:-1] + str(int(end[-1]) + 1)
        assert found
        assert not any(part.startswith(following) for part in first)


def test_a_cut_of_ones_own_model_is_described(capsys):
    exec(SHARED + CUT, {})
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("0 ('head', 'layer1') 260 ")
    assert last.startswith("1 ('layer2', 'fc') 323 ")


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text())
    for link in links:
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@cache
def python_files():
    return [f"/{file.relative_to(ROOT)}" for folder in ROOT.glob("[!.]*/") for file in folder.glob("**/*.py")]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_python_files_that_are_named_exist(page):
    known = python_files()
    # One training step is a walk through files, which a test of its own checks.
    text = re.sub(r"^## One training step.*?(?=^## )", "", (ROOT / page).read_text(), flags=re.M | re.S)
    named = set(re.findall(r"`([\w/]+\.py)\b", text)) - {"my_training.py"}
    assert sorted(name for name in named if not any(file.endswith(f"/{name}") for file in known)) == []


def test_changelog_package_and_project_name_one_version():
    (project,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    newest, *_ = re.findall(r"^## (?!Unreleased$)(\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest == project == hybridpp.__version__


def test_the_command_it_names_exists():
    assert "`hybridpp partition --model FOLDER --pp-size 4`" in (ROOT / "docs/cutting.md").read_text()
