"""The walk of a training step in ARCHITECTURE.md names the files that a step enters."""

import re
from functools import cache

import pytest
from step_trace import Entered, entered_by_a_step
from support import ROOT

SPINE = (
    "hybridpp/booster.py",
    "plugins/hybridpp_plugins/engine.py",
    "hybridpp/pipeline/executor.py",
    "hybridpp/partition/staged_model.py",
    "hybridpp/pipeline/boundary.py",
)
MAX_FILES, MAX_SPINE_LINES = 20, 1_200
ADVICE = "correct the section One training step of ARCHITECTURE.md, or keep the step from entering another file"


@cache
def stages() -> list[Entered]:
    return entered_by_a_step()


def both_stages() -> Entered:
    first, last = stages()
    return first | last


def part(title: str) -> str:
    """A subsection of "One training step"."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    section = page.split("## One training step\n")[1].split("\n## ")[0]
    return section.split(f"### {title}\n")[1].split("\n### ")[0]


def named(text: str, *folders: str) -> list[str]:
    """The files that a text names by their last part, in order, each once; in ``folders`` where several have it."""
    paths = [path.relative_to(ROOT) for top in ("hybridpp", "plugins") for path in (ROOT / top).rglob("*.py")]
    found = {}
    for name in re.findall(r"`([\w/]+\.py)`", text):
        fits = [str(path) for path in paths if f"/{path}".endswith(f"/{name}") and str(path).startswith(folders)]
        assert len(fits) == 1, f"{name} is {fits or 'no file'}"
        found[fits[0]] = None
    return list(found)


def test_the_walk_names_the_files_of_the_step_in_order():
    _, last = stages()
    walk = named(part("The files of the step"), "hybridpp/", "plugins/")
    assert set(walk) == set(both_stages().step), ADVICE
    assert walk == list(last.step), ADVICE


def test_the_walk_names_the_files_inside_the_models_call():
    below = set(named(part("Inside the model's call"), "hybridpp/")) - set(both_stages().step)
    assert below == set(both_stages().model), ADVICE


def test_the_walk_names_the_files_that_carry_messages():
    carriers = set(named(part("Messages and generators"), "hybridpp/cluster/", "hybridpp/nn/"))
    # That of jobs with processes, in place of the in-process ranks here.
    assert carriers - {"hybridpp/cluster/torch_group.py"} == set(both_stages().messages), ADVICE


def test_a_clean_step_does_not_enter_what_the_page_says():
    entered = both_stages()
    split = {"hybridpp/pipeline/weight_gradients.py"}  # the layers' wrapper, which does nothing
    away = set(named(part("What a clean step does not enter"), "hybridpp/", "plugins/")) - split
    assert not away & entered.functions.keys()


def test_a_step_enters_at_most_20_files():
    assert len(both_stages().step) <= MAX_FILES, ADVICE


def test_the_spine_is_5_files_and_at_most_1200_lines():
    entered = both_stages()
    assert set(SPINE) <= set(entered.step)
    assert sum(entered.num_lines(name) for name in SPINE) <= MAX_SPINE_LINES


@pytest.mark.parametrize(("setting", "more"), [("precision", "manual_clipping.py"), ("schedule", "deferred_wgrad.py")])
def test_the_trace_sees_what_another_step_enters(setting, more):
    value = {"precision": "fp32", "schedule": "zb-h1"}[setting]
    first, last = entered_by_a_step(**{setting: value})
    assert any(name.endswith(more) for name in (first | last).functions)
