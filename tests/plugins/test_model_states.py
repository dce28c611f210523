"""``state_dict`` and ``load_state_dict`` of models of which a rank has a stage, shards, or no weights between uses."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from support import boosted
from torch import nn

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

X, Y = torch.linspace(-1, 1, 32).sin().view(4, 8), torch.zeros(4, 4)
LAYOUTS = [{"tp_size": 2}, {"pp_size": 2}, {"pp_size": 2, "schedule": "zb-v"}, {"zero_stage": 3}]


class Network(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        blocks = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.same = self.head

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def on_two_ranks(settings, script):
    """What each rank returns from ``script(booster, model, step)``."""

    def run():
        booster, model, optimizer = boosted(
            Network(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), X, num_microbatches=1, **settings
        )

        def step():
            booster.execute_pipeline(iter([(X, Y)]), model, nn.functional.mse_loss, optimizer)
            optimizer.step()

        return script(booster, model, step)

    return Loopback(2).run(run)


def inside(booster, model, settings):
    return booster.unsharded(model) if settings.get("zero_stage") == 3 else nullcontext()


def without(state, start):
    return {name: value for name, value in state.items() if not name.startswith(start)}


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_a_state_of_the_complete_model_is_loaded_on_every_rank(settings, tmp_path):
    def script(booster, model, step):
        step()
        with inside(booster, model, settings):
            assert not any(model.load_state_dict(Network(seed=1).state_dict()))
            for number, block in enumerate(model.blocks[:2]):
                block.load_state_dict(Network(seed=2).blocks[number].state_dict())
        booster.save_model(model, tmp_path / "model.safetensors")
        step()

    on_two_ranks(settings, script)
    found, expected = load_file(tmp_path / "model.safetensors"), Network(seed=1)
    expected.blocks[:2].load_state_dict(Network(seed=2).blocks[:2].state_dict())
    for name, parameter in expected.named_parameters():
        assert torch.equal(found[name], parameter), name


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_own_states_are_loaded_and_wrong_ones_refused_as_in_one_process(settings):
    def script(booster, model, step):
        whole = Network(seed=1).state_dict()
        with inside(booster, model, settings):
            own = {name: value * 0.5 for name, value in model.state_dict().items()}
            model.load_state_dict(own)
            for name, value in model.state_dict().items():
                assert torch.equal(value, own[name]), name
            for state, names in ({**whole, "odd": X}, "Unexpected.*odd"), (without(whole, "blocks.0"), "Missing"):
                with pytest.raises(RuntimeError, match=names):
                    model.load_state_dict(state)
            told = model.load_state_dict(without(whole, "blocks.3"), strict=False)
            assert told.missing_keys == [name for name in whole if name.startswith("blocks.3")]

    on_two_ranks(settings, script)


@pytest.mark.parametrize("settings", [{"tp_size": 2}, {"zero_stage": 3}], ids=str)
def test_copies_load_and_return_states(settings):
    def script(booster, model, step):
        with inside(booster, model, settings):
            copied = copy.deepcopy(model)
        copied.load_state_dict(Network(seed=1).state_dict())
        for name, value in copied.state_dict().items():
            assert value.numel() < Network().state_dict()[name].numel() or torch.equal(
                value, Network(seed=1).state_dict()[name]
            )

    on_two_ranks(settings, script)


@pytest.mark.parametrize("part", ["", "head"])
def test_states_are_refused_where_weights_are_not_there(part):
    def script(booster, model, step):
        step()
        module, whole = model.get_submodule(part), Network().get_submodule(part)
        with pytest.raises(ConfigError, match=re.escape("Use `with booster.unsharded(model):` on every rank around")):
            module.load_state_dict(whole.state_dict())
        with pytest.raises(ConfigError, match=r"^state_dict needs all weights"):
            module.state_dict()
        step()

    on_two_ranks({"zero_stage": 3}, script)
