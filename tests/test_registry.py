import re
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
import torch
from torch import nn

from hybridpp import Booster, HybridParallelPlugin, registry
from hybridpp.errors import ConfigError
from hybridpp.plugin import Boosted, Plugin
from hybridpp.registry import plugin_class, plugin_names


def refused(text):
    return pytest.raises(ConfigError, match=f"^{re.escape(text)}$")


class Theirs(Plugin):
    """A third party's plugin."""


class NoPlugin:
    """Not one."""


@pytest.fixture
def entry_points(monkeypatch):
    """Sets what the installed packages declare: name -> ``module:attribute``."""

    def declare(**values):
        found = [EntryPoint(name, value, registry.GROUP) for name, value in values.items()]
        monkeypatch.setattr(
            registry,
            "entry_points",
            lambda group, name=None: [entry for entry in found if name in (None, entry.name)],
        )

    package = ModuleType("their_package")
    vars(package).update(Theirs=Theirs, NoPlugin=NoPlugin, an_instance=Theirs())
    monkeypatch.setitem(sys.modules, "their_package", package)
    declare()
    return declare


def test_our_plugin_is_found_whether_or_not_it_is_installed(entry_points):
    assert plugin_class("hybrid_parallel") is HybridParallelPlugin
    entry_points(hybrid_parallel="hybridpp_plugins:HybridParallelPlugin")
    assert plugin_class("hybrid_parallel") is HybridParallelPlugin
    assert plugin_names() == ["hybrid_parallel"]


def test_a_third_party_brings_a_plugin_by_an_entry_point(entry_points):
    entry_points(theirs="their_package:Theirs")
    assert plugin_class("theirs") is Theirs
    assert plugin_names() == ["hybrid_parallel", "theirs"]


def test_an_unknown_plugin_lists_the_valid_ones(entry_points):
    entry_points(theirs="their_package:Theirs")
    text = "plugin is one of hybrid_parallel, theirs: got 'hybrid'. Install the package that brings it."
    with refused(text):
        plugin_class("hybrid")
    with refused(text):
        Booster(plugin="hybrid")


@pytest.mark.parametrize("attribute", ["NoPlugin", "an_instance"])
def test_an_entry_point_that_is_no_plugin_class(entry_points, attribute):
    entry_points(theirs=f"their_package:{attribute}")
    with pytest.raises(
        ConfigError, match=r"^plugin 'theirs' must be a subclass of hybridpp.plugin.Plugin: got <.*>\.$"
    ):
        plugin_class("theirs")


@pytest.mark.parametrize("plugin", [NoPlugin(), Theirs, 3])
def test_a_booster_takes_plugins_only(plugin):
    name = type(plugin).__name__
    with refused(f"plugin is a Plugin, the name of one, or None: got {name}. Pass HybridParallelPlugin(...)."):
        Booster(plugin=plugin)


@pytest.mark.parametrize("plugin", [None, "hybrid_parallel"])
def test_a_booster_refuses_an_unknown_precision(plugin):
    with refused("precision is one of fp32, fp16, bf16: got 'fp8'."):
        Booster(plugin=plugin, mixed_precision="fp8")


def test_a_booster_refuses_a_precision_beside_a_plugin():
    with refused(
        "precision belongs to the plugin: got mixed_precision='bf16' beside Theirs. Pass precision='bf16' to it."
    ):
        Booster(plugin=Theirs(), mixed_precision="bf16")


@pytest.mark.parametrize(("mixed_precision", "precision"), [(None, "fp32"), ("bf16", "bf16")])
@pytest.mark.parametrize("plugin", [None, "hybrid_parallel"])
def test_without_a_plugin_object_a_booster_makes_one(plugin, mixed_precision, precision):
    made = Booster(plugin=plugin, mixed_precision=mixed_precision).plugin
    assert isinstance(made, HybridParallelPlugin)
    assert (made.precision, made.pp_size, made.dp_size) == (precision, 1, 1)


def test_a_plugin_that_overrides_nothing_changes_nothing():
    booster = Booster(plugin=Theirs(), device="cpu")
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    weight, forward = model.weight.detach().clone(), model.forward
    parts = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0), criterion=print, dataloader=None)
    assert parts == Boosted(model, parts.optimizer, print)
    assert isinstance(parts.optimizer, torch.optim.SGD)
    assert model.forward == forward
    with booster.no_sync(model, parts.optimizer):
        booster.backward(parts.model(torch.ones(1, 2)).sum(), parts.optimizer)
    parts.optimizer.step()
    assert torch.equal(model.weight, weight - 1)
    loader = booster.plugin.prepare_dataloader(list(range(5)), 2, drop_last=True)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_what_a_plugin_cannot_do_is_said_by_name(tmp_path):
    booster = Booster(plugin=Theirs())
    with refused("Theirs runs no pipeline. Use HybridParallelPlugin; it takes pp_size=1 too."):
        booster.execute_pipeline(iter([]), nn.Linear(1, 1), None)
    text = "Theirs cannot save models. Use torch.save on the model's state."
    with refused(text):
        booster.save_model(nn.Linear(1, 1), tmp_path)
    with refused(text):
        booster.load_model(nn.Linear(1, 1), tmp_path)
