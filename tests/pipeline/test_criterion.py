"""How criteria are written, and what they say of themselves."""

import functools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hybridpp.errors import ConfigError
from hybridpp.pipeline import (
    CriterionAdapter,
    ForwardSignature,
    LossReduction,
    SumTracer,
    detect_reduction,
    duplicate_samples,
    leaf_dims,
)

TAKES_X = ForwardSignature.of(lambda x: x, "Net")
X, Y = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 1, 1])


class Own(nn.Module):
    reduction = "sum"

    def forward(self, outputs, inputs):
        return (outputs - inputs[1]).sum()


class Renamed(nn.CrossEntropyLoss):
    pass


class Weighted(nn.Module):
    """A loss of a script's own, called as torch's are."""

    def forward(self, logits, target):
        return F.cross_entropy(logits, target)


class Unnamed(nn.Module):
    """The same, whose second argument has a name of its own."""

    def forward(self, logit, cls):
        return F.cross_entropy(logit, cls)


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], {"x": X, "labels": Y}])
@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(),
        Renamed(),
        F.cross_entropy,
        functools.partial(F.cross_entropy, ignore_index=-100),
        lambda outputs, targets: F.cross_entropy(outputs, targets),
        lambda logits, y_true: F.cross_entropy(logits, y_true),
        lambda p, gt: F.cross_entropy(p, gt),
        lambda p, label: F.cross_entropy(p, label),
        Weighted(),
        Unnamed(),
        lambda outputs, inputs: F.cross_entropy(
            outputs, (list(inputs.values()) if type(inputs) is dict else inputs)[1]
        ),
    ],
)
def test_the_ways_of_writing_a_criterion_give_one_loss(criterion, batch):
    loss = CriterionAdapter(criterion, TAKES_X)
    assert torch.equal(loss(X, batch), F.cross_entropy(X, Y))
    part = loss.model_inputs(batch)
    assert (part["x"] if isinstance(batch, dict) else part[0]) is X
    assert len(part) == 1
    assert not loss.sums


@pytest.mark.parametrize("batch", [{"x": X}, {"x": X, "y": Y, "z": Y}, (X, Y, Y)])
def test_a_target_that_is_not_clear_is_left_to_the_function(batch):
    given = []
    CriterionAdapter(lambda outputs, target: given.append(target), TAKES_X)(X, batch)
    assert given[0] is batch


def test_a_criterion_of_outputs_alone():
    assert CriterionAdapter(lambda outputs: outputs.mean(), TAKES_X)(X, (X, Y)) == X.mean()


def test_an_error_in_a_criterion_says_what_it_was_given():
    def picky(outputs, inputs):
        return outputs["logits"]

    with pytest.raises(IndexError) as raised:
        CriterionAdapter(picky, TAKES_X)(X, {"x": X, "more": (1, [Y])})
    assert raised.value.__notes__ == ["hybridpp: in picky(Tensor[4, 5], {x: Tensor[4, 5], more: (int, [Tensor[4]])})"]


def test_a_function_that_got_the_batch_for_a_target_is_told_how_to_get_it():
    with pytest.raises(TypeError) as raised:
        CriterionAdapter(lambda logits, z: F.cross_entropy(logits, z), TAKES_X)(X, (X, Y))
    assert raised.value.__notes__[1].startswith("hybridpp: 'z' is the whole batch. Call it target, to get the one")


def test_a_dicts_entry_of_the_targets_name_is_the_target():
    takes_labels = ForwardSignature.of(lambda x, labels=None: x, "Net")
    loss = CriterionAdapter(lambda outputs, labels: F.cross_entropy(outputs, labels), takes_labels)
    assert torch.equal(loss(X, {"x": X, "labels": Y}), F.cross_entropy(X, Y))


TAKES_MASK = ForwardSignature.of(lambda x, mask=None: x, "Net")


def unpacked(outputs, inputs):
    _, mask, y = inputs
    return F.cross_entropy(outputs, y) + 0 * len(mask)


@pytest.mark.parametrize(
    ("batch", "criterion", "taken"),
    [
        ((X, Y), lambda outputs, inputs: F.cross_entropy(outputs, inputs[1]), 1),
        ([X, Y], lambda outputs, inputs: F.cross_entropy(outputs, inputs[-1]), 1),
        ((X, X, Y), unpacked, 2),
        ((X, X, Y), nn.CrossEntropyLoss(), 2),
        ((X, X, Y), Weighted(), 2),
        ((X, [Y, 3]), lambda outputs, inputs: F.cross_entropy(outputs, inputs[1][0]), 1),
    ],
)
def test_a_target_is_no_optional_argument_of_the_forward(batch, criterion, taken):
    loss = CriterionAdapter(criterion, TAKES_MASK)
    assert loss.model_inputs(batch) == batch[:taken]
    assert torch.equal(loss(X, batch), F.cross_entropy(X, Y))
    assert loss.without_loss().model_inputs(batch) == batch[:taken]


