"""Some of the cases of ``make fuzz``, and single ones that it found."""

import re

import numpy
import pytest
import torch
from config.fuzz_settings import case, run, told
from hybridpp_plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin

from hybridpp import Booster
from hybridpp.config import LossScaleConfig, ParallelConfig, ZeroConfig
from hybridpp.errors import ConfigError, DataError

NUM_CASES = 150


def test_settings_are_accepted_or_refused_by_name():
    found = {number: run(case(0, number))[0] for number in range(NUM_CASES)}
    wrong = {told(case(0, number)): what for number, what in found.items() if what not in ("accepted", "refused")}
    assert wrong == {}
    assert {"accepted", "refused"} == set(found.values())


@pytest.mark.parametrize("given", [numpy.array([1, 2]), torch.tensor([1, 2]), [torch.tensor(1)], {"a": numpy.ones(2)}])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (HybridParallelPlugin, "zero_size"),
        (HybridParallelPlugin, "batch_dims"),
        (HybridParallelPlugin, "num_layers_per_stage"),
        (GeminiPlugin, "placement_policy"),
        (LowLevelZeroPlugin, "stage"),
        (TorchFSDPPlugin, "sharding_strategy"),
        (ZeroConfig, "zero_size"),
        (ParallelConfig, "sequence_parallelism_mode"),
    ],
)
def test_arrays_are_refused_by_name(kind, name, given):
    with pytest.raises(ConfigError, match=rf"{name} must be .*got {name} with a value of class (numpy|torch)"):
        kind(**{name: given})


def test_what_contains_itself_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(ConfigError, match=re.escape("batch_dims contains itself. Pass a list that ends.")):
        HybridParallelPlugin(batch_dims=endless)


def test_numbers_that_no_float_holds_are_refused():
    with pytest.raises(
        ConfigError, match=re.escape("max_scale must be at most 1.8e+308: got an integer of 401 digits.")
    ):
        LossScaleConfig(max_scale=10**400)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"device": "gpu"}, "device must be a torch.device or its name: got device='gpu'. Pass 'cpu' or 'cuda', or"),
        ({"plugin_kwargs": 8}, "plugin_kwargs must be a dict of a plugin's settings by name: got plugin_kwargs=8."),
        ({"plugin_kwargs": {1: 2}}, "plugin_kwargs must be a dict of a plugin's settings by name: got"),
        ({"mixed_precision": 16}, "mixed_precision must be 'fp32', 'fp16' or 'bf16', or None: got mixed_precision=16."),
    ],
)
def test_a_boosters_arguments_are_checked(given, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        Booster(**given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"seed": 0.5}, "seed must be an integer: got seed=0.5."),
        ({"seed": -1}, "seed must be at least 0 and below 2**63: got seed=-1."),
        ({"batch_size": "2"}, "batch_size must be an integer: got batch_size='2'."),
        ({"num_workers": -1}, "num_workers must be at least 0: got num_workers=-1. 0 loads data in the rank itself."),
        ({"collate_fn": 1}, "collate_fn must be a function of a list of samples: got collate_fn=1."),
    ],
)
def test_a_dataloaders_arguments_are_checked(given, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        HybridParallelPlugin().prepare_dataloader([1, 2], **({"batch_size": 1} | given))


def test_samples_that_cannot_be_stacked_are_refused():
    loader = HybridParallelPlugin().prepare_dataloader([torch.ones(2), torch.ones(3)], batch_size=2)
    with pytest.raises(DataError, match=r"samples of one batch are stacked, and these cannot be: stack expects each"):
        next(iter(loader))
