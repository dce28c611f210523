"""What docs/migrating.md tells to write exists."""

import inspect
import re

import pytest
from support import ROOT

import hybridpp
from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, Plugin
from hybridpp.schedule import SCHEDULES
from hybridpp.trainer import Trainer, hooks

ROWS = [
    line.strip("|").split(" | ")[1]
    for line in (ROOT / "docs/migrating.md").read_text().splitlines()
    if line.startswith("| ") and " | " in line
]
CODE = [code for row in ROWS for code in re.findall(r"`([^`]+)`", row)]
OWNERS = {
    "booster": Booster,
    "plugin": HybridParallelPlugin,
    "trainer": Trainer,
    "hooks": hooks,
    "DistCoordinator()": DistCoordinator,
}


def keywords_of(owner):
    return inspect.signature(owner).parameters


@pytest.mark.parametrize(
    "name", sorted({name for code in CODE for name in re.findall(r"\b(booster|plugin|hooks)\.(?!plugin)(\w+)", code)})
)
def test_every_method_exists(name):
    owner, method = name
    assert hasattr(OWNERS[owner], method)


@pytest.mark.parametrize(
    "name", sorted({name for code in CODE for name in re.findall(r"\b([A-Z]\w+)\b(?=\(|Plugin)", code)})
)
def test_every_class_exists(name):
    known = {**vars(hooks), **{each: getattr(hybridpp, each) for each in hybridpp.__all__}, "Trainer": Trainer}
    assert name in known or name in ("SGD", "SplitPoint")


def test_every_setting_of_the_plugin_exists():
    calls = [re.search(r"HybridParallelPlugin\((.*?)\)", code) for code in CODE]
    names = {name for call in calls if call for name in re.findall(r"(\w+)=", call[1])}
    assert names <= set(keywords_of(HybridParallelPlugin))
    assert len(names) > 4


def test_every_schedule_and_plugin_exists():
    schedules = {name for code in CODE for name in re.findall(r'schedule="([\w-]+)"', code)}
    assert schedules | {"1f1b", "interleaved-zb", "zb-v"} <= set(SCHEDULES)
    for name in {name for code in CODE for name in re.findall(r'plugin="(\w+)"', code)}:
        assert isinstance(Plugin.from_name(name), Plugin)
    for option in ("return_losses", "return_outputs", "outputs_on"):
        assert option in keywords_of(Booster.execute_pipeline)
