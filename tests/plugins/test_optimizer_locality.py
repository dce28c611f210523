"""Optimizers that look at whole parameters, or at all of them, train one run in every layout or are refused."""

import functools
import logging
import re

import pytest
import torch
from divided_models import VIT
from hybridpp_plugins import optimizer_locality
from plugins.normed_together import NormedTogether
from sized_rules import FactoredFrom, InBlocksOf256
from support import assert_near, assert_same, boosted, image_batch, small_vit, train
from torch import nn, optim
from transformers.optimization import Adafactor as HuggingFaceAdafactor

from hybridpp import HybridAdam
from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError
from hybridpp.optim import find_localities

BATCHES = [image_batch(4, seed) for seed in range(2)]
INSTEAD = "an elementwise optimizer (AdamW, HybridAdam, SGD)"
divided = functools.partial(train, small_vit, BATCHES, tensor_parallel_plan=VIT)


def matrices(make):
    return lambda params: make([parameter for parameter in params if parameter.dim() == 2])


@pytest.mark.parametrize(
    ("make", "name", "precision"),
    [
        (functools.partial(optim.Adafactor, lr=0.01), "Adafactor", "fp32"),
        (functools.partial(optim.Adafactor, lr=0.01), "Adafactor", "bf16"),
        (HuggingFaceAdafactor, "Adafactor", "bf16"),
        (matrices(functools.partial(optim.Muon, lr=0.01)), "Muon", "fp32"),
    ],
)
def test_shards_of_parameters_are_refused_by_name(make, name, precision):
    with pytest.raises(ConfigError) as error:
        divided(make_optimizer=make, tp_size=2, precision=precision)
    parameter, count = re.search(r"a shard of '(.*)' and of (\d+) more", str(error.value)).groups()
    assert (parameter.startswith("vit.layers.0."), int(count) > 10) == (True, True)
    assert str(error.value) == (
        f"{name}'s update of an element depends on the unsharded parameter, and a rank holds only a shard of "
        f"{parameter!r} and of {count} more: got tp_size=2, pp_size=1. Use tp_size=1, with a larger pp_size if needed, "
        f"or {INSTEAD}."
    )


def mlp():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(144, 160), nn.GELU(), nn.Linear(160, 144))
    return nn.Sequential(nn.Linear(16, 144), block, nn.Linear(144, 8))


def muon_and_adamw(params):
    params = list(params)
    inner = [p for p in params if p.dim() == 2 and min(p.shape) > 16]
    return [optim.Muon(inner, lr=0.02), optim.AdamW([p for p in params if all(p is not one for one in inner)], lr=0.01)]


SIZED = [torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
INNER = {"1.0.weight", "1.2.weight"}
train_mlp = functools.partial(train, mlp, SIZED, criterion=lambda output, _: output.square().mean())


def given_whole(booster, model, optimizer):
    """The matrices of the model that this rank updates whole."""
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name for name, p in optimizer.target.tensors.items() if id(p) in updated and p.dim() == 2}


@pytest.mark.parametrize("make", [FactoredFrom, InBlocksOf256, muon_and_adamw])
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_replicas_divide_no_parameter_of_a_size_that_is_read_whole(make, zero_stage, caplog):
    # The oracle updates every parameter on every replica: Muon rounds to bf16 what other sums round otherwise.
    expected = train_mlp(make_optimizer=make, dp_size=2)
    with caplog.at_level(logging.WARNING, logger="hybridpp"):
        zero = {"zero_stage": zero_stage, "ddp_bucket_cap_mb": 0.05}
        found = train_mlp(make_optimizer=make, dp_size=2, after=given_whole, **zero)
    assert_near(found["weights"], expected["weights"])
    assert found["after"][0] | found["after"][1] >= INNER
    assert not [record for record in caplog.records if "could not check" in record.getMessage()]


@pytest.mark.parametrize("make", [FactoredFrom, InBlocksOf256])
def test_shards_are_refused_to_rules_that_depend_on_sizes(make):
    with pytest.raises(ConfigError, match=r"a rank holds only a shard of '1\.0\.weight'"):
        train_mlp(make_optimizer=make, tp_size=2)


def test_of_several_optimizers_the_one_that_cannot_be_tried_is_named(caplog):
    def make(params):
        params = list(params)
        return [Drawing(params[:2], lr=0.1), optim.AdamW(params[2:], lr=0.01)]

    with caplog.at_level(logging.WARNING, logger="hybridpp"):
        found = train_mlp(make_optimizer=make, dp_size=2, zero_stage=1, ddp_bucket_cap_mb=0.05, after=given_whole)
    (message,) = [text for record in caplog.records if "could not check" in (text := record.getMessage())]
    assert message.startswith("[rank 0] could not check what an update of Drawing depends on (it draws random numbers)")
    # Those of AdamW are cut where the segments of the replicas are.
    assert not found["after"][0] | found["after"][1] >= INNER


