"""What every rank must boost alike: settings, optimizer, groups, schedule, configuration, criterion and buffers."""

import inspect
from functools import partial

import pytest
import torch
from hybridpp_plugins.set_alike import described, differences
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError


class Net(nn.Module):
    def __init__(self, p=0.0, device="cpu"):
        super().__init__()
        self.device = torch.device(device)  # a host's own
        self.body, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(p)

    def forward(self, x):
        return self.drop(self.norm(self.body(x)))


def boosted_by(rank, *, settings=None, optimizer=torch.optim.AdamW, schedule=None, change=None, criterion=None, **net):
    torch.manual_seed(0)
    model = Net(**net)
    if change is not None:
        change(model)
    optimizer = optimizer(model.parameters(), lr=0.1)
    plugin = HybridParallelPlugin(**(settings or {}))
    Booster(plugin=plugin, device="cpu").boost(
        model, optimizer, criterion, lr_scheduler=None if schedule is None else schedule(optimizer)
    )


def refusal(first, second):
    """The error of two ranks that boost with other arguments."""
    with pytest.raises(ConfigError) as caught:
        Loopback(2).run(lambda: boosted_by(rank := current_world().rank, **(first, second)[rank]))
    return str(caught.value)


def schedule(step_size):
    return partial(torch.optim.lr_scheduler.StepLR, step_size=step_size)


def freeze(model):
    model.body.weight.requires_grad_(False)


def fill(model):
    model.norm.running_mean.fill_(1.0)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"settings": {"max_norm": 1.0}}, {}, "max_norm is 1 on rank 0, 0 on rank 1. Give HybridParallelPlugin the"),
        ({}, {"optimizer": torch.optim.SGD}, "the optimizer is 'AdamW' on rank 0, 'SGD' on rank 1; "),
        (
            {"optimizer": partial(torch.optim.AdamW, betas=(0.5, 0.9))},
            {},
            "betas of parameter group 0 is [0.5, 0.9] on rank 0, [0.9, 0.999] on rank 1. Make the optimizer",
        ),
        (
            {"optimizer": lambda found, lr: torch.optim.AdamW([{"params": [one]} for one in found], lr=lr)},
            {},
            "the number of parameter groups is 4 on rank 0, 1 on rank 1; ",
        ),
        ({"schedule": schedule(1)}, {"schedule": schedule(2)}, "step_size of the LR schedule is 1 on rank 0, 2 on"),
        ({"p": 0.5}, {"p": 0.1}, "p of drop is 0.5 on rank 0, 0.1 on rank 1. Make the model"),
        ({"change": nn.Module.eval}, {}, "training of the model is False on rank 0, True on rank 1; "),
        ({}, {"change": freeze}, "weight.requires_grad of body is True on rank 0, False on rank 1. Make the model"),
        ({}, {"change": fill}, "value of norm.running_mean is (4,) torch.float32, first 0, CRC-32 "),
        (
            {"criterion": nn.L1Loss()},
            {"criterion": nn.MSELoss()},
            "class of the criterion is torch.nn.modules.loss.L1Loss",
        ),
    ],
)
def test_what_differs_between_ranks_is_told_by_name_with_values_and_ranks(first, second, told):
    assert told in refusal(first, second)


def test_every_setting_of_the_plugin_is_compared(monkeypatch):
    compared = {}
    monkeypatch.setattr(
        "hybridpp_plugins.hybrid_parallel.check_alike",
        lambda control, call, sections: compared.update(sections[0].facts[""]),
    )
    HybridParallelPlugin()
    keywords = inspect.signature(HybridParallelPlugin).parameters
    assert set(keywords) - {"other"} <= set(compared)


def test_devices_paths_and_criteria_of_some_ranks_may_differ(tmp_path):
    for host in "ab":
        (tmp_path / host).mkdir()
        (tmp_path / host / "schedule.csv").write_text("0F0,0B0\n")

    def run():
        rank = current_world().rank
        file = tmp_path / "ab"[rank] / "schedule.csv"
        settings = {"schedule": file, "num_microbatches": 1}
        boosted_by(rank, settings=settings, device=("cpu", "meta")[rank], criterion=(None, nn.MSELoss())[rank])

    Loopback(2).run(run)


def test_descriptions_are_equal_for_equal_values_and_tell_functions_apart():
    assert described(1.0) == described(1)
    assert described({"b": {2, 1}, "a": None}) == described({"a": None, "b": {1, 2}})
    assert described(lambda x: x + 1) != described(lambda x: x + 2)
    assert described(torch.tanh) != described(torch.relu)
    assert described(object()) == described(object())


def test_what_a_rank_lacks_is_told_unless_it_is_optional():
    rows = [{"": {"a": "1"}}, {}, {"": {"a": "1"}}]
    assert differences(rows) == ["a is 1 on ranks 0, 2, missing on rank 1"]
    assert differences(rows, is_optional=True) == []


def test_a_criterion_may_look_at_its_rank():
    def run():
        prints = current_world().rank == 0
        boosted_by(0, criterion=lambda outputs, targets: print(outputs) if prints else (outputs - targets).sum())

    Loopback(2).run(run)
