"""Criteria of every kind, in every layout: the loss and the gradients of one process that sees the whole batch."""

import re
from array import array

import pytest
import torch
from support import assert_near, boosted, gradients_of, sgd, train
from torch import nn
from torch.nn import functional as F

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError, DataError

LAYOUTS = [
    {"num_microbatches": 1},
    {"num_microbatches": 4},
    {"num_microbatches": 3, "pp_size": 2},
    {"num_microbatches": 2, "dp_size": 2},
    {"num_microbatches": 2, "dp_size": 2, "pp_size": 2},
]


class Net(nn.Module):
    """Takes one tensor, and gives one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Summing(Net):
    """Computes its loss itself, and adds up."""

    def forward(self, x, y):
        return {"loss": F.mse_loss(super().forward(x), y, reduction="sum")}


def pairs(size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 6, generator=generator)


def classes(size=8):
    return pairs(size)[0], torch.tensor([0, 1, -100, 2, 3, -100, -100, 5])[:size]


def by_itself(model, loss_of, batch):
    """The loss and the gradients of a plain model on the whole batch."""
    loss = loss_of(model, *batch)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def sums(outputs, inputs):
    return ((outputs - inputs[1]) ** 2).sum()


def said_sum(outputs, inputs):
    return sums(outputs, inputs)


def inner_sum(outputs):
    return outputs["loss"]


said_sum.reduction = inner_sum.reduction = "sum"


def squared(model, x, y):
    return ((model(x) - y) ** 2).sum()


@pytest.mark.covering
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["torch", "function", "model"])
def test_what_adds_up_does_so_over_microbatches_and_replicas(kind, layout):
    criterion = {"torch": nn.MSELoss(reduction="sum"), "function": said_sum, "model": inner_sum}[kind]
    model = Summing if kind == "model" else Net
    loss, gradients = by_itself(Net(), squared, pairs())
    result = train(model, [pairs()], criterion=criterion, **layout)
    assert_near(result["gradients"], gradients, 1e-5)
    per_replica = [losses[0] for losses in result["losses"]][:: layout.get("pp_size", 1)]
    assert sum(per_replica) == pytest.approx(loss, rel=1e-5)


@pytest.mark.covering
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_torch_criterion_on_a_pair_counts_the_targets_not_ignored(layout, reduction):
    criterion = nn.CrossEntropyLoss(reduction=reduction, weight=torch.linspace(1, 2, 6))
    loss, gradients = by_itself(Net(), lambda model, x, y: criterion(model(x), y), classes())
    result = train(Net, [classes()], criterion=criterion, **layout)
    assert_near(result["gradients"], gradients, 1e-5)
    if "dp_size" not in layout:
        assert result["losses"][0][0] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_entries_that_the_model_does_not_take_are_the_criterions(layout):
    def criterion(outputs, inputs):
        return F.mse_loss(outputs, inputs["wanted"])

    def batch():
        x, y = pairs()
        return {"x": x, "wanted": y}

    _, gradients = by_itself(Net(), lambda model, x, y: F.mse_loss(model(x), y), pairs())
    assert_near(train(Net, [batch()], criterion=criterion, **layout)["gradients"], gradients, 1e-5)
    assert_near(train(Net, [batch()], criterion=nn.MSELoss(), **layout)["gradients"], gradients, 1e-5)


def everyone_raises(error, text, criterion, batch, model=Net, **settings):
    def run():
        settings.setdefault("num_microbatches", 2)
        booster, net, optimizer = boosted(model(), sgd, pairs(2) if model is Summing else pairs(2)[:1], **settings)
        before = {name: parameter.clone() for name, parameter in net.named_parameters()}
        with pytest.raises(error, match=re.escape(text)):
            booster.execute_pipeline(iter([batch]), net, criterion, optimizer)
        optimizer.step()
        assert_near({name: parameter.detach() for name, parameter in net.named_parameters()}, before, 0)
        return True

    assert all(Loopback(settings.get("pp_size", 1) * 2).run(run))


@pytest.mark.parametrize("pp_size", [1, 2])
def test_an_undeclared_sum_is_refused_on_every_rank_before_the_step(pp_size):
    text = "the criterion returns a sum over samples without declaring it: for twice the samples it returned twice the"
    everyone_raises(ConfigError, text, sums, pairs(), pp_size=pp_size)


@pytest.mark.parametrize("pp_size", [1, 2])
def test_in_evaluation_a_sum_that_does_not_say_so_is_refused_too(pp_size):
    calls = array("i")  # a list would be put back after calls that only look at the loss

    def mean(outputs, inputs):
        calls.append(len(outputs))
        return F.mse_loss(outputs, inputs[1])

    def run():
        booster, model, _ = boosted(Net(), None, pairs(2)[:1], num_microbatches=2, pp_size=pp_size)
        with torch.no_grad():
            with pytest.raises(ConfigError, match="returns a sum over samples without declaring it"):
                booster.execute_pipeline(iter([pairs()]), model, sums)
            booster.execute_pipeline(iter([pairs()]), model, mean)
            one = booster.execute_pipeline(iter([pairs(1)]), model, sums)["loss"].item()
            return booster.execute_pipeline(iter([pairs()]), model, said_sum)["loss"].item(), one

    with torch.no_grad():
        expected = squared(Net(), *pairs()).item(), squared(Net(), *pairs(1)).item()
    for losses in Loopback(pp_size).run(run):
        assert losses == pytest.approx(expected)
    # The first micro-batch is looked at: again with its inputs and those of the other one, as numbers are equal; all
    # samples and halves; the same with outputs that are unlike for each sample; samples of two kinds, of the first step
    # and two kinds of copies, and parts of them.
    assert [*calls] == [4, 4, 4, *[4, 2, 2] * 2, *[6, 2, 4, 5, 3, 2] * 3, 4]


def test_a_sum_is_refused_until_it_says_so():
    def run():
        def criterion(outputs, inputs):
            return sums(outputs, inputs)

        booster, model, optimizer = boosted(Net(), sgd, None, num_microbatches=2)
        for _ in range(2):
            with pytest.raises(ConfigError, match="returns a sum over samples without declaring it"):
                booster.execute_pipeline(iter([pairs()]), model, criterion, optimizer)
        criterion.reduction = "sum"
        return booster.execute_pipeline(iter([pairs()]), model, criterion, optimizer)["loss"].item()

    assert Loopback(1).run(run) == [pytest.approx(squared(Net(), *pairs()).item())]


@pytest.mark.parametrize("layout", LAYOUTS[2:4], ids=str)
def test_boost_may_say_that_criteria_add_up(layout):
    loss, gradients = by_itself(Net(), squared, pairs())

    def run():
        settings = {name: value for name, value in layout.items() if name != "dp_size"}
        booster = Booster(plugin=HybridParallelPlugin(**settings), device="cpu")
        model = Net()
        parts = booster.boost(model, sgd(model.parameters()), sample=pairs(2), loss_reduction="sum", model_inputs=0)
        half = layout.get("dp_size", 1)
        rows = slice(None) if half == 1 else slice(4 * booster.plugin.layout.here.dp, None)
        batch = tuple(part[rows][: 8 // half] for part in pairs())
        found = booster.execute_pipeline(iter([batch]), parts.model, sums, parts.optimizer)["loss"].item()
        return found, gradients_of(booster, parts.model)

    ranks = Loopback(layout.get("pp_size", 1) * layout.get("dp_size", 1)).run(run)
    assert_near({name: one for _, found in ranks for name, one in found.items()}, gradients, 1e-5)
    assert sum(found for found, _ in ranks) == pytest.approx(loss * layout.get("pp_size", 1), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "criterion", "message"),
    [
        ({"loss_reduction": "add"}, None, "loss_reduction must be 'mean', 'sum' or None: got loss_reduction='add'"),
        ({"loss_reduction": "sum"}, nn.MSELoss(), "MSELoss has reduction='mean', and boost got loss_reduction='sum'"),
        ({"loss_reduction": "mean"}, said_sum, "said_sum has reduction='sum', and boost got loss_reduction='mean'"),
        ({"model_inputs": []}, None, "model_inputs must be names or indices"),
    ],
)
def test_a_contradicting_reduction_is_refused(settings, criterion, message):
    model = Net()
    booster = Booster(plugin=HybridParallelPlugin(), device="cpu")
    with pytest.raises(ConfigError, match=message):
        booster.boost(model, sgd(model.parameters()), criterion, **settings)
    assert vars(model).keys() == vars(Net()).keys()


class Keywords(Net):
    """Names no argument, so that it may get anything."""

    def forward(self, **inputs):
        return super().forward(inputs["x"])


@pytest.mark.parametrize("pp_size", [1, 2])
def test_the_target_of_a_torch_loss_is_what_the_model_does_not_get(pp_size):
    x, y = pairs()
    loss, _ = by_itself(Net(), lambda model, x, y: F.mse_loss(model(x), y), (x, y))

    def run():
        booster = Booster(plugin=HybridParallelPlugin(pp_size=pp_size, num_microbatches=2), device="cpu")
        found = []
        for selection, batch in (("x", {"x": x, "y": y}), ({"x": 1}, (y, x))):
            model, criterion = Keywords(), nn.MSELoss()
            parts = booster.boost(model, sgd(model.parameters()), criterion, sample=batch, model_inputs=selection)
            step = booster.execute_pipeline(iter([batch]), parts.model, criterion, parts.optimizer)
            found.append(step["loss"].item())
            three = {**batch, "z": y} if isinstance(batch, dict) else (*batch, y)
            with pytest.raises(ConfigError, match="a batch of which model_inputs leaves 2 entries"):
                booster.execute_pipeline(iter([three]), parts.model, criterion, parts.optimizer)
        return found

    for found in Loopback(pp_size).run(run):
        assert found == pytest.approx([loss, loss])


def test_one_microbatch_in_all_may_hold_any_sum():
    _, gradients = by_itself(Net(), squared, pairs())
    assert_near(train(Net, [pairs()], criterion=sums, num_microbatches=1)["gradients"], gradients)


class Adding(Net):
    """Adds up without a loss of torch's."""

    def forward(self, x, y):
        return {"loss": (super().forward(x) - y).square().sum()}