@pytest.mark.parametrize(
    ("batch", "criterion", "text"),
    [
        (
            (X, Y),
            lambda outputs, inputs: F.mse_loss(outputs, inputs[0]),
            "neither the model nor the criterion reads entry 1 of a batch of 2: Net.forward could take it as its "
            "optional argument 'mask', and <lambda> as what the outputs are compared with. Say which entries the model "
            "gets, with booster.boost(..., model_inputs=[0]) or [0, 1];",
        ),
        (
            (X, Y, X),
            lambda outputs, inputs: F.cross_entropy(outputs, inputs[1]) * inputs[2].mean(),
            "both the model and the criterion read entry 1 of a batch of 3: Net.forward could",
        ),
    ],
)
def test_an_entry_that_both_or_neither_read_is_asked_for(batch, criterion, text):
    loss = CriterionAdapter(criterion, TAKES_MASK)
    loss.model_inputs(batch)
    with pytest.raises(ConfigError, match=re.escape(text)):
        loss(X, batch)


def test_entries_that_further_arguments_take_are_asked_for():
    loss = CriterionAdapter(lambda o, i: F.cross_entropy(o, i[1]), ForwardSignature.of(lambda *args: args[0], "Net"))
    assert loss.model_inputs((X, Y)) == (X, Y)
    with pytest.raises(ConfigError, match=r"both the model and the criterion read entry 1 of a batch of 2: .* further"):
        loss(X, (X, Y))


def test_the_target_of_several_inputs_is_the_last_entry():
    loss = CriterionAdapter(nn.MSELoss(), ForwardSignature.of(lambda a, b=None, c=None: a, "Net"))
    assert loss.model_inputs((X, Y, X)) == (X, Y)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            {"x": X},
            "got a dict of x, which are arguments of Net.forward except none. Select both, for example",
        ),
        ({"x": X, "labels": Y, "ids": Y}, "which are arguments of Net.forward except labels, ids."),
        (
            (X,),
            "CrossEntropyLoss takes a tensor and its target, which is the last entry of a tuple, or the one",
        ),
        (X, "got a single tensor."),
        ((X, X, Y), "got 3 entries, and a forward with 1 arguments."),
    ],
)
def test_a_target_that_nobody_can_find_is_asked_for(batch, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        CriterionAdapter(nn.CrossEntropyLoss(), TAKES_X).model_inputs(batch)


def test_torchs_losses_take_tensors():
    with pytest.raises(ConfigError, match=r"got a model that returns tuple instead of a tensor\. Select both"):
        CriterionAdapter(nn.MSELoss(), TAKES_X)((X,), (X, Y))


@pytest.mark.parametrize(
    "criterion",
    [
        lambda: 0,
        lambda outputs, inputs, scale: 0,
        lambda *, loss: 0,
        nn.CTCLoss(),
        nn.TripletMarginLoss(),
        F.gaussian_nll_loss,
    ],
)
def test_other_numbers_of_arguments_are_refused(criterion):
    with pytest.raises(ConfigError, match=r"a criterion must accept \(outputs, inputs\) or \(outputs\): "):
        CriterionAdapter(criterion, TAKES_X)


@pytest.mark.parametrize("criterion", [nn.MSELoss(reduction="none"), functools.partial(F.mse_loss, reduction="none")])
def test_a_criterion_that_does_not_reduce_is_refused(criterion):
    with pytest.raises(ConfigError, match=r"has reduction='none'\. Use 'mean' or 'sum', or reduce its result"):
        CriterionAdapter(criterion, TAKES_X)


def declared(outputs, inputs):
    return outputs.sum()


declared.reduction = "sum"


@pytest.mark.parametrize(
    ("criterion", "sums", "declares_reduction"),
    [
        (nn.MSELoss(reduction="sum"), True, True),
        (nn.KLDivLoss(reduction="batchmean"), False, True),
        (functools.partial(F.mse_loss, reduction="sum"), True, True),
        (Own(), True, True),
        (declared, True, True),
        (F.mse_loss, False, False),
        (lambda outputs, inputs: nn.MSELoss(reduction="sum")(outputs, inputs[1]) / 4, False, False),
    ],
)
def test_a_criterion_says_itself_that_it_adds_up(criterion, sums, declares_reduction):
    loss = CriterionAdapter(criterion, TAKES_X)
    assert (loss.sums, loss.declares_reduction) == (sums, declares_reduction)


WEIGHT = torch.tensor([1.0, 2.0, 0.5, 4.0, 3.0])
PARTLY = torch.tensor([[0, -100, 3], [1, 1, -100]])


@pytest.mark.parametrize(
    ("criterion", "target", "count"),
    [
        (nn.CrossEntropyLoss(), Y, 4),
        (nn.CrossEntropyLoss(ignore_index=1), Y, 2),
        (nn.CrossEntropyLoss(), PARTLY, 4),
        (nn.NLLLoss(weight=WEIGHT), Y, 9),
        (nn.CrossEntropyLoss(weight=WEIGHT), PARTLY, 9),
        (functools.partial(F.cross_entropy, weight=WEIGHT), PARTLY, 9),
        (F.nll_loss, PARTLY, 4),
        (nn.CrossEntropyLoss(weight=WEIGHT), X.softmax(1), 4),
    ],
)
def test_torch_class_losses_count_the_targets_they_average_over(criterion, target, count):
    assert float(CriterionAdapter(criterion, TAKES_X).num_items((X, target))) == count


def test_torchs_other_losses_count_samples():
    assert CriterionAdapter(nn.MSELoss(), TAKES_X).num_items is None


def verdict(criterion, outputs=None):
    """Of a criterion on outputs with a graph, one row per sample."""
    target = torch.zeros(4, 5)
    if outputs is None:
        outputs = {"logits": X.clone().requires_grad_() * 1.5}
    along = functools.partial(leaf_dims, dims=0)
    loss = criterion(outputs, target)
    return detect_reduction(
        loss, outputs, lambda: criterion(duplicate_samples(outputs, 4, along), duplicate_samples(target, 4, along))
    )


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (lambda o, t: F.mse_loss(o["logits"], t), LossReduction.MEAN),
        (lambda o, t: F.mse_loss(o["logits"], t, reduction="sum"), LossReduction.SUM),
        (lambda o, t: F.mse_loss(o["logits"], t, reduction="sum") * 0.1, LossReduction.SUM),
        (lambda o, t: F.mse_loss(o["logits"], t, reduction="sum") / o["logits"].shape[0], LossReduction.MEAN),
        (lambda o, t: (o["logits"] - t).abs().sum().float(), LossReduction.SUM),
        (
            lambda o, t: 0.5 * F.l1_loss(o["logits"], t, reduction="sum") + F.mse_loss(o["logits"], t, reduction="sum"),
            2,
        ),
        (lambda o, t: (o["logits"].abs().mean(1) * torch.full_like(t[:, 0], 1 / len(t))).sum(), LossReduction.MEAN),
        (lambda o, t: torch.stack([o["logits"].mean(), o["logits"].abs().mean()]).sum(), LossReduction.MEAN),
        (lambda o, t: 0 * o["logits"].sum(), LossReduction.MEAN),
        (lambda o, t: (o["logits"] - torch.zeros(4, 5)).abs().sum(), LossReduction.MEAN),
    ],
)
def test_a_sum_is_told_from_a_mean_by_number(criterion, expected):
    assert verdict(criterion) == expected