def test_unsharded_parameters_give_the_same_bits_for_every_pp_size():
    make = functools.partial(optim.Adafactor, lr=0.01)
    whole = divided(make_optimizer=make)["weights"]
    assert_same(divided(make_optimizer=make, pp_size=2)["weights"], whole)


def test_only_sharded_parameters_are_in_the_way():
    make = lambda params: optim.Adafactor([p for p in params if p.shape == (16, 3, 4, 4)], lr=0.01)  # noqa: E731
    whole = divided(make_optimizer=make)["weights"]
    assert_near(divided(make_optimizer=make, tp_size=2)["weights"], whole, 1e-5)


@pytest.mark.parametrize("sizes", [{"tp_size": 2, "pp_size": 1}, {"tp_size": 1, "pp_size": 2}])
def test_parts_of_all_parameters_are_refused_by_name(sizes):
    message = (
        "NormedTogether's update of a parameter depends on other parameters, of which a rank holds only a part: got "
        f"tp_size={sizes['tp_size']}, pp_size={sizes['pp_size']}. Use tp_size=1, pp_size=1, or {INSTEAD}."
    )
    with pytest.raises(ConfigError) as refused:
        divided(make_optimizer=NormedTogether, **sizes)
    assert refused.value.args == (message,)


def test_replicas_hold_everything():
    whole = divided(make_optimizer=NormedTogether)["weights"]
    assert_near(divided(make_optimizer=NormedTogether, dp_size=2)["weights"], whole, 1e-5)


@pytest.mark.parametrize(
    ("make", "pp_size"),
    [(HybridAdam, 2), (functools.partial(optim.AdamW, lr=torch.tensor(1e-3)), 1), (optim.Adagrad, 1)],
)
def test_others_are_divided_without_a_word(make, pp_size, caplog):
    with caplog.at_level(logging.WARNING, logger="hybridpp"):
        divided(make_optimizer=make, tp_size=2, pp_size=pp_size)
    assert not [record for record in caplog.records if "could not check" in record.getMessage()]


class Drawing(optim.SGD):
    def step(self, closure=None):
        torch.rand(1)
        return super().step(closure)


def test_what_cannot_be_tried_is_told_once_and_trains(caplog):
    with caplog.at_level(logging.WARNING, logger="hybridpp"):
        divided(make_optimizer=functools.partial(Drawing, lr=0.1), tp_size=2)
    (message,) = [text for record in caplog.records if "could not check" in (text := record.getMessage())]
    assert message == (
        "[rank 0] could not check whether Drawing gives the same updates for every tp_size and pp_size (it draws "
        "random numbers). Compare the losses of some steps with those of tp_size=1, pp_size=1."
    )


class Searching(optim.SGD):
    def step(self, closure):
        return closure()


@pytest.mark.parametrize("cls", [optim.LBFGS, Searching])
def test_an_optimizer_that_needs_a_closure_is_refused(cls):
    message = (
        f"the step of {cls.__name__} needs a closure that runs the model, which is not possible with a pipeline "
        "schedule. Use another optimizer."
    )

    def run():
        boosted(small_vit(), functools.partial(cls, lr=0.1), image_batch(2))

    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Loopback(1).run(run)


@pytest.fixture
def tried(monkeypatch):
    """The optimizers that were tried."""
    found = []

    def recorded(optimizer, cuts, device):
        found.append(optimizer)
        return find_localities(optimizer, cuts, device)

    monkeypatch.setattr(optimizer_locality, "find_localities", recorded)
    return found


@pytest.mark.parametrize(
    "sizes", [{"pp_size": 2}, {"pp_size": 2, "tp_size": 2}, {"dp_size": 2, "zero_stage": 1}], ids=str
)
def test_one_of_the_ranks_of_a_process_tries_for_all(tried, sizes):
    divided(make_optimizer=functools.partial(optim.AdamW, lr=0.1), **sizes)
    assert len(tried) == 1


def test_ranks_whose_optimizers_may_differ_try_each_their_own(tried):
    divided(make_optimizer=HybridAdam, pp_size=2)
    assert len(tried) == 2


def test_ranks_with_unlike_rates_try_nothing(tried):
    with pytest.raises(
        ConfigError, match=r"all ranks must be set alike: lr of parameter group 0 is 0\.1 on rank 0, 1\.1"
    ):
        divided(make_optimizer=lambda params: optim.AdamW(params, lr=0.1 + current_world().rank), pp_size=2)
    assert not tried


