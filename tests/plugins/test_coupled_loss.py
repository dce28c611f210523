"""A loss that couples samples is that of the whole batch, over replicas with unequally many."""

import pytest
import torch
from support import assert_near, boosted, gradients_of, sgd
from torch import nn
from torch.nn import functional as F

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError, RefusedByPeerError

PAIRS = {"x": torch.randn(7, 6, generator=torch.Generator().manual_seed(0)), "kind": torch.arange(7) % 2}


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = net()

    def forward(self, x):
        return {"first": self.layers(x), "second": self.layers[0](x).repeat_interleave(2, 0)}


def contrastive(outputs, inputs):
    pairs = outputs["first"] @ outputs["second"][::2].T + inputs["kind"]
    return F.cross_entropy(pairs, torch.arange(len(pairs)))


contrastive.coupled = True


@pytest.mark.parametrize("settings", [{}, {"pp_size": 2}, {"zero_stage": 2}], ids=str)
def test_the_loss_is_that_of_the_samples_of_all_replicas(settings):
    model = Net()
    loss = contrastive(model(PAIRS["x"]), PAIRS)
    loss.backward()

    def run():
        booster, cut, optimizer = boosted(Net(), sgd, {"x": PAIRS["x"][:1]}, **settings)
        rows = slice(0, 4) if booster.plugin.layout.here.dp == 0 else slice(4, 7)
        batch = {name: value[rows] for name, value in PAIRS.items()}
        with torch.no_grad():
            losses = [booster.execute_pipeline(iter([batch]), cut, contrastive)["loss"].item()]
        losses.append(booster.execute_pipeline(iter([batch]), cut, contrastive, optimizer)["loss"].item())
        return losses, {} if "zero_stage" in settings else gradients_of(booster, cut), optimizer.get_grad_norm()

    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    for losses, gradients, found in Loopback(2 * settings.get("pp_size", 1)).run(run):
        assert losses == pytest.approx([loss.item()] * 2, rel=1e-6)
        assert found == pytest.approx(float(norm), rel=1e-5)
        for name, gradient in gradients.items():
            assert_near({name: gradient}, {name: dict(model.named_parameters())[name].grad}, 1e-6)


def test_micro_batches_of_a_coupled_loss_are_refused_on_every_rank():
    def run():
        booster, cut, optimizer = boosted(Net(), sgd, {"x": PAIRS["x"][:1]}, pp_size=2, num_microbatches=2)
        with pytest.raises(ConfigError, match="needs all samples of a replica at once: got 2 micro"):
            booster.execute_pipeline(iter([PAIRS]), cut, contrastive, optimizer)
        return True

    assert all(Loopback(2).run(run))


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_that_one_replica_catches_ends_the_step_on_all(failing):
    def run():
        booster, model, optimizer = boosted(Net(), sgd, {"x": PAIRS["x"][:1]})
        here, broken = booster.plugin.layout.here.dp, []
        batch = {name: value[:3] for name, value in PAIRS.items()}

        def look(module, args):
            if broken:
                raise ValueError("not this batch")

        model.register_forward_pre_hook(look)
        booster.execute_pipeline(iter([batch]), model, contrastive, optimizer)
        broken += [1] * (here == failing)
        with pytest.raises(ValueError if here == failing else RefusedByPeerError):
            booster.execute_pipeline(iter([batch]), model, contrastive, optimizer)
        broken.clear()
        optimizer.zero_grad()
        booster.execute_pipeline(iter([batch]), model, contrastive, optimizer)
        return gradients_of(booster, model)

    first, second = Loopback(2).run(run)
    assert_near(first, second, 0)


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        first = self.layers(x)
        return {"first": first, "scale": self.scale.exp(), "own": first.square().mean()}