class Transcribing(Net):
    """CTC of sequences of 8, with labels of ragged lengths, as speech models compute it."""

    def __init__(self, reduction):
        super().__init__()
        self.reduction = reduction

    def forward(self, x, labels):
        log_probs = super().forward(x).log_softmax(-1).transpose(0, 1)
        lengths = (labels >= 0).sum(-1)
        given = torch.full((len(x),), x.shape[1])
        flat = labels.masked_select(labels >= 0)
        return {"loss": F.ctc_loss(log_probs, flat, given, lengths, reduction=self.reduction, zero_infinity=True)}


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[3], LAYOUTS[4]], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_reduction_of_torchs_loss_in_the_model_is_what_it_says(reduction, layout, caplog):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(1, 6, (8, 4), generator=generator)
    labels[torch.arange(4) >= torch.tensor([1, 4, 2, 3, 3, 1, 4, 2])[:, None]] = -100
    batch = torch.randn(8, 8, 6, generator=generator), labels
    loss, gradients = by_itself(Transcribing(reduction), lambda model, x, y: model(x, y)["loss"], batch)
    result = train(lambda: Transcribing(reduction), [batch], criterion=lambda outputs: outputs["loss"], **layout)
    assert_near(result["gradients"], gradients, 1e-5)
    per_replica = [losses[0] for losses in result["losses"]][:: layout.get("pp_size", 1)]
    divisor = len(per_replica) if reduction == "mean" else 1
    assert sum(per_replica) / divisor == pytest.approx(loss, rel=1e-5)
    assert not caplog.records


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_weight_of_l1_loss_counts_while_the_first_loss_is_watched(reduction):
    weight = torch.arange(48.0).view(8, 6)

    def criterion(outputs, inputs):
        return F.l1_loss(outputs, inputs[1], reduction=reduction, weight=inputs[2])

    criterion.reduction = reduction
    loss, gradients = by_itself(Net(), lambda model, *batch: criterion(model(batch[0]), batch), (*pairs(), weight))
    result = train(Net, [(*pairs(), weight)], criterion=criterion, num_microbatches=4)
    assert result["losses"][0][0] == pytest.approx(loss, rel=1e-5)
    assert_near(result["gradients"], gradients, 1e-5)


