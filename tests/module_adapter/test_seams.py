"""What is to come fits into the declared order: compiled forwards, and parameters gathered while they are used."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridpp.module_adapter import AdapterLayer, CallRouter, ModuleAdapter, order


class Compiled:
    """Compiles the user's forward at the first call."""

    def __init__(self):
        self.compiled = None

    def run(self, inner, /, *args, **kwargs):
        self.compiled = self.compiled or torch.compile(inner, backend="eager", fullgraph=True)
        return self.compiled(*args, **kwargs)


def graph_breaking(inner, /, *args, **kwargs):
    torch._dynamo.graph_break()
    return inner(*args, **kwargs)


def test_a_forward_is_compiled_without_the_layers_around_it():
    torch._dynamo.reset()
    module, x = nn.Linear(2, 2), torch.ones(2)
    adapter = ModuleAdapter(module)
    adapter.wrap(module, AdapterLayer.STAGE, graph_breaking)  # fullgraph=True would refuse it
    adapter.wrap(module, AdapterLayer.COMPILE, Compiled().run)
    torch.testing.assert_close(module(x), nn.functional.linear(x, module.weight, module.bias))


class Gathering:
    """Weights of which there is nothing but while their module runs."""

    def __init__(self, modules):
        self.modules = modules
        self.full = {name: module.weight.detach().clone() for name, module in modules.items()}
        self.num_gathered = 0
        for name in modules:
            self.free(name)

    def free(self, name):
        self.modules[name].weight.data = torch.empty(0)

    def __call__(self, name, forward, args, kwargs):
        self.num_gathered += 1
        self.modules[name].weight.data = self.full[name]
        try:
            return forward(*args, **kwargs)
        finally:
            if not torch.is_grad_enabled():
                self.free(name)


def gathered(model, names):
    adapter = ModuleAdapter(model)
    router = CallRouter(adapter, AdapterLayer.GATHER_PARAMETERS, names)
    return adapter, router, Gathering(dict(router.modules))


def test_parameters_are_gathered_where_hooks_read_them():
    model, seen = nn.Sequential(nn.Linear(2, 3)), []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.shape))
    _, router, gathering = gathered(model, ["0"])
    with torch.no_grad(), router.active(gathering):
        model(torch.ones(2))
    assert seen == [(3, 2)]
    assert model[0].weight.numel() == 0


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_stage_that_does_not_run_a_module_gathers_nothing(is_declared, monkeypatch):
    if not is_declared:
        monkeypatch.setattr(order, "ORDER", (AdapterLayer.STAGE, AdapterLayer.GATHER_PARAMETERS))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    adapter, router, gathering = gathered(model, ["0", "1"])
    stage = CallRouter(adapter, AdapterLayer.STAGE, ["0", "1"])

    def only_the_second(name, forward, args, kwargs):
        return forward(*args, **kwargs) if name == "1" else args[0]

    with torch.no_grad(), router.active(gathering), stage.active(only_the_second):
        model(torch.ones(2))
    assert gathering.num_gathered == (1 if is_declared else 2)


def recomputed(inner, /, *args):
    return checkpoint(partial(inner), *args, use_reentrant=False)


@pytest.mark.parametrize(("recomputes", "is_declared"), [(False, True), (True, True), (True, False)])
def test_parameters_are_gathered_again_where_a_block_is_recomputed(recomputes, is_declared, monkeypatch):
    if not is_declared:
        monkeypatch.setattr(order, "ORDER", (AdapterLayer.RECOMPUTE, AdapterLayer.GATHER_PARAMETERS))
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(2, requires_grad=True)
    adapter, router, gathering = gathered(model, ["0"])
    if recomputes:
        adapter.wrap(model[0], AdapterLayer.RECOMPUTE, recomputed)
    with router.active(gathering):
        model(x).sum().backward()
    assert gathering.num_gathered == (2 if recomputes and is_declared else 1)
    torch.testing.assert_close(x.grad, gathering.full["0"].sum(0))