def test_rows_of_all_places_are_taken_twice_too():
    outputs = X.reshape(-1, 1).clone().requires_grad_() * 1.5
    assert verdict(lambda o, t: ((o - t.reshape(-1, 1)) ** 2).sum(), outputs) == LossReduction.SUM


def test_only_a_loss_that_ends_with_a_sum_is_computed_again():
    calls = []

    def criterion(outputs, target):
        calls.append(len(target))
        return F.mse_loss(outputs["logits"], target)

    verdict(criterion)
    assert calls == [4]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: F.mse_loss(x, x + 1, reduction="sum"), True),
        (lambda x: nn.CrossEntropyLoss(reduction="sum")(x, Y), True),
        (lambda x: 0.5 * (x**2).sum().float() + x.abs().sum(), True),
        (lambda x: torch.sum(x).reshape(()), True),
        (lambda x: torch.sum(input=x), True),
        (lambda x: x.sum() / 4, False),
        (lambda x: x.sum(0).mean(), False),
        (lambda x: x.mean(), False),
        (lambda x: x.mean().sum(), False),
    ],
)
def test_without_a_graph_the_calls_tell_a_sum(make, expected):
    with torch.no_grad(), SumTracer() as calls:
        loss = make(X)
    assert calls.is_sum(loss) == expected


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        (lambda x: (x**2).sum(), LossReduction.SUM_IN_MODEL),
        (lambda x: 0.1 * (x**2).sum(), LossReduction.SUM_IN_MODEL),
        (lambda x: (x**2).sum() / 4, LossReduction.MEAN),
        (lambda x: (x**2).mean(), LossReduction.MEAN),
        (lambda x: (x**2).mean() + 0.1 * x.sum(), LossReduction.MEAN),
    ],
)
def test_a_loss_of_the_models_own_is_judged_by_how_it_ends(inside, expected):
    x = X.clone().requires_grad_()
    assert verdict(lambda o, t: o["loss"], {"loss": inside(x), "logits": x * 2}) == expected
    assert verdict(lambda o, t: 2 * o["loss"], {"loss": inside(x), "logits": x * 2}) == expected
