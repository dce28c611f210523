"""Weights of a criterion that would train in each replica by itself are refused; a model that holds them trains."""

import functools
import re

import pytest
import torch
from support import assert_near, train
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

BATCHES = [
    {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)), "target": torch.tensor([0, 1, 2, 0])}
    for seed in range(2)
]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)])

    def forward(self, x):
        return self.blocks(x)


class Margin(nn.Module):
    """Classes as weights of the loss, as ArcFace has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.classes = nn.Parameter(torch.randn(3, 8))
        self.register_buffer("weights", torch.ones(3))

    def forward(self, outputs, inputs):
        logits = outputs @ self.classes.t()
        return nn.functional.cross_entropy(logits, inputs["target"], self.weights)


class InAttribute:
    def __init__(self, margin):
        self.margin, self.other = margin, nn.Linear(2, 2)

    def loss(self, outputs, inputs):
        return self.margin(outputs, inputs)

    def __call__(self, outputs, inputs):
        return self.loss(outputs, inputs) + self.margin(outputs, inputs)


MARGIN = Margin()


def reads_a_global(outputs, inputs):
    return MARGIN(outputs, inputs)


def with_temperature(outputs, inputs, temperature):
    return (outputs * temperature).square().mean()


def in_closure(margin):
    return lambda outputs, inputs: margin(outputs, inputs) * 2.0


FORMS = {
    "module": lambda: (Margin(), "classes"),
    "closure": lambda: (in_closure(Margin()), "margin.classes"),
    "global": lambda: (reads_a_global, "MARGIN.classes"),
    "partial": lambda: (functools.partial(with_temperature, temperature=nn.Parameter(torch.ones(()))), "temperature"),
    "tensor": lambda: (
        functools.partial(with_temperature, temperature=torch.ones((), requires_grad=True)),
        "temperature",
    ),
    "bound method": lambda: (InAttribute(Margin()).loss, "margin.classes"),
    "object": lambda: (InAttribute(Margin()), "margin.classes"),
    "function in a closure": lambda: (functools.partial(in_closure(in_closure(Margin()))), "margin.margin.classes"),
}


def on_ranks(criterion, *, at_boost=True, num_ranks=2, **settings):
    def run():
        model = Network()
        booster = Booster(plugin=HybridParallelPlugin(**settings))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = booster.boost(model, optimizer, criterion if at_boost else None, sample=BATCHES[0])
        loss = booster.execute_pipeline(iter(BATCHES), parts.model, criterion, parts.optimizer)["loss"]
        return loss.item()

    return Loopback(num_ranks).run(run)


@pytest.mark.parametrize("form", FORMS)
def test_trainable_weights_of_criteria_are_refused_at_boost_by_name(form):
    criterion, name = FORMS[form]()
    text = (
        f"the criterion has trainable weights that are not the model's: {name!r} of shape "
        rf"{'()' if 'temp' in name else '(3, 8)'}. They would be trained on the last stage alone, in each replica by "
        "itself: got pp_size=1, dp_size=2, tp_size=1, precision='fp32'. Boost a module that holds the model and the "
        "criterion and whose forward returns the loss, with criterion=lambda outputs, inputs: outputs; or call "
        "requires_grad_(False) on weights that do not train."
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        on_ranks(criterion)


def test_a_criterion_that_only_the_step_is_given_is_refused_there():
    with pytest.raises(ConfigError, match=r"the criterion has trainable weights .*got pp_size=2, dp_size=1"):
        on_ranks(Margin(), at_boost=False, pp_size=2, num_microbatches=2)


@pytest.mark.parametrize("criterion", [Margin().requires_grad_(False), in_closure(Margin().requires_grad_(False))])
def test_frozen_weights_of_criteria_are_no_obstacle(criterion):
    assert all(loss > 0 for loss in on_ranks(criterion))


def test_on_one_rank_an_optimizer_of_the_script_trains_the_criterion():
    margin = Margin()
    before = margin.classes.detach().clone()
    own = torch.optim.SGD(margin.parameters(), lr=0.1)
    on_ranks(margin, num_ranks=1)
    own.step()
    assert not torch.equal(margin.classes, before)


def with_penalty(model):
    def criterion(outputs, inputs):
        loss = nn.functional.cross_entropy(outputs, inputs["target"])
        return loss + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())

    return criterion


def penalised(**settings):
    def run():
        model = Network()
        booster, criterion = Booster(plugin=HybridParallelPlugin(**settings)), with_penalty(model)
        parts = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion, sample=BATCHES[0])
        losses = [
            booster.execute_pipeline(iter([batch]), parts.model, criterion, parts.optimizer)["loss"].item()
            for batch in BATCHES
        ]
        return losses[-1]

    return Loopback(2 if settings.keys() & {"pp_size", "tp_size", "zero_stage"} else 1).run(run)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"pp_size": 2}, "the weights of its stage only: got pp_size=2"),
        ({"tp_size": 2}, "a shard of it: got tp_size=2"),
        ({"zero_stage": 3}, "no weights where no forward runs: got zero_stage=3"),
        ({"pp_size": 2, "schedule": "zb-v"}, "the weights of its stage only: got pp_size=2"),
    ],
    ids=str,
)
def test_a_penalty_of_weights_that_a_rank_has_in_part_is_refused(settings, part):
    with pytest.raises(ConfigError, match=r"^the criterion reads weights of the model \(blocks.*" + re.escape(part)):
        penalised(**settings, num_microbatches=2)


def test_a_penalty_of_whole_weights_is_that_of_one_process():
    expected = penalised(num_microbatches=1)[0]
    for settings in ({"zero_stage": 1}, {"zero_stage": 2}):
        assert penalised(**settings, num_microbatches=2)[0] == pytest.approx(expected, rel=1e-6)


class WithLoss(nn.Module):
    """The way out: the criterion is a part of the model."""

    def __init__(self):
        super().__init__()
        self.network, self.margin = Network(), Margin()

    def forward(self, x, target):
        return self.margin(self.network(x), {"target": target})


@pytest.mark.parametrize("settings", [{"dp_size": 2}, {"pp_size": 2}, {"dp_size": 2, "zero_stage": 1}], ids=str)
def test_a_criterion_in_the_model_trains_alike_in_every_layout(settings):
    run = functools.partial(train, WithLoss, BATCHES, criterion=lambda outputs, inputs: outputs, num_microbatches=2)
    expected = run()["weights"]
    assert not torch.equal(expected["margin.classes"], WithLoss().margin.classes)
    assert_near(run(**settings)["weights"], expected, 1e-6)


class WithFactors(Network):
    """Returns weights as they are, for its criterion: log-variances, a temperature."""

    def __init__(self):
        super().__init__()
        self.log_variances = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, x):
        return {"logits": super().forward(x), "factors": {"log_variances": self.log_variances}}


def by_factors(outputs, inputs):
    factors = outputs["factors"]["log_variances"]
    error = nn.functional.cross_entropy(outputs["logits"], inputs["target"])
    return (-factors[0]).exp() * error + (-factors[1]).exp() * outputs["logits"].square().mean() + factors.sum()


@pytest.mark.parametrize(
    "settings",
    [{"pp_size": 2}, {"pp_size": 2, "schedule": "zb-v"}, {"tp_size": 2}, {"dp_size": 2, "zero_stage": 3}],
    ids=str,
)
def test_a_criterion_may_read_weights_that_the_forward_returns(settings):
    run = functools.partial(train, WithFactors, BATCHES, criterion=by_factors, num_microbatches=2)
    expected = run()["weights"]
    assert not torch.equal(expected["log_variances"], WithFactors().log_variances)
    assert_near(run(**settings)["weights"], expected, 1e-6)


def test_a_loop_may_read_weights_that_the_forward_returns():
    expected = train(WithFactors, BATCHES, criterion=by_factors, num_microbatches=1)["weights"]

    def run():
        booster = Booster(plugin=HybridParallelPlugin(tp_size=1, pp_size=1, num_microbatches=1, zero_stage=3))
        model = WithFactors()
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in BATCHES:
            booster.backward(by_factors(model(batch["x"]), batch), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        with booster.unsharded(model):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    for found in Loopback(2).run(run):
        assert_near(found, expected, 1e-6)