class OwnList(optim.SGD):
    """Keeps its parameters in a list of its own."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.all_params = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.all_params:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.1)


class SlowWeights(optim.SGD):
    """Keeps copies in the order of its parameters, as wrappers do."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.slow = [[parameter.detach().clone() for parameter in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group, copies in zip(self.param_groups, self.slow, strict=True):
            for parameter, slow in zip(group["params"], copies, strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))


class ByParameter(optim.SGD):
    """Keeps momentum by parameter, made in step."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.momenta = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.momenta.setdefault(parameter, torch.zeros_like(parameter))
                    parameter.sub_(momentum.mul_(0.9).add_(parameter.grad, alpha=0.1))


def steps_with(make, num_ranks, num_steps=2, hook=None, **settings):
    def run():
        batch = {"input": torch.ones(4, 16), "target": torch.zeros(4, 8)}
        booster, model, optimizer = boosted(mlp(), make, {"input": batch["input"]}, **settings)
        if hook is not None:
            optimizer.register_step_pre_hook(hook)
        for _ in range(num_steps):
            booster.execute_pipeline(iter([batch]), model, nn.MSELoss(), optimizer)
            optimizer.step()
        with booster.unsharded(model):
            return {name: parameter.detach().float() for name, parameter in model.named_parameters()}

    return Loopback(num_ranks).run(run)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [(1, {"precision": "bf16"}), (1, {"offload_optimizer": 1.0}), (2, {"zero_stage": 1})],
    ids=str,
)
def test_an_own_list_of_parameters_is_refused_where_others_train(num_ranks, settings):
    (name,) = settings
    text = f"OwnList keeps parameters of the model in its attribute 'all_params', but with {name}="
    with pytest.raises(ConfigError, match=re.escape(text)):
        steps_with(OwnList, num_ranks, **settings)


@pytest.mark.parametrize("settings", [{"zero_stage": 1}, {"pp_size": 2}], ids=str)
def test_own_copies_of_parameters_are_refused_where_ranks_have_parts(settings):
    ((name, value),) = settings.items()
    text = (
        f"keeps 8 tensors with shapes of the model's parameters in its attribute 'slow', but with {name}={value} a rank"
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        steps_with(SlowWeights, 2, **settings)


def test_own_tensors_train_where_parameters_are_the_models():
    once = steps_with(OwnList, 1)[0]
    assert_near(steps_with(functools.partial(optim.SGD, lr=0.1), 1)[0], once)
    assert_near(steps_with(OwnList, 2)[1], once)
    copied = steps_with(SlowWeights, 1)[0]
    assert_near(steps_with(SlowWeights, 1, offload_optimizer=1.0)[0], copied)
    keyed = steps_with(ByParameter, 1)[0]
    assert_near(steps_with(ByParameter, 1, offload_optimizer=1.0)[0], keyed)
    assert_near(steps_with(ByParameter, 2, zero_stage=1)[0], keyed)


class Scaled(optim.SGD):
    """An optimizer with a factor for each parameter, which the script has set on it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(parameter.scale)
        super().step()


def scaled(params):
    params = list(params)
    for number, parameter in enumerate(params):
        parameter.scale = 0.5**number
    return Scaled(params, lr=0.1)


def scaled_elementwise(params):
    optimizer = scaled(params)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.scale = torch.full_like(parameter, parameter.scale)
    return optimizer


def scaled_by_id(params):
    optimizer = optim.SGD(params, lr=0.1)
    optimizer.scales = {id(parameter): 0.5 for parameter in optimizer.param_groups[0]["params"]}
    return optimizer


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [(1, {"offload_optimizer": 1.0}), (2, {"zero_stage": 3})],
    ids=str,
)
def test_what_is_updated_has_the_attributes_of_its_parameter(num_ranks, settings):
    expected = steps_with(scaled, 1)[0]
    for make in (scaled, scaled_elementwise):
        assert_near(steps_with(make, num_ranks, **settings)[0], expected)


def test_an_attribute_that_is_set_after_boost_counts_for_masters():
    def run(**settings):
        _, model, optimizer = boosted(mlp(), scaled, {"input": torch.ones(2, 16)}, **settings)
        for parameter in model.parameters():
            parameter.scale = 3.0
        return [parameter.scale for group in optimizer.param_groups for parameter in group["params"]]

    assert Loopback(1).run(lambda: run(precision="bf16"))[0] == [3.0] * 8