def test_a_sum_that_the_model_makes_is_warned_of_once(caplog):
    train(Adding, [pairs(), pairs(), pairs()], criterion=lambda outputs: outputs["loss"], num_microbatches=2)
    (record,) = caplog.records
    assert "the loss that Adding computes ends with a sum, and it is averaged" in record.getMessage()


@pytest.mark.parametrize(
    ("error", "text", "criterion", "batch"),
    [
        (ConfigError, "a criterion must accept (outputs, inputs) or (outputs)", lambda a, b, c: 0, pairs()),
        (ConfigError, "has reduction='none'. Use 'mean' or 'sum'", nn.MSELoss(reduction="none"), pairs()),
        (ConfigError, "MSELoss takes a tensor and its target", nn.MSELoss(), {"x": pairs()[0]}),
        (DataError, "the forward of Net needs 'x': got y, z.", sums, dict(zip("yz", pairs(), strict=True))),
    ],
)
@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_criterion_that_is_not_callable_is_refused_on_every_rank_first(error, text, criterion, batch, pp_size):
    everyone_raises(error, text, criterion, batch, pp_size=pp_size)


def test_boost_cuts_by_a_loaders_pairs():
    def run():
        plugin = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32")
        dataset = list(zip(*pairs(), strict=True))
        model = Net()
        optimizer, loader = sgd(model.parameters()), plugin.prepare_dataloader(dataset, batch_size=8)
        parts = Booster(plugin=plugin, device="cpu").boost(model, optimizer, nn.MSELoss(), loader)
        booster = Booster(plugin=plugin, device="cpu")
        booster.execute_pipeline(iter(loader), parts.model, parts.criterion, parts.optimizer)
        return gradients_of(booster, parts.model)

    _, expected = by_itself(Net(), lambda model, x, y: F.mse_loss(model(x), y), pairs())
    first, second = Loopback(2).run(run)
    assert_near(first | second, expected)
