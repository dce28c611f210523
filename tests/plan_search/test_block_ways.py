"""Ways of a block's forward: a branch that was not taken before is another one, another shape is none."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hybridpp
from hybridpp.module_adapter import AdapterLayer, ModuleAdapter
from hybridpp.plan_search import WayRecorder, recorded_ways
from hybridpp.plan_search.block_ways import ways_of_call


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x, number=1, *, is_normed=False, half=None):
        for _ in range(number):
            x = self.first(x)
        if is_normed:
            x = self.norm(x)
        return x if half is None else x.to(half).relu()


def ways(block, *args, **kwargs):
    recorder = WayRecorder(block)
    block(*args, **kwargs)
    recorder.remove()
    return recorder.found


@pytest.mark.parametrize("kwargs", [{"number": 3}, {}])
def test_more_rounds_or_samples_are_the_same_way(kwargs):
    block = Branches()
    assert ways(block, torch.ones(2, 4)) == ways(block, torch.ones(5, 3, 4), **kwargs)


def test_a_branch_is_another_way_and_is_told_with_its_line():
    block, x = Branches(), torch.ones(2, 4)
    more = ways(block, x, is_normed=True)
    (new,) = more.keys() - ways(block, x).keys()
    line = Branches.forward.__code__.co_firstlineno + 4
    assert more[new] == f"layer_norm (test_block_ways.py:{line})"


def test_layers_around_a_modules_own_forward_do_not_hide_it():
    block, x = Branches(), torch.ones(2, 4)
    before = ways(block, x, is_normed=True)
    adapter = ModuleAdapter(block)
    code = {}
    exec(compile("def cast(inner, x): return inner(x.float() * 1)", hybridpp.__file__, "exec"), code)
    adapter.wrap(block.norm, AdapterLayer.DTYPE, code["cast"])
    assert ways(block, x, is_normed=True) == before


def test_casts_are_no_ways():
    block, x = Branches(), torch.ones(2, 4)
    found = ways(block, x, half=torch.bfloat16).keys() - ways(block, x).keys()
    assert len(found) == 1


def test_the_first_call_of_each_block_is_recorded():
    model = nn.Sequential(Branches(), Branches())
    with recorded_ways(model, ["0", "1"]) as found:
        model(torch.ones(2, 4))
        model[0](torch.ones(2, 4), is_normed=True)
    assert found["0"] == found["1"] == ways_of_call(model[0], (torch.ones(2, 4),), {})
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_the_first_calls_of_each_run_of_the_model_are_recorded():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Branches()

        def forward(self, x, is_normed):
            return self.block(self.block(x, is_normed=is_normed), half=torch.float32)

    model, x = Net(), torch.ones(2, 4)
    with recorded_ways(model, ["block"]) as found:
        model(x, False)
        model(x, True)
    assert found["block"] == ways_of_call(model.block, (x,), {"is_normed": True})
    assert not model._forward_pre_hooks


def test_an_error_in_the_block_leaves_no_mode_behind():
    block = Branches()
    recorder = WayRecorder(block)
    with pytest.raises(RuntimeError, match="shapes"):
        block(torch.ones(2, 5))
    recorder.remove()
    recorder.found.clear()
    F.relu(torch.ones(2))
    assert not recorder.found
