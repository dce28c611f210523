"""How criteria are written, and what they say of themselves."""

import functools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hybridpp.errors import ConfigError
from hybridpp.pipeline import CriterionAdapter, ForwardSignature

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
            "got a dict of x, all arguments of Net.forward. Select both, for example",
        ),
        ({"x": X, "labels": Y, "ids": Y}, "of which labels, ids are no arguments of Net.forward."),
        (
            (X,),
            "CrossEntropyLoss takes a tensor and its target, which is the last entry of a batch that is a tuple",
        ),
        (X, "got a single tensor."),
        ((X, X, Y), "got 3 entries, and a forward with 1 arguments."),
    ],
)
def test_a_target_that_nobody_can_find_is_asked_for(batch, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        CriterionAdapter(nn.CrossEntropyLoss(), TAKES_X).model_inputs(batch)


def test_outputs_with_other_rows_than_the_target_point_to_batch_dims():
    loss = CriterionAdapter(nn.CrossEntropyLoss(), TAKES_X)
    with pytest.raises(ValueError, match="to match target batch_size") as caught:
        loss(torch.zeros(8, 3), {"x": torch.zeros(4, 8), "labels": torch.zeros(4, dtype=torch.long)})
    assert any("outputs have 8 rows, and the micro-batch 4." in note for note in caught.value.__notes__)


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), lambda outputs, labels: F.cross_entropy(outputs, labels)])
def test_texts_of_a_batch_are_no_target(criterion):
    batch = {"x": X, "labels": Y, "names": [f"{n}.png" for n in range(len(X))]}
    loss = CriterionAdapter(criterion, TAKES_X)
    assert set(loss.model_inputs(batch)) == {"x"}
    assert loss(X, batch) == F.cross_entropy(X, Y)


@pytest.mark.parametrize(
    "criterion",
    [
        lambda y_true, y_pred: (y_true - y_pred).square().mean(),
        lambda labels, logits: F.cross_entropy(logits, labels),
        lambda y, y_hat: F.mse_loss(y_hat, y),
    ],
)
def test_a_criterion_that_takes_the_target_first_is_refused(criterion):
    with pytest.raises(
        ConfigError, match=r"the model's outputs, then the target: got <lambda>\(.*loss\(target, outputs"
    ):
        CriterionAdapter(criterion, TAKES_X)


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


def test_an_unknown_reduction_of_a_function_is_refused():
    def misspelt(outputs, inputs):
        return outputs.mean()

    misspelt.reduction = "Mean"
    text = r"the reduction of a criterion must be 'mean' or 'sum': got .*misspelt\.reduction='Mean'"
    with pytest.raises(ConfigError, match=text):
        CriterionAdapter(misspelt, TAKES_X)


def declared(outputs, inputs):
    return outputs.sum()


declared.reduction = "sum"


class Inheriting(nn.CrossEntropyLoss):
    def forward(self, outputs, inputs):
        return outputs.mean()


class Optional(nn.Module):
    """Has an argument like that of torch's losses."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs, inputs):
        return getattr(outputs, self.reduction)()


@pytest.mark.parametrize(
    ("criterion", "sums", "declares_reduction"),
    [
        (nn.MSELoss(reduction="sum"), True, True),
        (nn.KLDivLoss(reduction="batchmean"), False, False),
        (functools.partial(F.mse_loss, reduction="mean"), False, False),
        (Inheriting(), False, False),
        (Optional(), False, False),
        (Optional("sum"), True, True),
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


def test_the_mean_of_a_criterion_with_such_an_argument_is_said_to_boost():
    assert CriterionAdapter(Optional(), TAKES_X, "mean").declares_reduction
