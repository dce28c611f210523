"""Several optimizers as one: the steps of each, in every layout, saved and resumed."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from support import assert_near, assert_same, boosted
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import CheckpointError, ConfigError
from hybridpp.optim import JoinedOptimizer


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def optimizers(parameters):
    """One for matrices, one for the rest; matrices of two kinds in two groups."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.dim() == 2]
    groups = [{"params": matrices[:1], "lr": 0.05}, {"params": matrices[1:]}]
    return [torch.optim.SGD(groups, lr=0.1, momentum=0.9), torch.optim.AdamW(p for p in parameters if p.dim() == 1)]


BATCH = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0]))


def by_themselves(num_steps):
    one = model()
    parts = optimizers(one.parameters())
    for _ in range(num_steps):
        nn.functional.cross_entropy(one(BATCH[0]), BATCH[1]).backward()
        for part in parts:
            part.step()
            part.zero_grad()
    return dict(one.named_parameters())


def job(**settings):
    one = model()
    booster = Booster(plugin=HybridParallelPlugin(num_microbatches=2, **settings), device="cpu")
    return booster, *booster.boost(one, optimizers(one.parameters()), nn.CrossEntropyLoss(), sample=BATCH)[:3]


def step(booster, one, optimizer, criterion):
    rows = 4 // booster.plugin.dp_size
    first = rows * booster.plugin.layout.here.dp
    batch = tuple(tensor[first : first + rows] for tensor in BATCH)
    booster.execute_pipeline(iter([batch]), one, criterion, optimizer)
    optimizer.step()


@pytest.mark.parametrize(
    ("layout", "num_ranks"), [({}, 1), ({"pp_size": 2, "zero_stage": 1}, 4), ({"zero_stage": 3}, 2)], ids=str
)
def test_each_updates_its_parameters_in_every_layout_and_is_resumed(layout, num_ranks, tmp_path):
    def run():
        booster, *parts = job(**layout)
        step(booster, *parts)
        booster.save(tmp_path / "run", step=1)
        step(booster, *parts)
        booster.save_model(parts[0], tmp_path / "straight.safetensors")
        booster, *parts = job(**layout)
        assert booster.resume(tmp_path / "run").step == 1
        step(booster, *parts)
        booster.save_model(parts[0], tmp_path / "resumed.safetensors")

    Loopback(num_ranks).run(run)
    straight, resumed = (load_file(tmp_path / f"{name}.safetensors") for name in ("straight", "resumed"))
    assert_near(straight, by_themselves(2), 1e-6)
    assert_same(resumed, straight)


def test_their_own_state_dict_and_other_optimizers_are_told_apart(tmp_path):
    booster, *parts = job()
    step(booster, *parts)
    saved = copy.deepcopy(parts[1].state_dict())
    step(booster, *parts)
    booster.save(tmp_path, step=2)
    expected = {name: p.detach().clone() for name, p in parts[0].named_parameters()}
    booster, *parts = job()
    step(booster, *parts)
    parts[1].load_state_dict(saved)
    step(booster, *parts)
    assert_same(dict(parts[0].named_parameters()), expected)
    booster, *_ = boosted(model(), lambda p: torch.optim.AdamW(p), BATCH)
    with pytest.raises(CheckpointError, match=r"the state of SGD \+ AdamW cannot be loaded into AdamW"):
        booster.resume(tmp_path)


def test_schedules_of_one_and_of_all_move_the_rates():
    one = model()
    parts = optimizers(one.parameters())
    own = LambdaLR(parts[1], lambda step: 0.5)
    joined = JoinedOptimizer(parts)
    every = LambdaLR(joined, lambda step: 1.0 if step == 0 else 0.1)
    for parameter in one.parameters():
        parameter.grad = torch.ones_like(parameter)
    joined.step()
    own.step()
    assert [group["lr"] for group in joined.param_groups] == pytest.approx([0.05, 0.1, 0.0005])
    every.step()
    assert [group["lr"] for group in joined.param_groups] == pytest.approx([0.005, 0.01, 0.0001])
    assert joined.step(lambda: 3) == 3


def test_a_parameter_of_two_optimizers_is_refused():
    one = model()
    twice = [torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.AdamW([one[2].weight])]
    with pytest.raises(
        ConfigError, match=r"each parameter belongs to one optimizer: AdamW holds a parameter of shape \(8, 8\)"
    ):
        Booster(device="cpu").boost(one, twice)
    with pytest.raises(ConfigError, match=r"several optimizers are a list of torch\.optim optimizers: got int"):
        Booster(device="cpu").boost(one, [twice[0], 3])
    with pytest.raises(ConfigError, match="got an empty list"):
        JoinedOptimizer([])
