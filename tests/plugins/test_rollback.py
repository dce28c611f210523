"""A boost that fails leaves the model and the optimizer as they were, or says that the model must be made anew."""

import re
import sys
from contextlib import contextmanager
from inspect import CO_GENERATOR
from pathlib import Path

import hybridpp_plugins
import pytest
import torch
from plugins.test_unboost import MODELS, differences, everything
from support import assert_same, image_batch, model_loss, small_vit
from torch.multiprocessing.reductions import StorageWeakRef

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError, PartitionError

PLUGINS = str(Path(hybridpp_plugins.__file__).parent)
BATCH = image_batch(4)
UNUSABLE = (
    "boost of this model failed after the model was sharded, or cut into stages: it no longer holds all its "
    "parameters. Make the model and its optimizer anew before the next booster.boost."
)


class Stopped(BaseException):
    """Raised inside of boost."""


@contextmanager
def stopped_after(number=None):
    """Inside, raise when the call of this number that the plugin's code makes ends; yields how many there were."""
    seen = [0]

    def note(frame, event, value):
        caller = frame.f_back
        # What a generator raises when it is thrown away is ignored; so it is in what is called when a weak key goes.
        if "WeakKeyDictionary" in frame.f_code.co_qualname or "WeakSet" in frame.f_code.co_qualname:
            return
        if event != "return" or caller is None or frame.f_code.co_flags & CO_GENERATOR:
            return
        if caller.f_code.co_filename.startswith(PLUGINS):
            seen[0] += 1
            if seen[0] == number:
                raise Stopped

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def momentum(model):
    """An optimizer with two groups and state; the model keeps gradients."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[:3], "lr": 0.5}, {"params": parameters[3:]}], lr=0.1, momentum=1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def of_optimizer(optimizer):
    """What it holds, by identity."""
    return (
        {name: id(value) for name, value in vars(optimizer).items()},
        [{key: id(value) for key, value in group.items()} for group in optimizer.param_groups],
        [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups],
        {id(parameter): {key: id(value) for key, value in held.items()} for parameter, held in optimizer.state.items()},
    )


def booster_of(**settings):
    return Booster(plugin=HybridParallelPlugin(**settings), device="cpu")


@pytest.mark.covering
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["vit", "tied", "convolutions", "lstm"])
def test_a_boost_that_stops_anywhere_leaves_all_as_it_was(name, precision):
    torch.manual_seed(0)
    make = MODELS[name][0]
    model, other = make().train(), make().train()
    model.load_state_dict(other.state_dict())
    booster, optimizer = booster_of(precision=precision, gradient_checkpoint_config={}), momentum(model)
    with stopped_after() as calls:
        booster.boost(other, momentum(other))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before, held = everything(model), of_optimizer(optimizer)
    # Fewer than there were: some things are found out once per process. The last calls end what is done already. Each
    # model and precision stops in other places.
    step = 1 + calls[0] // 15
    for number in range(1 + len(name + precision) % step, calls[0] - 20, step):
        with pytest.raises(Stopped), stopped_after(number):
            booster.boost(model, optimizer)
        assert differences(before, everything(model)) == [], number
        assert of_optimizer(optimizer) == held
    assert_same(model.state_dict(), weights)
    assert calls[0] > 100


def trained_after(fails, **settings):
    """Losses of a model that was boosted with ``settings`` after ``fails(model, optimizer)``, by rank."""

    def run():
        model = small_vit()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        fails(model, optimizer)
        booster = booster_of(num_microbatches=2, **settings)
        boosted = booster.boost(model, optimizer, sample=BATCH)
        losses = []
        for _ in range(2):
            step = booster.execute_pipeline(iter([BATCH]), boosted.model, model_loss, boosted.optimizer)
            losses.append(float(step["loss"]))
            boosted.optimizer.step()
        return losses

    return Loopback(settings.get("pp_size", 1) * settings.get("tp_size", 1)).run(run)


@pytest.mark.parametrize(
    ("settings", "wrong", "error"),
    [
        ({}, {"precision": "bf16", "fp32_modules": ["nothing"]}, ConfigError),
        ({"pp_size": 2}, {"layers_per_stage": [9, 9]}, PartitionError),
        ({"pp_size": 2}, {"memory_limit": 1}, PartitionError),
        ({"tp_size": 2}, {"tensor_parallel_plan": {"*.nothing": "column"}}, ConfigError),
    ],
    ids=str,
)
def test_a_corrected_setting_trains_as_if_nothing_had_failed(settings, wrong, error):
    def fails(model, optimizer):
        before, held = everything(model), of_optimizer(optimizer)
        with pytest.raises(error) as raised:
            booster_of(num_microbatches=2, **settings | wrong).boost(model, optimizer, sample=BATCH)
        assert not hasattr(raised.value, "__notes__")
        assert differences(before, everything(model)) == []
        assert of_optimizer(optimizer) == held

    assert trained_after(fails, **settings) == trained_after(lambda model, optimizer: None, **settings)


@pytest.mark.parametrize("settings", [{"pp_size": 2}, {"tp_size": 2}], ids=str)
def test_a_boost_that_stops_too_late_asks_for_a_new_model(settings, monkeypatch):
    def run():
        model = small_vit()
        booster = booster_of(num_microbatches=2, **settings)
        with pytest.raises(KeyboardInterrupt) as raised:
            booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), sample=BATCH)
        assert raised.value.__notes__ == [f"hybridpp: {UNUSABLE}"]
        with pytest.raises(ConfigError, match=re.escape(UNUSABLE)):
            booster.boost(model, sample=BATCH)

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("hybridpp_plugins.setup.wrap_optimizer", stop)
    Loopback(2).run(run)


@pytest.mark.parametrize("name", ["vit", "lstm", "tied"])
def test_a_meta_model_is_on_the_meta_device_again(name, monkeypatch):
    with torch.device("meta"):
        model = MODELS[name][0]()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    before = everything(model)

    def stop(*args):
        raise Stopped

    monkeypatch.setattr("hybridpp_plugins.setup.Executor", stop)
    with pytest.raises(Stopped):
        booster_of(precision="bf16").boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert differences(before, everything(model)) == []
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


def test_what_boost_replaces_is_freed_when_it_ends():
    model = small_vit().requires_grad_(False)
    values = [StorageWeakRef(weight.untyped_storage()) for weight in model.parameters() if weight.dim() == 2]
    boosted = booster_of(precision="bf16").boost(model)
    assert all(value.expired() for value in values)
    assert boosted.model is model
