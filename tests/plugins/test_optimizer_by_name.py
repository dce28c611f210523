"""Optimizers of every kind by the names of parameters: settings, state, and what cannot be divided."""

import re

import pytest
import torch
from hybridpp_plugins.optimizer_by_name import merged_groups
from run_checkpoints import on_layout
from support import assert_same
from torch import nn

from hybridpp import Booster, HybridAdam, HybridParallelPlugin
from hybridpp.errors import CheckpointError, ConfigError


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


class FirstThenMore(torch.optim.Optimizer):
    """Keeps numbers, a tensor of another shape, and nothing for the biases."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "table": {"a": (1, 2.5)}})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])
                if p.dim() > 1:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["rows"] = state.get("rows", torch.zeros(len(p))) + p.grad.sum(1)
                    state["scale"] = torch.tensor(0.5)
                    state["flags"] = (True, None)


def trained(make_optimizer, path=None, resume=None, num_steps=2):
    booster, model = Booster(plugin=HybridParallelPlugin()), network(0 if resume is None else 5)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model.parameters()))
    if resume is not None:
        booster.resume(resume)
    for _ in range(num_steps):
        optimizer.backward(model(torch.ones(2, 3)).square().sum())
        optimizer.step()
    if path is not None:
        booster.save(path, step=1)
    state = {
        f"{n} {key}": torch.as_tensor(value)
        for n, entry in enumerate(optimizer.unwrap().state.values())
        for key, value in entry.items()
        if key != "flags"
    }
    return {**dict(model.state_dict()), **state}, optimizer


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "no state": lambda p: torch.optim.SGD(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "hybrid adam": lambda p: HybridAdam(p, lr=0.1),
    "lr in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "named": lambda p: torch.optim.NAdam([("a", next(it := iter(p))), *((f"b{n}", q) for n, q in enumerate(it))]),
    "own": FirstThenMore,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_bit_for_bit(tmp_path, name):
    trained(OPTIMIZERS[name], tmp_path)
    expected, _ = trained(OPTIMIZERS[name], num_steps=4)
    actual, optimizer = trained(OPTIMIZERS[name], resume=tmp_path)
    assert_same(actual, expected)
    if name == "own":
        assert optimizer.param_groups[0]["table"] == {"a": (1, 2.5)}
        (first, *_) = optimizer.unwrap().state.values()
        assert (first["count"], first["flags"]) == (4, (True, None))
    if name == "lr in a tensor":
        assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.1))


def test_settings_are_those_of_the_checkpoint_and_kernels_those_of_the_run(tmp_path):
    trained(lambda p: HybridAdam(p, lr=0.1, weight_decay=0.3), tmp_path)
    _, optimizer = trained(lambda p: HybridAdam(p, lr=7.0, foreach=True, fused=False), resume=tmp_path)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["foreach"], group["fused"]) == (0.1, 0.3, True, False)


def test_a_setting_that_is_an_object_is_refused_by_name(tmp_path):
    def with_object(parameters):
        optimizer = FirstThenMore(parameters)
        optimizer.param_groups[0]["table"] = network()
        return optimizer

    text = "optimizer.param_groups[0]['table'] is a Sequential, which a checkpoint cannot hold"
    with pytest.raises(ConfigError, match=re.escape(text)):
        trained(with_object, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_state_of_complete_parameters_is_not_loaded_into_pieces(tmp_path):
    """Where the optimizer lets replicas divide a parameter for which a checkpoint holds rows."""

    def add_rows(run):
        for tensor in run.optimizer.param_groups[0]["params"]:
            run.optimizer.unwrap().state[tensor]["rows"] = torch.zeros(len(tensor) + 1)

    def first(make):
        run = make()
        run.steps([0])
        add_rows(run)
        run.booster.save(tmp_path, step=1)

    def second(make):
        run = make()
        with pytest.raises(CheckpointError, match=r"the state 'rows' of .* belongs to the complete parameter"):
            run.booster.resume(tmp_path)
        run.steps([0])
        add_rows(run)
        with pytest.raises(CheckpointError, match=r"AdamW keeps 'rows' of shape .* of which this rank updates a part"):
            run.booster.save(tmp_path, step=2)

    on_layout(first)
    on_layout(second, tp_size=2)


def test_groups_of_all_ranks_are_merged_in_order():
    assert merged_groups([[["a"], []], [["b", "a"], ["c"]]]) == [["a", "b"], ["c"]]
    assert merged_groups([]) == []
