"""Layers are nested in the declared order, and everything that is put on modules comes off again."""

import copy
import inspect
import re

import pytest
import torch
from torch import nn

from hybridpp.errors import ConfigError
from hybridpp.module_adapter import ORDER, AdapterLayer, ModuleAdapter, replace_forward


def noted(name, log, inner, /, *args, **kwargs):
    log.append(name)
    return inner(*args, **kwargs)


def state(model):
    """Everything that may be put on modules: attributes, and what dicts (of hooks, say) hold."""
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for module in model.modules()
    ]


@pytest.mark.parametrize("layers", [ORDER, tuple(reversed(ORDER))], ids=["inside first", "outside first"])
def test_layers_are_nested_as_declared_not_as_installed(layers):
    module, log = nn.Linear(2, 2), []
    adapter = ModuleAdapter(module)
    for layer in layers:
        adapter.wrap(module, layer, noted, layer, log)
    module(torch.ones(2))
    assert log == list(reversed(ORDER)) == list(adapter.layers_of(module))


def test_another_order_nests_layers_in_another_way():
    module, log = nn.Linear(2, 2), []
    adapter = ModuleAdapter(module, [AdapterLayer.STAGE, AdapterLayer.DTYPE])
    for layer in (AdapterLayer.DTYPE, AdapterLayer.STAGE):
        adapter.wrap(module, layer, noted, layer, log)
    module(torch.ones(2))
    assert log == [AdapterLayer.DTYPE, AdapterLayer.STAGE]


def test_a_wrapped_call_is_around_hooks_and_a_wrapped_forward_inside():
    module, log = nn.Linear(2, 2), []
    module.register_forward_pre_hook(lambda *_: log.append("hook"))
    adapter = ModuleAdapter(module)
    adapter.wrap_call(module, AdapterLayer.DTYPE, noted, "around", log)
    adapter.wrap(module, AdapterLayer.STAGE, noted, "inside", log)
    module(torch.ones(2))
    assert log == ["around", "hook", "inside"]


def test_a_compiled_module_compiles_what_is_inside_its_hooks_only():
    torch._dynamo.reset()
    module, log = nn.Linear(2, 2), []
    module.compile(backend=lambda graph, _: log.append("compiled") or graph.forward)
    adapter = ModuleAdapter(module)
    adapter.wrap(module, AdapterLayer.DTYPE, lambda inner, x: inner(x) * 2)
    adapter.wrap(module, AdapterLayer.STAGE, noted, "not compiled, and not called", log)
    adapter.wrap_call(module, AdapterLayer.STAGE, noted, "around", log)
    x = torch.ones(2)
    torch.testing.assert_close(module(x), 2 * nn.functional.linear(x, module.weight, module.bias))
    assert log == ["around", "compiled"]
    adapter.remove()
    assert "forward" not in vars(module)
    torch.testing.assert_close(module(x), nn.functional.linear(x, module.weight, module.bias))


def test_everything_comes_off_again():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    replace_forward(model[1], torch.sin)
    model[0].known = 1
    before = state(model)
    adapter = ModuleAdapter(model)
    for module in model:
        adapter.wrap(module, AdapterLayer.STAGE, noted, "a", [])
        adapter.wrap_call(module, AdapterLayer.STAGE, noted, "b", [])
        adapter.wrap(module, AdapterLayer.DTYPE, noted, "c", [])
        adapter.hooked(module, "a hook", module.register_forward_hook(lambda *_: None))
    for value in (2, 3):
        adapter.set_attribute(model[0], "known", value, "an attribute")
    adapter.set_attribute(model[0], "unknown", 2, "an attribute")
    weight = model[0].weight
    adapter.set_attribute(weight, "mark", 1, "a mark")
    assert adapter.put[model[0]] == ("stage", "dtype boundary", "a hook", "an attribute")
    assert adapter.put[weight] == ("a mark",)
    adapter.remove()
    assert state(model) == before
    assert not vars(weight)
    assert not adapter.put


def test_one_layer_is_taken_off_alone():
    module, log = nn.Linear(2, 2), []
    adapter = ModuleAdapter(module)
    for layer in (AdapterLayer.RECOMPUTE, AdapterLayer.STAGE, AdapterLayer.DTYPE):
        adapter.wrap(module, layer, noted, layer, log)
    adapter.take_off(AdapterLayer.STAGE)
    module(torch.ones(2))
    assert log == [AdapterLayer.RECOMPUTE, AdapterLayer.DTYPE]


@pytest.mark.parametrize("attribute", ["forward", "known"])
def test_nothing_comes_off_where_the_script_has_set_something_over_it(attribute):
    model = nn.Sequential(nn.Linear(2, 2))
    adapter = ModuleAdapter(model)
    adapter.wrap(model[0], AdapterLayer.STAGE, noted, "a", [])
    adapter.set_attribute(model[0], "known", 1, "an attribute")
    put = getattr(model[0], attribute)
    setattr(model[0], attribute, print)
    text = (
        f"{attribute!r} of module '0' was set after boost, so what boost put there cannot be taken off. Give it the "
        "value that it had after boost."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        adapter.remove()
    setattr(model[0], attribute, put)
    adapter.remove()
    assert not hasattr(model[0], "known")


class Doubled:
    """State of a layer that belongs to a module of the model."""

    def __init__(self, module):
        self.module = module

    def run(self, inner, x):
        return inner(x) * 2 + self.module.bias.sum()


def test_a_deep_copy_runs_on_its_own_modules_and_state():
    model = nn.Sequential(nn.Linear(2, 2))
    adapter = ModuleAdapter(model)
    adapter.wrap(model[0], AdapterLayer.STAGE, Doubled(model[0]).run)
    copied, x = copy.deepcopy(model), torch.ones(2)
    with torch.no_grad():
        copied[0].weight.zero_()
        copied[0].bias.fill_(1.0)
    torch.testing.assert_close(copied(x), torch.full((2,), 4.0))
    adapter.remove()
    torch.testing.assert_close(copied(x), torch.full((2,), 4.0))


def test_the_model_keeps_the_signature_of_its_forward():
    class Model(nn.Module):
        def forward(self, x, y=2):
            return x

    model = Model()
    adapter = ModuleAdapter(model)
    adapter.wrap(model, AdapterLayer.FUNCTION_DTYPES, noted, "a", [])
    adapter.wrap(model, AdapterLayer.MODEL, noted, "a", [])
    assert list(inspect.signature(model.forward).parameters) == ["x", "y"]


def test_a_layer_is_put_on_a_module_once():
    module = nn.Linear(2, 2)
    adapter = ModuleAdapter(module)
    adapter.wrap(module, AdapterLayer.STAGE, noted, "a", [])
    with pytest.raises(AssertionError, match=r"^Linear has the layer <AdapterLayer.STAGE: 'stage'> already"):
        adapter.wrap(module, AdapterLayer.STAGE, noted, "a", [])