@pytest.mark.parametrize("settings", [{}, {"pp_size": 2}], ids=str)
def test_an_output_without_samples_counts_once(settings):
    def with_scale(outputs, inputs):
        drawn.append(torch.rand(()).item())
        pairs = outputs["first"] @ outputs["first"].T * outputs["scale"]
        return F.cross_entropy(pairs, torch.arange(len(pairs)))

    drawn = []
    with_scale.coupled = True
    model = Scaled()
    with_scale(model(PAIRS["x"]), PAIRS).backward()
    drawn.clear()

    def run():
        booster, cut, optimizer = boosted(Scaled(), sgd, {"x": PAIRS["x"][:1]}, **settings)
        rows = slice(0, 4) if booster.plugin.layout.here.dp == 0 else slice(4, 7)
        batch = {name: value[rows] for name, value in PAIRS.items()}
        booster.execute_pipeline(iter([batch]), cut, with_scale, optimizer)
        return gradients_of(booster, cut)

    for gradients in Loopback(2 * settings.get("pp_size", 1)).run(run):
        assert_near(gradients, {name: dict(model.named_parameters())[name].grad for name in gradients}, 1e-6)
    assert len(drawn) == 2  # each replica's criterion
    assert len(set(drawn)) == 1


def test_a_coupled_loss_that_differs_between_replicas_is_refused():
    def with_own(outputs, inputs):
        return (outputs["first"] @ outputs["first"].T).square().mean() + outputs["own"]

    with_own.coupled = True

    def run():
        booster, cut, optimizer = boosted(Scaled(), sgd, {"x": PAIRS["x"][:1]}, pp_size=2)
        rows = slice(0, 4) if booster.plugin.layout.here.dp == 0 else slice(4, 7)
        batch = {name: value[rows] for name, value in PAIRS.items()}
        with pytest.raises(ConfigError, match=r"must be the same on all of them: got \d.*a number for each sample"):
            booster.execute_pipeline(iter([batch]), cut, with_own, optimizer)
        return True

    assert all(Loopback(4).run(run))


class Prototypes(Net):
    def __init__(self):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)))

    def forward(self, x):
        return {"first": self.layers(x), "prototypes": self.prototypes * 1}


def test_an_output_that_is_no_tensor_of_samples_is_refused_or_declared():
    def to_prototypes(outputs, inputs):
        return (outputs["first"] @ outputs["prototypes"].T).logsumexp((0, 1))

    to_prototypes.coupled = True
    model = Prototypes()
    to_prototypes(model(PAIRS["x"][:6]), PAIRS).backward()

    def run(num_first, **settings):
        booster, cut, optimizer = boosted(Prototypes(), sgd, {"x": PAIRS["x"][:1]}, **settings)
        rows = slice(0, num_first) if booster.plugin.layout.here.dp == 0 else slice(num_first, 6)
        booster.execute_pipeline(iter([{"x": PAIRS["x"][rows]}]), cut, to_prototypes, optimizer)
        return gradients_of(booster, cut)

    for gradients in Loopback(2).run(lambda: run(4, output_dims={"prototypes": None})):
        assert_near(gradients, {name: dict(model.named_parameters())[name].grad for name in gradients}, 1e-6)

    def refused(num_first):
        with pytest.raises(ConfigError) as caught:
            run(num_first)
        return str(caught.value)

    assert all("the replicas have 1, 5 samples" in text for text in Loopback(2).run(lambda: refused(1)))
    assert all("the replicas have 4, 2 samples" in text for text in Loopback(2).run(lambda: refused(4)))


def test_an_output_that_is_the_same_on_all_replicas_is_refused():
    def to_prototypes(outputs, inputs):
        return (outputs["first"] @ outputs["prototypes"].T).logsumexp((0, 1))

    to_prototypes.coupled = True

    def run():
        booster, cut, optimizer = boosted(Prototypes(), sgd, {"x": PAIRS["x"][:1]})
        rows = slice(0, 2) if booster.plugin.layout.here.dp == 0 else slice(2, 4)
        with pytest.raises(
            ConfigError, match=r"the tensor \['prototypes'\] of the outputs is the same on all replicas"
        ):
            booster.execute_pipeline(iter([{"x": PAIRS["x"][rows]}]), cut, to_prototypes, optimizer)
        return True

    assert all(Loopback(2).run(run))
