"""Hooks on gradients of activations: those that make something of all samples are found, others are right in parts."""

import contextlib

import pytest
import torch
from support import assert_near, boosted, sgd
from torch import nn

from hybridpp.cluster import Loopback
from hybridpp.data_parallel.activation_hooks import ActivationHooks
from hybridpp.data_parallel.hook_checks import GradientFactor
from hybridpp.errors import ConfigError, PeerError

DATA = torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(0))
LIMIT = 1e-3


def clip_norm(gradient):
    return gradient * (LIMIT / gradient.norm()).clamp(max=1.0)


def clip_in_place(gradient):
    gradient.clamp_(-LIMIT, LIMIT)


def clip_samples(gradient):
    return gradient * (LIMIT / gradient.flatten(1).norm(dim=1)).clamp(max=1.0)[:, None, None]


class Alternating:
    """Makes something else of the same gradient the next time: that it depends on samples cannot be told."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, gradient):
        self.num_calls += 1
        return gradient * self.num_calls


FOR_ITSELF = {
    "a factor": lambda gradient: gradient * 0.5,
    "each element": lambda gradient: gradient.clamp(-LIMIT, LIMIT),
    "in place": clip_in_place,
    "each sample": clip_samples,
    "each position": lambda gradient: nn.functional.normalize(gradient, dim=-1) * LIMIT,
    "draws": lambda gradient: gradient * torch.bernoulli(torch.full_like(gradient, 0.5)),
    "fixed size": lambda gradient: gradient * torch.ones(4, 3, 5).tril(),
}
TOGETHER = {
    "norm": clip_norm,
    "largest": lambda gradient: gradient / gradient.abs().max(),
    "mean": lambda gradient: gradient - gradient.mean(0),
}


class Net(nn.Module):
    """Registers a hook in its forward, or on a module inside."""

    def __init__(self, hook, place):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.hook, self.place = nn.Linear(5, 5), nn.Linear(5, 5), hook, place
        if place == "module":
            self.second.register_full_backward_hook(lambda module, inputs, outputs: (hook(inputs[0]),))
        if place == "before":
            self.second.register_full_backward_pre_hook(lambda module, outputs: (hook(outputs[0]),))

    def forward(self, x):
        hidden = self.first(x)
        if self.place == "activation" and hidden.requires_grad:
            hidden.register_hook(self.hook)
        return self.second(hidden.tanh())


def passed(hook, place, *, num_samples, checked=True):
    """What is found in a pass of the first samples, and the gradients after it."""
    model = Net(hook, place)
    checks = ActivationHooks(model, GradientFactor())
    torch.manual_seed(1)
    with checks.watching(num_samples) if checked else contextlib.nullcontext():
        loss = model(DATA[:num_samples]).square().mean()
    loss.backward()
    return checks.found, [*(parameter.grad for parameter in model.parameters()), torch.rand(1)]


PLACES = ["activation", "module", "before"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", FOR_ITSELF)
def test_hooks_that_change_samples_for_themselves_run_as_if_unwatched(kind, place):
    if kind == "in place" and place != "activation":
        return
    found, gradients = passed(FOR_ITSELF[kind], place, num_samples=4)
    _, plain = passed(FOR_ITSELF[kind], place, num_samples=4, checked=False)
    assert not found
    assert all(map(torch.equal, gradients, plain))


@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", TOGETHER)
def test_hooks_that_make_something_of_all_samples_are_found(kind, place, num_samples):
    words = "makes something of all samples there together"
    assert words in passed(TOGETHER[kind], place, num_samples=num_samples)[0]


def test_a_hook_on_a_scalar_must_be_linear():
    def found(hook):
        checks = ActivationHooks(nn.Identity(), GradientFactor())
        with checks.watching(4):
            loss = (torch.ones(4, requires_grad=True) * 2).sum()
            loss.register_hook(hook)
        loss.backward()
        return checks.found

    assert not found(lambda gradient: gradient * 3)
    assert "on the gradient of an activation of shape ()" in found(lambda gradient: gradient.clamp(max=1.0))


def test_hooks_that_only_look_are_called_once_others_may_have_memory():
    seen, alternating = [], Alternating()
    assert not passed(lambda gradient: seen.append(1), "activation", num_samples=4)[0]
    assert len(seen) == 1
    assert not passed(alternating, "activation", num_samples=4)[0]


def trained(hook, num_ranks, *, own=False, **settings):
    """Weights after two steps, by rank, or what is raised."""

    def run():
        model = nn.Sequential(Net(hook, "activation"), Net(hook, "module"))
        booster, model, optimizer = boosted(model, sgd, DATA[:1], **settings)
        part = DATA.chunk(booster.plugin.dp_size)[booster.plugin.layout.here.dp]

        def criterion(outputs, _=None):
            return outputs.square().mean()

        try:
            for _ in range(2):
                if own:
                    booster.backward(criterion(model(part)), optimizer)
                else:
                    booster.execute_pipeline(iter([part]), model, criterion, optimizer)
                optimizer.step()
        except ConfigError as error:
            return str(error)
        return {name: one.detach() for name, one in model.named_parameters()}

    return Loopback(num_ranks).run(run)


LAYOUTS = [(1, {"num_microbatches": 2}), (2, {}), (2, {"own": True}), (2, {"pp_size": 2, "num_microbatches": 2})]


@pytest.mark.parametrize(("num_ranks", "settings"), LAYOUTS, ids=str)
def test_elements_that_are_clipped_are_the_same_in_every_layout(num_ranks, settings):
    (expected,) = trained(FOR_ITSELF["each element"], 1)
    found = {}
    for rank in trained(FOR_ITSELF["each element"], num_ranks, **settings):
        found |= rank
    assert_near(found, expected, 1e-6)


@pytest.mark.parametrize(("num_ranks", "settings"), LAYOUTS, ids=str)
def test_a_norm_of_a_part_of_a_batch_is_refused_on_every_rank(num_ranks, settings):
    found = set(trained(clip_norm, num_ranks, **settings))
    assert len(found) == 1
    assert "makes something of all samples there together" in found.pop()


def test_a_norm_of_a_whole_batch_runs():
    assert isinstance(trained(clip_norm, 1)[0], dict)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("who", [[0, 1], [1]])
def test_hooks_on_modules_that_come_between_steps_are_tried_too(own, who):
    """Also those that one rank alone has: no rank waits for another."""
    calls = []

    def with_hook(hook):
        def changed(_, inputs, outputs):
            new = hook(inputs[0])
            return None if new is None else (new,)

        def run():
            booster, model, optimizer = boosted(nn.Sequential(Net(None, ""), Net(None, "")), sgd, DATA[:1])
            rank = booster.plugin.layout.here.dp
            part = DATA.chunk(2)[rank]

            def step():
                if own:
                    booster.backward(model(part).square().mean(), optimizer)
                else:
                    booster.execute_pipeline(iter([(part,)]), model, lambda o, _: o.square().mean(), optimizer)
                optimizer.step()

            for _ in range(3):
                step()
            if rank in who:
                model[1].second.register_full_backward_hook(changed)
            for _ in range(2):
                step()

        Loopback(2).run(run)

    with_hook(clip_samples)
    with_hook(lambda gradient: calls.append(1))
    assert len(calls) == 2 * len(who)
    with pytest.raises((ConfigError, PeerError), match="makes something of all samples there together"):
        with_hook(clip_norm)