class TaggedMuon(optim.SGD):
    """Divides the gradients of tagged parameters by their norms."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if getattr(parameter, "is_normed", False):
                    parameter.grad.div_(parameter.grad.norm())
        super().step()


def test_the_trial_of_an_optimizer_sees_attributes_of_parameters():
    def make(params):
        params = list(params)
        params[2].is_normed = True
        return TaggedMuon(params, lr=0.1)

    with pytest.raises(ConfigError, match=r"a rank holds only a shard of '1\.0\.weight'"):
        train_mlp(make_optimizer=make, tp_size=2)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [(1, {"precision": "bf16"}), (1, {"offload_optimizer": 1.0}), (2, {"zero_stage": 1})],
    ids=str,
)
def test_ids_of_parameters_are_refused_where_others_are_updated(num_ranks, settings):
    text = "SGD keeps the id() of parameters of the model in its attribute 'scales', but with "
    with pytest.raises(ConfigError, match=re.escape(text)):
        steps_with(scaled_by_id, num_ranks, **settings)


@pytest.mark.parametrize("settings", [{"zero_stage": 1}, {"pp_size": 2}, {"tp_size": 2}], ids=str)
@pytest.mark.parametrize("is_setting", [True, False])
def test_tensors_that_belong_to_parameters_are_refused_anywhere(settings, is_setting):
    def make(params):
        optimizer = optim.SGD(params, lr=0.1)
        started = [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]
        if is_setting:
            optimizer.param_groups[0]["start"] = started
        else:
            optimizer.start = started
        return optimizer

    ((name, value),) = settings.items()
    holder = "param_groups[0]['start']" if is_setting else "its attribute 'start'"
    text = f"SGD keeps 8 tensors with shapes of the model's parameters in {holder}, but with {name}={value} a rank"
    with pytest.raises(ConfigError, match=re.escape(text)):
        steps_with(make, 2, **settings)


def clips_all(optimizer, *_):
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(held, 1.0, norm([p.grad for p in held]))


def norm(gradients):
    return torch.nn.utils.get_total_norm(gradients)


def halves_all(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class NormedFrom40(optim.SGD):
    """From step 40 on, leaves out a step by the norm of all gradients."""

    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.num_steps < 40 or norm(gradients) < 1e6:
            super().step()


def of_parts(caplog):
    return [text for record in caplog.records if "takes several elements together" in (text := record.getMessage())]


PARTS = [{"zero_stage": 1}, {"zero_stage": 3}, {"pp_size": 2}]


@pytest.mark.parametrize("settings", PARTS, ids=str)
def test_hooks_that_take_gradients_of_a_part_together_are_named_once(settings, caplog):
    sgd = functools.partial(optim.SGD, lr=0.1)
    steps_with(sgd, 2, 4, hook=clips_all, **settings)
    (text,) = of_parts(caplog)
    assert "clips_all, a hook of SGD's step, takes several elements together" in text
    assert "={}".format(*settings.values()) in text
    caplog.clear()
    half = steps_with(sgd, 2, hook=halves_all, **settings)[0]
    assert_near(half, {name: steps_with(sgd, 1, hook=halves_all)[0][name] for name in half})
    steps_with(sgd, 2, hook=clips_all)
    assert not of_parts(caplog)


def reads_one(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5 if parameter.grad.flatten()[0].item() > 0 else 1.0)


def renorms(optimizer, *_):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in (one for one in group["params"] if one.dim() > 1):
                torch.renorm(parameter, 2, 0, 0.5)


def draws(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            torch.randn_like(parameter)


@pytest.mark.parametrize("hook", [reads_one, draws, renorms])
def test_hooks_that_read_or_draw_are_named(hook, caplog):
    steps_with(functools.partial(optim.SGD, lr=0.1), 2, 1, hook=hook, pp_size=2)
    (text,) = of_parts(caplog)
    assert f"{hook.__name__}, a hook of SGD's step, takes several elements together" in text


@pytest.mark.parametrize("settings", PARTS, ids=str)
def test_a_rule_that_begins_behind_the_trial_is_named(settings, caplog):
    steps_with(functools.partial(NormedFrom40, lr=0.01), 2, 64, **settings)
    (text,) = of_parts(caplog)
    assert "NormedFrom40.step takes several elements together" in text
    assert "did not before step 64" in text
    caplog.clear()
    steps_with(functools.partial(NormedFrom40, lr=0.01), 2, 64)
    assert not of_parts(caplog)


def test_steps_by_a_limit_on_all_gradients_are_refused_by_name():
    class Limited(optim.SGD):
        def step(self, closure=None):
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            if max(gradient.abs().max().item() for gradient in gradients) < 0.15:
                super().step()

    for settings in PARTS:
        with pytest.raises(ConfigError, match="Limited's update of a parameter depends on other parameters"):
            steps_with(functools.partial(Limited, lr=0.01), 2, **settings)
