import re
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
import torch
from torch import nn

from hybridpp import Booster, HybridParallelPlugin, registry
from hybridpp.errors import ConfigError
from hybridpp.plugin import Boosted, Plugin, plugin_class
from hybridpp.registry import plugin_names

OURS = ["gemini", "hybrid_parallel", "low_level_zero", "torch_ddp", "torch_fsdp"]


def refused(text):
    return pytest.raises(ConfigError, match=f"^{re.escape(text)}$")


class Theirs(Plugin):
    """A third party's plugin."""


class Configurable(Plugin):
    """A third party's plugin with settings of its own."""

    def __init__(self, stage: int, precision: str = "bf16"):
        self.stage, self.precision = stage, precision


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
    vars(package).update(Theirs=Theirs, Configurable=Configurable, NoPlugin=NoPlugin, an_instance=Theirs())
    monkeypatch.setitem(sys.modules, "their_package", package)
    declare()
    return declare


def test_our_plugin_is_found_whether_or_not_it_is_installed(entry_points):
    assert plugin_class("hybrid_parallel") is HybridParallelPlugin
    entry_points(hybrid_parallel="hybridpp_plugins:HybridParallelPlugin")
    assert plugin_class("hybrid_parallel") is HybridParallelPlugin
    assert plugin_names() == OURS


def test_a_third_party_brings_a_plugin_by_an_entry_point(entry_points):
    entry_points(theirs="their_package:Theirs")
    assert plugin_class("theirs") is Theirs
    assert plugin_names() == sorted([*OURS, "theirs"])


def test_an_unknown_plugin_lists_the_valid_ones(entry_points):
    entry_points(theirs="their_package:Theirs")
    known = ", ".join(sorted([*OURS, "theirs"]))
    text = f"plugin is one of {known}: got 'hybrid'. Install the package that brings it."
    with refused(text):
        plugin_class("hybrid")
    with refused(text):
        Booster(plugin="hybrid")
    with refused(text):
        Plugin.from_name("hybrid", tp_size=2)


def test_an_installed_distribution_is_found_and_its_preset_trains(tmp_path, monkeypatch):
    metadata = tmp_path / "scratch_plugins-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: scratch-plugins\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{registry.GROUP}]\nscratch = scratch_plugins:Scratch\n")
    (tmp_path / "scratch_plugins.py").write_text(
        "from hybridpp import HybridParallelPlugin\n\n\n"
        "class Scratch(HybridParallelPlugin):\n"
        "    def __init__(self, level=1, precision='fp32'):\n"
        "        super().__init__(zero_stage=level, precision=precision)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "scratch" in plugin_names()
    booster = Booster(plugin="scratch", plugin_kwargs={"level": 2}, mixed_precision="bf16", device="cpu")
    plugin = booster.plugin
    assert (type(plugin).__module__, plugin.zero_stage, plugin.precision) == ("scratch_plugins", 2, "bf16")
    model = nn.Linear(2, 1)
    weight = model.weight.detach().clone()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    booster.execute_pipeline(iter([torch.ones(2, 2)]), model, lambda outputs, inputs: outputs.mean(), optimizer)
    optimizer.step()
    assert torch.equal(model.weight, (weight - 1).bfloat16())


def test_a_plugin_without_arguments_is_made_by_name(entry_points):
    entry_points(theirs="their_package:Theirs")
    assert type(Plugin.from_name("theirs")) is Theirs
    assert type(Booster(plugin="theirs").plugin) is Theirs


def test_a_plugin_made_by_name_is_given_the_settings(entry_points):
    entry_points(configurable="their_package:Configurable")
    made = Plugin.from_name("configurable", stage=2)
    assert (type(made), made.stage, made.precision) == (Configurable, 2, "bf16")
    ours = Plugin.from_name("hybrid_parallel", num_microbatches=4, precision="bf16")
    assert isinstance(ours, HybridParallelPlugin)
    assert (ours.precision, ours.settings.pipeline.num_microbatches) == ("bf16", 4)


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("theirs", {"tp_size": 1}, "got an unexpected keyword argument 'tp_size'. It takes: none."),
        ("configurable", {"stages": 1}, "missing a required argument: 'stage'. It takes: stage, precision."),
        ("configurable", {"stage": 1, "zero": 1}, "got an unexpected keyword argument 'zero'. It takes: stage, prec"),
    ],
)
def test_settings_that_a_plugin_does_not_take_are_refused(entry_points, name, settings, text):
    entry_points(theirs="their_package:Theirs", configurable="their_package:Configurable")
    with pytest.raises(ConfigError, match=f"^plugin '{name}' cannot be made of these settings: {re.escape(text)}"):
        Plugin.from_name(name, **settings)


def test_a_booster_gives_a_precision_only_to_a_plugin_that_takes_one(entry_points):
    entry_points(theirs="their_package:Theirs")
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'precision'\. It takes: none\.$"):
        Booster(plugin="theirs", mixed_precision="bf16")


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
    with refused(f"plugin must be a Plugin, a plugin's name, or None: got {name}. Pass HybridParallelPlugin(...)."):
        Booster(plugin=plugin)


@pytest.mark.parametrize("plugin", [None, "hybrid_parallel"])
def test_a_booster_refuses_an_unknown_precision(plugin):
    with refused("precision must be one of fp32, fp16, bf16: got 'fp8'."):
        Booster(plugin=plugin, mixed_precision="fp8")


def test_a_booster_refuses_a_precision_beside_a_plugin():
    with refused(
        "precision is a setting of the plugin: got mixed_precision='bf16' and a Theirs. Pass precision='bf16' to the "
        "plugin."
    ):
        Booster(plugin=Theirs(), mixed_precision="bf16")


@pytest.mark.parametrize(("mixed_precision", "precision"), [(None, "fp32"), ("bf16", "bf16")])
@pytest.mark.parametrize("plugin", [None, "hybrid_parallel"])
def test_without_a_plugin_object_a_booster_makes_one(plugin, mixed_precision, precision):
    made = Booster(plugin=plugin, mixed_precision=mixed_precision).plugin
    assert isinstance(made, HybridParallelPlugin)
    assert (made.precision, made.pp_size, made.dp_size) == (precision, 1, 1)


def test_settings_go_to_a_plugin_that_is_given_by_name(entry_points):
    entry_points(configurable="their_package:Configurable")
    made = Booster(plugin="configurable", plugin_kwargs={"stage": 2}, mixed_precision="fp16").plugin
    assert (type(made), made.stage, made.precision) == (Configurable, 2, "fp16")
    ours = Booster(plugin_kwargs={"max_norm": 1.0, "precision": "bf16"}, mixed_precision="bf16").plugin
    assert (ours.max_norm, ours.precision) == (1.0, "bf16")
    with refused(
        "mixed_precision and precision are one setting: got mixed_precision='fp16' and precision='bf16'. Give one of "
        "them."
    ):
        Booster(plugin="gemini", plugin_kwargs={"precision": "bf16"}, mixed_precision="fp16")
    with refused(
        "plugin_kwargs are settings of a plugin that is given by name: got {'stage': 2} and a Theirs. Pass them to the "
        "plugin."
    ):
        Booster(plugin=Theirs(), plugin_kwargs={"stage": 2})


def test_what_a_plugin_says_of_itself():
    def said(plugin):
        return (
            *(plugin.support_no_sync(), plugin.support_lora(), plugin.control_precision()),
            *(plugin.supported_precisions(), plugin.supported_devices()),
        )

    assert said(Theirs()) == (True, True, True, ["fp32"], ["cpu", "cuda"])
    assert said(HybridParallelPlugin()) == (True, True, True, ["fp32", "fp16", "bf16"], ["cpu", "cuda"])


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
    with refused("Theirs runs no pipeline. Use HybridParallelPlugin, with pp_size=1 or more."):
        booster.execute_pipeline(iter([]), nn.Linear(1, 1), None)
    text = "Theirs cannot save models. Use torch.save on the model's state."
    with refused(text):
        booster.save_model(nn.Linear(1, 1), tmp_path)
    with refused(text):
        booster.load_model(nn.Linear(1, 1), tmp_path)
