"""Losses and gradients are those of one process with the whole batch, whatever the loss is a mean over."""

import functools
import re
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hybridpp_plugins.criterion_check import CriterionCheck
from hybridpp_plugins.step_losses import StepLosses
from support import assert_near, boosted, first_microbatch, gradients_of, replica_part, sgd, train
from torch import nn
from torch.nn import functional as F

from hybridpp.cluster import Loopback
from hybridpp.config import PipelineConfig
from hybridpp.errors import ConfigError, DataError
from hybridpp.pipeline import CriterionAdapter, ForwardSignature, LossReduction, ReplicaCounts, loss_graph, split_batch

ROWS, LENGTH, VOCABULARY = 8, 6, 11
LENGTHS = [2, 1, 6, 3, 4, 6, 6, 5]


def head_then_loss(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden, weight), target)


# Torch 2.13 is the first that has it.
fused_loss = getattr(F, "linear_cross_entropy", head_then_loss)


class Head(nn.Module):
    """Blocks over token embeddings, and the losses that models compute: by the name of the head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, VOCABULARY)
        self.second = nn.Linear(8, 3)

    def forward(self, ids, labels=None, kinds=None, starts=None, ends=None, num_items_in_batch=None):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        logits = self.head(hidden)
        found = SimpleNamespace(logits=logits, pooled=self.second(hidden.mean(1)), hidden=hidden)
        losses = {}
        if labels is not None:
            shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
            flat, wanted = logits.view(-1, VOCABULARY).float(), shifted.view(-1)
            reduction = "mean" if num_items_in_batch is None else "sum"
            causal = F.cross_entropy(flat, wanted, ignore_index=-100, reduction=reduction)
            losses["causal"] = causal if num_items_in_batch is None else causal / num_items_in_batch
            losses["cut"] = nn.CrossEntropyLoss()(
                logits[..., :-1, :].reshape(-1, VOCABULARY), labels[..., 1:].flatten()
            )
            losses["masked"] = F.cross_entropy(logits.transpose(1, 2), labels)
            losses["two"] = losses["masked"] + F.cross_entropy(found.pooled, kinds)
            losses["fused"] = fused_loss(
                hidden.flatten(0, 1), self.second.weight, labels.where(labels < 0, labels % 3).flatten()
            )
            start, end = logits[..., 0], logits[..., 1]
            losses["span"] = (
                F.cross_entropy(start, starts.clamp(0, LENGTH), ignore_index=LENGTH)
                + F.cross_entropy(end, ends.clamp(0, LENGTH), ignore_index=LENGTH)
            ) / 2
        return {"logits": found.logits, "pooled": found.pooled, "hidden": found.hidden, "losses": losses}


def batch(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (len(lengths), LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    return {
        "ids": ids,
        "labels": ids.masked_fill(~mask, -100),
        "kinds": ids[:, 0] % 3,
        "starts": torch.tensor([0, 9, 2, 3, 9, 9, 1, 0])[: len(lengths)],
        "ends": torch.tensor([1, 9, 2, 3, 5, 9, 1, 0])[: len(lengths)],
        "mask": mask.float(),
        "weights": torch.linspace(0.1, 1.0, len(lengths)),
    }


def per_token(o, i):
    return F.cross_entropy(o["logits"].transpose(1, 2), i["labels"].clamp(min=0), reduction="none")


def rows_in_turn(o, i):
    return sum(F.cross_entropy(one, wanted) for one, wanted in zip(o["logits"], i["labels"], strict=True)) / len(
        o["logits"]
    )


def lovasz(logits, wanted):
    """A part of the Lovasz hinge: errors in their order, weighed by what fraction of the wanted ones is before them."""
    errors, order = torch.sort(1 - logits * (2 * wanted - 1), descending=True)
    number = wanted[order].sum()
    return torch.dot(F.relu(errors), 1 - (number - wanted[order].cumsum(0)) / (number + 1))


def ranked_rows(o, i):
    rows = o["logits"][..., 0]
    return sum(lovasz(rows[row], i["mask"][row]) for row in range(len(rows))) / len(rows)


CLASS_WEIGHTS = torch.linspace(0.5, 2, VOCABULARY)

HEADS = {
    "causal": lambda o: o["losses"]["causal"],
    "causal, cut": lambda o: o["losses"]["cut"],
    "token classes": lambda o: o["losses"]["masked"],
    "tokens and rows": lambda o: o["losses"]["two"],
    "fused": lambda o: o["losses"]["fused"],
    "span": lambda o: o["losses"]["span"],
    "function": lambda o, i: F.cross_entropy(o["logits"].flatten(0, 1), i["labels"].flatten()),
    "class weights": lambda o, i: F.cross_entropy(
        o["logits"].flatten(0, 1), i["labels"].flatten(), weight=CLASS_WEIGHTS, label_smoothing=0.1
    ),
    "masked mean": lambda o, i: (per_token(o, i) * i["mask"]).sum() / i["mask"].sum(),
    "masked mean, limited": lambda o, i: (per_token(o, i) * i["mask"]).sum() / i["mask"].sum().clamp(min=1),
    "chosen": lambda o, i: F.cross_entropy(o["logits"][i["labels"] != -100], i["labels"][i["labels"] != -100]),
    "chosen mean": lambda o, i: per_token(o, i)[i["mask"] > 0].mean(),
    "item": lambda o, i: (per_token(o, i) * i["mask"]).sum() / i["mask"].sum().item(),
    "two kinds of rows": lambda o, i: torch.cat(
        [o["pooled"][i["weights"] > 0.5, 0].square(), o["pooled"][i["weights"] <= 0.5].sigmoid().sum(1)]
    ).mean(),
    "means of rows": lambda o, i: ((per_token(o, i) * i["mask"]).sum(1) / i["mask"].sum(1)).mean(),
    "rows in turn": rows_in_turn,
    "ranked rows": ranked_rows,
    "weighted rows": lambda o, i: (per_token(o, i).mean(1) * i["weights"]).sum() / i["weights"].sum(),
    "weights of mean 1": lambda o, i: (
        per_token(o, i).mean(1) * (i["weights"] / i["weights"].sum() * len(i["weights"]))
    ).mean(),
    "elements": lambda o, i: F.mse_loss(o["hidden"], F.one_hot(i["ids"] % 8, 8).float()) / 3,
    "numel": lambda o, i: per_token(o, i).sum() / i["labels"].numel(),
    "size": lambda o, i: per_token(o, i).sum() / (o["logits"].shape[0] * LENGTH),
    "binary": lambda o, i: F.binary_cross_entropy_with_logits(o["logits"][..., 0], i["mask"]),
    "two terms": lambda o, i: o["losses"]["causal"] + 0.1 * o["pooled"].square().mean(),
    "terms and a constant": lambda o, i: (
        F.cross_entropy(o["logits"].flatten(0, 1), i["labels"].flatten())
        + 0.3 * F.cross_entropy(o["pooled"], i["kinds"])
        + 2.0
    ),
    "stacked": lambda o, i: torch.stack([o["pooled"].abs().mean(), o["losses"]["causal"]]).sum(),
    "stacked, weighted": lambda o, i: (
        torch.stack([o["pooled"].abs().mean(), o["losses"]["causal"]]) @ torch.tensor([0.3, 2.0])
    ),
}

LAYOUTS = [
    {"num_microbatches": 1},
    {"num_microbatches": 8},
    {"num_microbatches": 3, "pp_size": 2},
    {"num_microbatches": 2, "dp_size": 2},
    {"num_microbatches": 2, "dp_size": 4},
    {"num_microbatches": 2, "dp_size": 2, "pp_size": 2},
]


def alone(criterion, whole):
    """The loss and the gradients of one process."""
    model = Head()
    outputs = model(**{name: whole[name] for name in ("ids", "labels", "kinds", "starts", "ends")})
    loss = criterion(outputs, whole) if criterion.__code__.co_argcount == 2 else criterion(outputs)
    loss.backward()
    zeros = torch.zeros(())
    return loss.item(), {name: zeros.expand_as(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def everywhere(heads, settings, whole):
    """By head: each rank's losses of two evaluations and steps, in turn; and the gradients of the steps."""
    size = settings.get("dp_size", 1)
    given = {name: value for name, value in settings.items() if name != "dp_size"}

    def run():
        part = replica_part(whole, 0, size)
        booster, model, optimizer = boosted(Head(), sgd, {name: value[:1] for name, value in part.items()}, **given)
        part = replica_part(whole, booster.plugin.layout.here.dp, size)
        found = {}
        for name, criterion in heads.items():
            losses = []
            for _ in range(2):
                with torch.no_grad():
                    losses.append(booster.execute_pipeline(iter([part]), model, criterion)["loss"].item())
                optimizer.zero_grad()
                losses.append(booster.execute_pipeline(iter([part]), model, criterion, optimizer)["loss"].item())
                if len(losses) == 2:
                    first = gradients_of(booster, model)
            found[name] = losses, first, gradients_of(booster, model)
        return found

    return Loopback(size * settings.get("pp_size", 1) * settings.get("tp_size", 1)).run(run)


def merged_over(ranks, name, which):
    """The gradients of a head, of all ranks."""
    merged = {}
    for rank in ranks:
        merged.update(rank[name][which])
    return merged


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_losses_and_gradients_are_those_of_the_whole_batch(settings):
    whole = batch()
    ranks = everywhere(HEADS, settings, whole)
    for name, criterion in HEADS.items():
        loss, gradients = alone(criterion, whole)
        for which in (1, 2):
            merged = merged_over(ranks, name, which)
            assert merged.keys() == gradients.keys()
            for parameter, gradient in gradients.items():
                assert (merged[parameter] - gradient).abs().max() <= 1e-6, (name, parameter, which)
        for replica, rank in enumerate(ranks[:: settings.get("pp_size", 1)]):
            size = settings.get("dp_size", 1)
            own = loss if size == 1 else alone(criterion, replica_part(whole, replica, size))[0]
            if own == own:  # a replica without items of a term reports the other terms
                assert rank[name][0] == pytest.approx([own] * 4, rel=1e-6), name


X, Y = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 1, 1])


def test_so_they_are_of_logits_that_are_divided_by_vocabulary():
    whole, heads = batch(), {name: HEADS[name] for name in ("causal, cut", "two terms")}
    divided = {"tp_size": 2, "tensor_parallel_plan": {"head": "gathered_column"}}
    for rank in everywhere(heads, {"num_microbatches": 3, **divided}, whole):
        for name, criterion in heads.items():
            loss, gradients = alone(criterion, whole)
            assert rank[name][0] == pytest.approx([loss] * 4, rel=1e-6), name
            for parameter in gradients.keys() - {"head.weight", "head.bias"}:
                assert (rank[name][1][parameter] - gradients[parameter]).abs().max() <= 1e-6, (name, parameter)


class Packed(nn.Module):
    """The loss of a row of sequences, as transformers makes it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids, labels, cu_seq_lens_q):
        logits = self.head(self.embedding(input_ids))
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return {"logits": logits, "loss": F.cross_entropy(logits.view(-1, VOCABULARY), shifted.view(-1))}


def packed(lengths):
    """As DataCollatorWithFlattening makes it."""
    rows = [torch.arange(2, 2 + length) % VOCABULARY for length in lengths]
    return {
        "input_ids": torch.cat(rows)[None],
        "labels": torch.cat([torch.cat([torch.tensor([-100]), row[1:]]) for row in rows])[None],
        "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0).int(),
    }


@pytest.mark.parametrize("in_criterion", [False, True], ids=["the model's", "a criterion's"])
@pytest.mark.parametrize("settings", [{"num_microbatches": 2}, {"pp_size": 2, "num_microbatches": 4}, {"dp_size": 2}])
def test_each_token_of_a_packed_row_counts_once(settings, in_criterion):
    def criterion(outputs, inputs):
        own = F.cross_entropy(outputs["logits"][0, :-1], inputs["labels"][0, 1:])
        return own if in_criterion else outputs["loss"]

    lengths, size = (3, 7, 2, 5), settings.get("dp_size", 1)
    whole = Packed()
    expected = criterion(whole(**packed(lengths)), packed(lengths))
    expected.backward()

    def run():
        given = {name: value for name, value in settings.items() if name != "dp_size"}
        booster, model, optimizer = boosted(Packed(), sgd, packed((2,)), **given)
        at = booster.plugin.layout.here.dp * 4 // size
        result = booster.execute_pipeline(iter([packed(lengths[at : at + 4 // size])]), model, criterion, optimizer)
        return result["loss"].item(), result["num_items"], gradients_of(booster, model)

    ranks = Loopback(size * settings.get("pp_size", 1)).run(run)
    parts = {(loss, float(count)) for loss, count, _ in ranks}
    assert sum(count for _, count in parts) == sum(lengths) - 4
    assert sum(loss * count for loss, count in parts) / (sum(lengths) - 4) == pytest.approx(expected.item())
    for *_, gradients in ranks:
        for name, gradient in gradients.items():
            assert (gradient - whole.get_parameter(name).grad).abs().max() <= 1e-6, name


def verdict(criterion, inside=None, target=None, rows=4, x=X):
    """Of a criterion, on outputs with one row per sample; ``inside``: makes the model's own loss."""
    inputs = {"x": x[:rows], "target": torch.zeros(rows, 5) if target is None else target}
    batch = split_batch(inputs, num_microbatches=1, microbatch_size=None)
    check = CriterionCheck()
    losses = StepLosses(
        CriterionAdapter(criterion, ForwardSignature.of(lambda x: x, "Net")),
        batch,
        ReplicaCounts([float(rows)], [0.0], [()]),
        check=check,
        pipeline=PipelineConfig(num_microbatches=1),
        group=None,
        scale=1.0,
        device=torch.device("cpu"),
    )
    weight = torch.full((5,), 1.5, requires_grad=True)
    with losses.watched(0, inputs, []):
        x = inputs["x"] * weight
        outputs = {"logits": x} if inside is None else {"logits": x, "loss": inside(x)}
        loss = losses(outputs, inputs)
        losses.inspect(0, loss, outputs, inputs)
    return check.reduction


def contrastive(o, _):
    return F.cross_entropy(o["logits"] @ o["logits"].T, torch.arange(len(o["logits"])))


def balanced(shares, counts):
    return (shares.mean(0) * counts / len(shares)).sum()


def chosen_experts(x):
    """How many rows choose each expert, two of them each, as Mixtral counts them with a mask."""
    chosen = x.topk(2, 1).indices.reshape(-1)
    return torch.zeros(5).scatter_add_(0, chosen, torch.ones(len(x)).repeat_interleave(2))


def in_pairs(rewards):
    return -F.logsigmoid(rewards[:2] - rewards[2:]).mean()


def standardised(o, i):
    return ((o["logits"] - o["logits"].mean(0)) / o["logits"].std(0) - i["target"] - 1).abs().mean()


def paired(similarities):
    return -(similarities.exp() / similarities.exp().sum(0)).diagonal().log().mean()


def standard(values):
    """Standardised over the samples, as advantages of reinforcement learning."""
    return (values - values.mean()) / values.std()


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (lambda o, i: F.mse_loss(o["logits"], i["target"]), LossReduction.MEAN),
        (lambda o, i: F.mse_loss(o["logits"], i["target"], reduction="sum"), LossReduction.SUM),
        (lambda o, i: F.mse_loss(o["logits"], i["target"], reduction="sum") * 0.1, LossReduction.SUM),
        (lambda o, i: F.mse_loss(o["logits"], i["target"], reduction="sum") / len(o["logits"]), LossReduction.MEAN),
        (lambda o, i: (o["logits"] - i["target"]).abs().sum().float(), LossReduction.SUM),
        (lambda o, i: 0.5 * o["logits"].abs().sum() + o["logits"].square().sum(), LossReduction.SUM),
        (
            lambda o, i: (o["logits"].abs().mean(1) * torch.full((len(i["x"]),), 1 / len(i["x"]))).sum(),
            LossReduction.MEAN,
        ),
        (lambda o, i: torch.stack([o["logits"].mean(), o["logits"].abs().mean()]).sum(), LossReduction.MEAN),
        (lambda o, i: 0 * o["logits"].sum(), LossReduction.MEAN),
        (lambda o, i: (o["logits"] - torch.zeros(4, 5)).abs().mean(), LossReduction.MEAN),
        (lambda o, i: o["logits"].abs().mean() + 0.1 * o["logits"].square().sum(), LossReduction.MEAN),
        (lambda o, i: torch.rand(()) + o["logits"].mean(), LossReduction.MEAN),
        (lambda o, i: sum(one.abs().mean() for one in o["logits"]) / len(o["logits"]), LossReduction.MEAN),
        (contrastive, LossReduction.COUPLED),
        (standardised, LossReduction.COUPLED),
        (lambda o, i: (o["logits"].mean(1) * standard(i["x"][:, 0])).mean(), LossReduction.COUPLED),
        (lambda o, i: F.mse_loss(o["logits"], i["target"]).sqrt(), LossReduction.COUPLED),
        (lambda o, i: -o["logits"].softmax(0)[:, 0].log().mean(), LossReduction.COUPLED),
        (
            lambda o, i: (o["logits"].mean(1) * (i["x"][:, 0] / i["x"][:, 0].norm() * len(i["x"]))).mean(),
            LossReduction.COUPLED,
        ),
        (lambda o, i: sum(one.square().mean().sqrt() for one in o["logits"]) / len(o["logits"]), LossReduction.MEAN),
        (lambda o, i: (sum(one.square().mean() for one in o["logits"]) / 4).sqrt(), LossReduction.COUPLED),
        (lambda o, i: o["logits"][0].square().mean() * o["logits"][1].square().mean(), LossReduction.COUPLED),
        (lambda o, i: o["logits"].abs().max(), LossReduction.COUPLED),
        (lambda o, i: torch.cdist(o["logits"], o["logits"]).mean(), LossReduction.COUPLED),
        (lambda o, i: 1 - 2 * (o["logits"].sigmoid() * 0.3).sum() / o["logits"].sigmoid().sum(), LossReduction.COUPLED),
        (lambda o, i: o["logits"].abs().sum() / i["x"].abs().max(), LossReduction.COUPLED),
    ],
)
def test_a_loss_that_is_no_mean_over_items_is_told_by_number(criterion, expected):
    assert verdict(criterion) == expected


class Running:
    """A criterion with a mean of earlier targets, or of its calls."""

    def __init__(self, is_count, is_used=True):
        self.is_count, self.is_used, self.mean, self.last = is_count, is_used, 0.0, None

    def __call__(self, o, i):
        loss = self.last = (o["logits"] - self.is_used * self.mean).square().mean()
        self.mean = 0.9 * self.mean + (0.1 if self.is_count else 0.1 * i["x"].mean().item())
        return loss


def test_a_loss_that_depends_on_what_its_criterion_keeps_is_told():
    assert verdict(Running(False)) == LossReduction.KEPT
    assert verdict(Running(False, is_used=False)) == LossReduction.MEAN
    assert verdict(Running(True)) == LossReduction.MEAN, "it counts steps: there is one micro-batch"


def test_and_so_is_a_count_of_its_calls_where_a_step_has_several():
    class Annealed:
        steps = 0

        def __call__(self, outputs, inputs):
            self.steps += 1
            return outputs["logits"].square().mean() / self.steps

    with pytest.raises(ConfigError, match=r"keeps from call to call \(Annealed.steps\)"):
        everywhere({"annealed": Annealed()}, {"num_microbatches": 2}, batch())


def test_equal_losses_of_all_samples_do_not_hide_how_they_are_weighted():
    weights = torch.arange(20.0).view(4, 5)

    def criterion(o, i):
        losses = F.cross_entropy(o["logits"], i["target"][:, 0].long() % 5, reduction="none")
        return (losses * i["target"][:, 0].softmax(0)).sum()

    assert verdict(criterion, target=weights, x=torch.zeros(4, 5)) == LossReduction.COUPLED


def test_a_divisor_that_is_no_sum_over_samples_is_found_where_halves_agree():
    def explained(o, i):
        around = i["target"] - i["target"].mean()
        return (o["logits"] - i["target"]).square().sum() / around.square().sum()

    target = torch.tensor([1.0, 2.0, 1.0, 2.02])[:, None].expand(4, 5)
    assert verdict(explained, target=target) == LossReduction.COUPLED


def signs(i):
    return (i["target"][:, 0] > 0).float()


def rare_ones(o, i, count=lambda tensor: tensor):
    """Both classes weigh the same, by how usual they are in the batch."""
    y = signs(i)
    weight = torch.as_tensor(count((y == 0).sum()) / count((y == 1).sum()))
    return F.binary_cross_entropy_with_logits(o["logits"][:, 0], y, pos_weight=weight)


def edges(o, i):
    y = signs(i)
    return F.binary_cross_entropy_with_logits(o["logits"][:, 0], y, torch.where(y > 0, 1 - y.mean(), y.mean()))


def weights_of_classes(i, classes=2):
    return len(i["x"]) / (classes * signs(i).long().bincount(minlength=classes).clamp(min=1))


def weights_by_numpy(i):
    classes = signs(i).numpy().astype(int)
    return torch.tensor((len(classes) / np.bincount(classes, minlength=2).clip(1))[classes])


ALTERNATING = torch.tensor([0.0, 1.0, 0.0, 1.0])[:, None].expand(4, 5)


@pytest.mark.parametrize(
    "criterion",
    [
        rare_ones,
        lambda o, i: rare_ones(o, i, float),
        edges,
        lambda o, i: F.cross_entropy(o["logits"][:, :2], signs(i).long(), weight=weights_of_classes(i)),
        lambda o, i: (o["logits"].abs().mean(1) * weights_of_classes(i)[signs(i).long()]).mean(),
        lambda o, i: (o["logits"].abs().mean(1) * weights_by_numpy(i)).mean(),
    ],
    ids=["pos_weight", "plain numbers", "edges", "cross entropy", "of samples", "numpy"],
)
def test_weights_that_a_criterion_makes_of_all_samples_couple_them(criterion):
    assert verdict(criterion, target=ALTERNATING) == LossReduction.COUPLED


@pytest.mark.parametrize(
    "criterion",
    [
        lambda o, i: (o["logits"] * i["target"] / i["target"].sum(1, keepdim=True).clamp(min=1)).sum(1).mean(),
        lambda o, i: (o["logits"].mean(1) * signs(i) / signs(i).sum()).sum(),
        lambda o, i: (o["logits"].mean(1) * (1 + signs(i)) / (1 + signs(i)).mean()).mean(),
        lambda o, i: F.cross_entropy(o["logits"][:, :2], signs(i).long(), weight=torch.tensor([1.0, 5.0])),
        lambda o, i: F.binary_cross_entropy_with_logits(o["logits"], i["target"], pos_weight=CLASS_WEIGHTS[:5]),
        lambda o, i: (o["logits"].abs().mean(1) * CLASS_WEIGHTS[signs(i).long()]).mean(),
        lambda o, i: o["logits"].abs().mean() * torch.ones_like(i["x"]).mean(),
        lambda o, i: (o["logits"].mean(1) * signs(i)).sum() / max(int(signs(i).sum()), 1),
        lambda o, i: (o["logits"].mean(1) * torch.tensor(signs(i).tolist())).mean(),
        lambda o, i: (o["logits"] * (i["x"] / i["x"].square().sum(1, keepdim=True).sqrt())).sum(1).mean(),
    ],
)
def test_weights_of_single_samples_and_divisors_couple_none(criterion):
    assert verdict(criterion, target=ALTERNATING) == LossReduction.MEAN


@pytest.mark.parametrize("coupled", [True, False])
def test_a_criterion_of_two_samples_at_least_is_tried_with_them_twice(coupled):
    def criterion(o, i):
        first, second = (o["logits"] if coupled else o["logits"].view(-1, 2, 5).transpose(0, 1)).chunk(2)
        return F.softplus(first - second).mean()

    expected = LossReduction.COUPLED if coupled else LossReduction.MEAN
    assert verdict(criterion, rows=2, target=ALTERNATING[:2]) == expected


def test_a_criterion_of_a_fixed_number_of_samples_is_judged_by_its_calls():
    def criterion(o, i):
        first, second = o["logits"].view(4, 5).split((2, 2))
        return F.softplus(first.mean(0) - second.mean(0)).mean()

    assert verdict(criterion) == LossReduction.COUPLED
    assert verdict(lambda o, i: o["logits"].view(4, 5).abs().mean()) == LossReduction.MEAN


@pytest.mark.parametrize("first", [0, 1])
def test_joined_losses_are_as_many_as_their_parts_have_together(first):
    def criterion(o, i):
        good = i["target"][:, 0] > 0
        return torch.cat([o["logits"][good, 0].square(), o["logits"][~good, 0].exp()]).mean()

    kinds = torch.tensor([0.0, 0, 1, 0, 1, 1, 0, 1])[:, None].expand(8, 5)
    target = kinds if first == 0 else 1 - kinds
    x = torch.arange(40.0).view(8, 5) / 20
    net = nn.Linear(5, 5)
    expected = criterion({"logits": net(x)}, {"target": target}).item()
    booster, model, optimizer = boosted(net, sgd, {"input": x[:2]}, num_microbatches=4)
    found = booster.execute_pipeline(
        iter([{"input": x, "target": target}]), model, lambda o, i: criterion({"logits": o}, i), optimizer
    )
    assert found["loss"].item() == pytest.approx(expected, rel=1e-6)


def test_a_loss_of_slices_of_one_sample_is_a_mean():
    def criterion(o, i):
        given = o["logits"], i["target"]
        return sum(F.cross_entropy(*(one[k : k + 1] for one in given)) for k in range(len(given[0]))) / len(given[0])

    assert verdict(criterion, target=Y) == LossReduction.MEAN


class Counting(nn.Module):
    """A criterion that writes to what it keeps between its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.calls, self.sizes = 0, []

    def forward(self, o, i):
        self.calls += 1
        self.sizes.append(len(i["ids"]))
        self.scale.add_(0.5 * (self.calls == 1))
        return self.scale * F.cross_entropy(o["pooled"], i["kinds"])


@pytest.mark.parametrize("form", ["module", "function", "method"])
def test_a_criterion_keeps_what_its_calls_for_micro_batches_made(form):
    kept = Counting()
    criterion = {"module": kept, "function": lambda o, i: kept(o, i), "method": kept.forward}[form]
    booster, model, optimizer = boosted(Head(), sgd, {"ids": batch()["ids"][:1]}, num_microbatches=2)
    found = booster.execute_pipeline(iter([batch()]), model, criterion, optimizer)["loss"].item()
    loss, gradients = alone(lambda o, i: 1.5 * F.cross_entropy(o["pooled"], i["kinds"]), batch())
    assert found == pytest.approx(loss, rel=1e-6)
    assert_near(gradients_of(booster, model), gradients, 1e-6)
    assert (kept.calls, kept.sizes, kept.scale.item()) == (2, [4, 4], 1.5)


@pytest.mark.parametrize(
    "criterion",
    [
        lambda o, i: (o["logits"].std(0, unbiased=False) - 1).square().mean(),
        lambda o, i: -o["logits"].softmax(0)[:, 0].log().mean(),
        lambda o, i: (F.normalize(o["logits"], dim=0) - 0.5).square().mean(),
        lambda o, i: (o["logits"] - o["logits"].roll(1, 0)).square().mean(),
        lambda o, i: torch.cdist(o["logits"], o["logits"]).mean(),
        contrastive,
    ],
)
def test_a_loss_that_couples_samples_is_found_with_a_single_one(criterion):
    assert verdict(criterion, rows=1) == LossReduction.COUPLED


def per_sample(o, i):
    return F.cross_entropy(o["logits"], i["target"], reduction="none")


def means_of_classes(o, i):
    losses, y = per_sample(o, i), i["target"]
    return torch.stack([losses[y == one].mean() for one in y.unique()]).mean()


def means_of_classes_there(o, i):
    total, found = 0.0, 0
    for one in range(5):
        chosen = i["target"] == one
        if chosen.any():
            total, found = total + F.cross_entropy(o["logits"][chosen], i["target"][chosen]), found + 1
    return total / found


def with_means_of_classes(o, i):
    return F.cross_entropy(o["logits"], i["target"]) + means_of_classes(o, i)


def balanced_classes(o, i):
    return (per_sample(o, i) / i["target"].bincount()[i["target"]]).mean()


def adjusted_logits(o, i):
    shares = i["target"].bincount(minlength=5) / len(i["target"])
    return F.cross_entropy(o["logits"] + (shares + 0.1).log(), i["target"])


COUPLING_CLASSES = [
    means_of_classes,
    means_of_classes_there,
    with_means_of_classes,
    balanced_classes,
    adjusted_logits,
]


@pytest.mark.parametrize(("rows", "of_all"), [(1, 0), (4, 2)])
@pytest.mark.parametrize("criterion", COUPLING_CLASSES)
def test_what_couples_unlike_classes_is_found_where_all_are_alike(criterion, rows, of_all):
    assert verdict(criterion, rows=rows, target=torch.full((rows,), of_all)) == LossReduction.COUPLED


def correlation(o, i):
    one, other = (values - values.mean() for values in (o["logits"][:, 0], i["target"][:, 0]))
    return 1 - (one * other).sum() / (one.norm() * other.norm() + 1e-6)


def ranked(o, i):
    above = (i["target"][:, None, 0] > i["target"][None, :, 0]).float()
    margins = o["logits"][:, None, 0] - o["logits"][None, :, 0]
    return (F.softplus(-margins) * above).sum() / above.sum().clamp(min=1)


def balanced_parts(o, i):
    return (-(i["target"] * o["logits"].log_softmax(1)) / i["target"].mean(0)).sum(1).mean()


@pytest.mark.parametrize(
    ("criterion", "target"),
    [
        (correlation, X),
        (ranked, X),
        (balanced_parts, X.softmax(1)),
        (edges, ALTERNATING),
        (edges, 1 - ALTERNATING),
        (edges, X.abs()),
        (edges, -X.abs()),
        (lambda o, i: (o["logits"].mean(1) * i["target"][:, 0] / i["target"][:, 0].abs().max()).mean(), X),
    ],
)
def test_what_couples_unlike_numbers_is_found_with_a_single_sample(criterion, target):
    assert verdict(criterion, rows=1, target=target[:1]) == LossReduction.COUPLED


def with_some_classes(o, i):
    chosen = i["target"] > 2
    return per_sample(o, i).mean() + (o["logits"][chosen, 0].square().mean() if chosen.any() else 0.0)


def with_unread_classes(o, i):
    chosen = (i["target"] > 2).float()
    return (per_sample(o, i) * chosen).sum() / chosen.sum().clamp(min=1)


@pytest.mark.parametrize(
    "criterion",
    [
        lambda o, i: per_sample(o, i).mean(),
        with_some_classes,
        with_unread_classes,
        lambda o, i: (per_sample(o, i) * X[0][i["target"]]).mean(),
        lambda o, i: F.cross_entropy(o["logits"], i["target"], weight=CLASS_WEIGHTS[:5], label_smoothing=0.1),
        lambda o, i: F.cross_entropy(o["logits"], i["target"], ignore_index=1),
        lambda o, i: torch.stack(
            [-row.log_softmax(0)[int(y)] for row, y in zip(o["logits"], i["target"], strict=True)]
        ).mean(),
        lambda o, i: F.binary_cross_entropy_with_logits(
            o["logits"], F.one_hot(i["target"], 5).float(), pos_weight=CLASS_WEIGHTS[:5]
        ),
    ],
)
def test_means_of_single_samples_pass_where_all_classes_are_alike(criterion):
    for rows, of_all in ((1, 0), (4, 3)):
        assert verdict(criterion, rows=rows, target=torch.full((rows,), of_all)) == LossReduction.MEAN


def quantised(x, scale):
    """With gradients as if it were not."""
    return x + ((x / scale).round() * scale - x).detach()


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        (lambda x: (x**2).sum(), LossReduction.SUM_IN_MODEL),
        (lambda x: 0.1 * (x**2).sum(), LossReduction.SUM_IN_MODEL),
        (lambda x: (x**2).sum() / 4, LossReduction.MEAN),
        (lambda x: (x**2).mean(), LossReduction.MEAN),
        (lambda x: (x**2).mean() + 0.1 * x.sum(), LossReduction.COUPLED),
        (lambda x: F.mse_loss(x, X, reduction="sum"), LossReduction.MEAN),
        (lambda x: F.mse_loss(x, X, reduction="sum") / 7, LossReduction.SUM_IN_MODEL),
        (lambda x: (x**2).mean() * len(x) / 7, LossReduction.SUM_IN_MODEL),
        (lambda x: F.mse_loss(x, X) * len(x), LossReduction.SUM_IN_MODEL),
        (lambda x: (x**2).mean() + len(x) * (x**2).sum(1).mean() / 7, LossReduction.SUM_IN_MODEL),
        (lambda x: (x**2).mean() * len(x) / len(x), LossReduction.MEAN),
        (lambda x: 5 * (x**2).mean(), LossReduction.MEAN),
        (lambda x: (x**2).mean() + 0.1 * F.mse_loss(x, X, reduction="sum"), LossReduction.MEAN),
        (lambda x: contrastive({"logits": x}, None), LossReduction.COUPLED),
        # Statistics inside of a model are those of micro-batches, as in batch normalisation: a warning tells of them.
        (lambda x: standardised({"logits": x}, {"target": 0}), LossReduction.MEAN),
        (lambda x: quantised(x, x.abs().max() / 7).square().mean(), LossReduction.MEAN),
        (lambda x: quantised(x, (x.detach().std() + 1e-5).reciprocal()).square().mean(), LossReduction.MEAN),
        (lambda x: quantised(x, x.abs().amax(1, keepdim=True) / 7).square().mean(), LossReduction.MEAN),
        (lambda x: F.batch_norm(x, None, None, training=True).square().mean(), LossReduction.MEAN),
        (lambda x: ((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)).square().mean(), LossReduction.MEAN),
        (lambda x: balanced(x.softmax(1), torch.bincount(x.argmax(1), minlength=5)), LossReduction.COUPLED),
        (lambda x: balanced(x.softmax(1), chosen_experts(x)), LossReduction.COUPLED),
        (lambda x: in_pairs(x[torch.arange(4), torch.arange(4)]), LossReduction.COUPLED),
        (lambda x: in_pairs(x[torch.arange(4)[:, None], torch.arange(2)[None]].sum(1)), LossReduction.COUPLED),
        (lambda x: x[torch.arange(4)[:, None], torch.arange(2)[None]].square().mean(), LossReduction.MEAN),
        (lambda x: in_pairs(torch.stack([row[1] for row in x])), LossReduction.COUPLED),
        (lambda x: x.mean() + x[F.one_hot(torch.arange(4), 5).bool()].std(), LossReduction.COUPLED),
        (lambda x: paired(x @ x.T), LossReduction.COUPLED),
        (lambda x: x.T.sum(1).square().mean(), LossReduction.COUPLED),
        (lambda x: (x.T @ x).square().mean(), LossReduction.COUPLED),
        (lambda x: x.T.sum(0).square().mean(), LossReduction.MEAN),
        (lambda x: x.abs().mean() + 0.1 * (x.softmax(1).mean(0) * x.mean(0)).sum(), LossReduction.COUPLED),
    ],
)
def test_a_loss_of_the_models_own_is_judged_by_how_it_is_made(inside, expected):
    assert verdict(lambda o, i: o["loss"], inside) == expected
    assert verdict(lambda o, i: 2 * o["loss"], inside) == expected


def test_a_criterion_that_says_what_it_is_is_not_tried():
    calls = array("i")  # a list would be put back

    def criterion(o, i):
        calls.append(len(i["x"]))
        return o["logits"].abs().max()

    criterion.reduction = "mean"
    assert verdict(criterion) == LossReduction.MEAN
    assert [*calls] == [4]


@pytest.mark.parametrize("settings", [{"num_microbatches": 3}, {"dp_size": 2}], ids=str)
def test_a_declared_mean_is_not_refused_where_nothing_counts_it(settings):
    def positive(outputs, inputs):
        return outputs["hidden"][outputs["hidden"] > 0].mean()

    positive.reduction = "mean"
    for rank in everywhere({"positive": positive}, settings, batch()):
        assert rank["positive"][0] == pytest.approx([rank["positive"][0][0]] * 4)


def refused(error, text, criterion, whole, model=Head, num_steps=1, **settings):
    """Every rank raises, and no weight changes; ``num_steps``: in which step."""

    def run():
        booster, net, optimizer = boosted(model(), sgd, {"ids": whole["ids"][:1]}, **settings)
        before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
        with pytest.raises(error, match=re.escape(text)):
            booster.execute_pipeline(iter([whole]), net, criterion, optimizer)
        with torch.no_grad(), pytest.raises(error, match=re.escape(text)):
            booster.execute_pipeline(iter([whole]), net, criterion)
        optimizer.step()
        assert_near({name: parameter.detach() for name, parameter in net.named_parameters()}, before, 0)
        return True

    assert all(Loopback(settings.get("pp_size", 1) * 2).run(run))


@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_loss_that_couples_samples_is_refused_on_every_rank(pp_size):
    def criterion(o):
        pooled = o["hidden"].mean(1)
        return F.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))

    said = " (matmul of each sample with each other)" if pp_size == 1 else ""  # a rank of the first stage cannot tell
    text = f"the loss is neither a mean nor a sum over items{said}"
    whole = {"ids": batch()["ids"]}
    refused(ConfigError, text, criterion, whole, pp_size=pp_size, num_microbatches=2)
    criterion.reduction = "mean"
    found = everywhere({"pairs": criterion}, {"pp_size": pp_size, "num_microbatches": 2}, whole)
    halves = [alone(lambda o: criterion(o), replica_part(whole | batch(), n, 2))[0] for n in range(2)]
    assert found[0]["pairs"][0] == pytest.approx([sum(halves) / 2] * 4, rel=1e-5)


class Balancing(nn.Linear):
    """A block that returns a number of all samples, as those of experts do."""

    def forward(self, x):
        x = super().forward(x)
        return x, x.softmax(-1).flatten(0, -2).mean(0).square().sum()


class Balanced(Head):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Balancing(8, 8) for _ in range(2)])

    def forward(self, ids):
        hidden, numbers = self.embedding(ids), []
        for block in self.blocks:
            hidden, number = block(hidden)
            numbers.append(number)
        return {"loss": self.head(hidden).square().mean() + torch.stack(numbers).mean()}


@pytest.mark.parametrize(
    ("pp_size", "text"),
    [
        (1, "is neither a mean nor a sum"),
        (2, "a single number, or a few, that a stage before the last one makes of a micro-batch"),
    ],
)
def test_a_number_of_all_samples_is_refused_in_a_loss_from_any_stage(pp_size, text):
    def criterion(o):
        return o["loss"]

    whole = {"ids": batch()["ids"]}
    refused(ConfigError, text, criterion, whole, Balanced, pp_size=pp_size, num_microbatches=2)


class Penalised(nn.Module):
    """Blocks that return the mean of their squares: of the micro-batch, or of each sample."""

    def __init__(self, is_per_sample):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        for block in self.blocks:
            block.register_forward_hook(
                lambda _, args, y: (y, y.square().mean((1, 2)) if is_per_sample else y.square().mean())
            )

    def forward(self, ids, labels):
        hidden, numbers = self.embedding(ids), []
        for block in self.blocks:
            hidden, number = block(hidden)
            numbers.append(number)
        causal = F.cross_entropy(hidden.flatten(0, 1), labels.clamp(max=7).flatten())
        return {"loss": causal + 0.1 * sum(number.mean() for number in numbers)}


@pytest.mark.parametrize("settings", LAYOUTS[2:4] + LAYOUTS[5:], ids=str)
def test_the_ways_out_for_numbers_of_earlier_stages_are_right(settings):
    whole = {name: batch()[name] for name in ("ids", "labels")}
    for is_per_sample in (False, True):

        def criterion(o):
            return o["loss"]

        if not is_per_sample:
            criterion.reduction = "mean"
        model = Penalised(is_per_sample)
        model(**whole)["loss"].backward()
        make = functools.partial(Penalised, is_per_sample)
        found = train(make, [whole], criterion=criterion, **settings)["gradients"]
        assert_near(found, {name: parameter.grad for name, parameter in model.named_parameters()}, 1e-6)


def test_a_loss_that_zips_samples_with_a_list_is_a_mean():
    def criterion(o, i):
        pairs = zip(o["pooled"], i["lengths"], strict=False)
        return sum(F.cross_entropy(row, torch.tensor(length % 3)) for row, length in pairs) / len(o["pooled"])

    given = batch() | {"lengths": LENGTHS}
    settings = {"num_microbatches": 2, "batch_dims": {"lengths": "list"}}
    loss, gradients = alone(criterion, given)
    found = everywhere({"pairs": criterion}, settings, given)[0]["pairs"]
    assert found[0] == pytest.approx([loss] * 4, rel=1e-6)
    assert_near(found[1], gradients, 1e-6)


@pytest.mark.filterwarnings("ignore:std")
def test_a_loss_that_two_samples_standardise_is_refused():
    def criterion(o, i):
        return (o["pooled"].mean(1) * standard(i["weights"])).mean()

    text = "the loss is neither a mean nor a sum over items"
    refused(ConfigError, text, criterion, {name: batch()[name] for name in ("ids", "weights")}, num_microbatches=4)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_microbatches": 4},
        {"num_microbatches": 2, "dp_size": 2},
        {"num_microbatches": 2, "dp_size": 2, "zero_stage": 3},
        {"num_microbatches": 2, "dp_size": 2, "zero_stage": 3, "pp_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("empty", [0, 1])
def test_micro_batches_and_replicas_without_items_add_nothing(empty, settings):
    whole = batch()
    rows = slice(0, 2 if empty == 0 else 4)
    whole["labels"][rows] = -100
    heads = {name: HEADS[name] for name in ("causal", "tokens and rows", "function")}
    ranks = everywhere(heads, settings, whole)
    for name, criterion in heads.items():
        loss, gradients = alone(criterion, whole)
        for which in (1, 2):
            assert_near(ranks[0][name][which] | ranks[-1][name][which], gradients, 1e-6)
        if "dp_size" not in settings:
            assert ranks[0][name][0] == pytest.approx([loss] * 4, rel=1e-6)


LIMITED = {
    "clamp": lambda n: n.clamp(min=1),
    "tensor": lambda n: torch.maximum(n, torch.tensor(1)),
    "max": lambda n: max(n, 1),
    "max of a number": lambda n: max(1.0, n.item()),
}


@pytest.mark.parametrize("settings", [{"num_microbatches": 8}, {"num_microbatches": 2, "dp_size": 2}], ids=str)
@pytest.mark.parametrize("with_objects", [(1, 2, 6), (3,), ()], ids=str)
def test_what_is_divided_by_a_lower_limit_counts_without_items_too(with_objects, settings):
    whole = batch([LENGTH] * ROWS)
    whole["objects"] = torch.tensor([1.0 if row in with_objects else 0.0 for row in range(ROWS)])

    def detector(limit):
        """The sum over objects and background, for each object."""
        return lambda o, i: (
            F.binary_cross_entropy_with_logits(o["pooled"][:, 0], i["objects"], reduction="sum")
            / limit((i["objects"] > 0).sum())
        )

    heads = {name: detector(limit) for name, limit in LIMITED.items()}
    ranks = everywhere(heads, settings, whole)
    for name, criterion in heads.items():
        loss, gradients = alone(criterion, whole)
        for which in (1, 2):
            merged = merged_over(ranks, name, which)
            assert_near({key: merged[key] for key in gradients}, gradients, 1e-5)
        if "dp_size" not in settings:
            assert ranks[0][name][0] == pytest.approx([loss] * 4, rel=1e-5), name


def objects(o, i):
    """The sum over objects and background."""
    return F.binary_cross_entropy_with_logits(o["pooled"][:, 0], i["objects"], reduction="sum")


def tokens(o, i):
    return F.cross_entropy(o["logits"].flatten(0, 1), i["labels"].flatten(), reduction="sum")


def chosen_or_nothing(o, i):
    if not (i["labels"] != -100).any():
        return 0.0 * o["logits"].sum()
    return HEADS["chosen"](o, i)


# Of a number of items: what is divided by, with branches that a trace of tensors does not see.
BRANCHES = {
    "int": lambda n: max(int(n), 1),
    "branch": lambda n: n if n > 0 else 1,
    "where": lambda n: torch.where(n > 0, n, torch.ones_like(n)),
    "added": lambda n: int(n) + 1e-9,
}


@pytest.mark.parametrize(
    ("settings", "lengths", "with_objects"),
    [
        ({"num_microbatches": 4}, [0, 0, 2, 5, 6, 0, 1, 0], (2, 3)),
        ({"num_microbatches": 2, "dp_size": 2}, [0, 0, 0, 0, 1, 0, 3, 4], None),
    ],
    ids=["first and last", "a replica"],
)
def test_a_script_may_divide_by_another_number_where_there_are_no_items(settings, lengths, with_objects):
    whole = batch(lengths)
    whole["objects"] = torch.tensor([1.0 if row in (with_objects or ()) else 0.0 for row in range(ROWS)])

    def head(of, limit):
        made, items = (
            (tokens, lambda i: (i["labels"] != -100).sum())
            if of == "tokens"
            else (objects, lambda i: i["objects"].sum())
        )
        return lambda o, i: made(o, i) / limit(items(i))

    heads = {name: head("tokens", limit) for name, limit in BRANCHES.items()}
    heads["no branch"] = chosen_or_nothing
    if with_objects:
        heads |= {f"{name}, objects": head("objects", BRANCHES[name]) for name in ("int", "branch", "where")}
    ranks = everywhere(heads, settings, whole)
    for name, criterion in heads.items():
        loss, gradients = alone(criterion, whole)
        for which in (1, 2):
            merged = merged_over(ranks, name, which)
            assert_near(merged, gradients, 1e-5)
        if "dp_size" not in settings:
            assert ranks[0][name][0] == pytest.approx([loss] * 4, rel=1e-5), name


def test_a_later_micro_batch_without_items_still_has_its_background():
    few, first, last = (batch([LENGTH] * 4) for _ in range(3))
    for given, rows in ((few, [1.0, 1, 0, 1]), (first, [0.0, 0, 1, 0]), (last, [1.0, 0, 0, 0])):
        given["objects"] = torch.tensor(rows)
    booster, model, optimizer = boosted(Head(), sgd, {"ids": few["ids"][:1]}, num_microbatches=2)
    for given in (few, first, last):
        optimizer.zero_grad()
        found = booster.execute_pipeline(iter([given]), model, later, optimizer)["loss"].item()
        loss, gradients = alone(later, given)
        assert found == pytest.approx(loss, rel=1e-6)
        assert_near(gradients_of(booster, model), gradients, 1e-6)


def declared(o, i):
    """Of what micro-batches give, one part is divided by the objects, and one is not divided."""
    return later(o, i) + 0.1 * o["pooled"].square().sum()


declared.reduction = "mean"


def test_a_declared_loss_may_have_its_first_micro_batch_without_items():
    given = batch([LENGTH] * 4)
    given["objects"] = torch.tensor([0.0, 0, 1, 0])
    booster, model, optimizer = boosted(Head(), sgd, {"ids": given["ids"][:1]}, num_microbatches=2)
    found = booster.execute_pipeline(iter([given]), model, declared, optimizer)["loss"].item()

    def of_model(batch):
        return Head()(**{name: batch[name] for name in ("ids", "labels", "kinds", "starts", "ends")})

    with torch.no_grad():
        halves = [{key: value[part] for key, value in given.items()} for part in (slice(2), slice(2, 4))]
        whole = later(of_model(given), given)
        rest = sum(0.1 * of_model(half)["pooled"].square().sum() for half in halves) / 2
    assert found == pytest.approx(float(whole + rest), rel=1e-5)


def even(o, i):
    mask = 1.0 - i["ids"] % 2
    return (per_token(o, i) * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("function", lambda o, i: (per_token(o, i) * i["mask"]).sum() / len(i["labels"])),
        ("masked mean", even),
        ("chosen mean", lambda o, i: per_token(o, i)[i["ids"] > 4].mean()),
    ],
)
@pytest.mark.parametrize("settings", [{"num_microbatches": 2, "pp_size": 2}, {"num_microbatches": 1}], ids=str)
def test_a_loss_that_is_made_otherwise_in_a_later_step_is_refused(first, then, settings, monkeypatch):
    # As numbers on a device, which are read at the end of the step.
    monkeypatch.setattr(loss_graph, "_number", lambda value: torch.as_tensor(value).double().reshape(()))

    def run():
        later = []

        def criterion(o, i):
            return (then if later else HEADS[first])(o, i)

        booster, model, optimizer = boosted(Head(), sgd, {"ids": batch()["ids"][:1]}, **settings)
        part = replica_part(batch(), booster.plugin.layout.here.dp, 2)
        for _ in range(2):
            booster.execute_pipeline(iter([part]), model, criterion, optimizer)
        optimizer.zero_grad()
        later.append(True)
        with pytest.raises(ConfigError, match="the loss is made in another way than in the criterion's first step"):
            booster.execute_pipeline(iter([part]), model, criterion, optimizer)
        booster.execute_pipeline(iter([part]), model, lambda o, i: then(o, i), optimizer)
        return gradients_of(booster, model)

    merged = {}
    for rank in Loopback(2 * settings.get("pp_size", 1)).run(run):
        merged.update(rank)
    assert_near(merged, alone(then, batch())[1], 1e-6)


WEIGHTS = torch.linspace(0.5, 2, 5)
_CLASSES = torch.tensor([0, 1, -100, 3, 4, 1, -100, -100])
_SHARES = torch.rand(8, 5, generator=torch.Generator().manual_seed(2)).softmax(1)
TORCHS = {
    "classes": (nn.CrossEntropyLoss(), _CLASSES),
    "smoothed": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), _CLASSES),
    "another index": (nn.CrossEntropyLoss(ignore_index=1), _CLASSES.clamp(min=0)),
    "weighted": (functools.partial(F.cross_entropy, weight=WEIGHTS), _CLASSES),
    "function": (F.cross_entropy, _CLASSES),
    "shares": (nn.CrossEntropyLoss(weight=WEIGHTS), _SHARES),
    "negative log": (nn.NLLLoss(weight=WEIGHTS), _CLASSES),
    "squares": (nn.MSELoss(), _SHARES),
    "robust": (nn.HuberLoss(delta=0.3), _SHARES),
    "l1": (nn.SmoothL1Loss(), _SHARES),
    "binary": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), _SHARES),
    "divergence": (nn.KLDivLoss(reduction="batchmean"), _SHARES),
    "divergence of elements": (nn.KLDivLoss(log_target=True), _SHARES),
    "counts": (nn.PoissonNLLLoss(), _SHARES),
    "margins": (nn.MultiMarginLoss(), _CLASSES.clamp(min=0)),
    "margins of labels": (nn.MultiLabelSoftMarginLoss(), _SHARES.round()),
    "signs": (nn.SoftMarginLoss(), _SHARES.round() * 2 - 1),
    "sum": (nn.MSELoss(reduction="sum"), _SHARES),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize(("dp_size", "settings"), [(1, {"num_microbatches": 3}), (2, {"pp_size": 2})], ids=str)
def test_losses_of_torch_are_those_of_the_whole_batch(name, dp_size, settings):
    criterion, target = TORCHS[name]
    given = _pairs()["input"], target
    model = _net()
    criterion(model(given[0]), target).backward()
    expected = {key: held.grad for key, held in model.named_parameters()}

    def run():
        booster, model, optimizer = boosted(_net(), sgd, given[0][:1], **settings)
        replica = booster.plugin.layout.here.dp
        part = tuple(one[slice(0, 5) if replica == 0 else slice(5, 8)] if dp_size == 2 else one for one in given)
        booster.execute_pipeline(iter([part]), model, criterion, optimizer)
        return gradients_of(booster, model)

    found = {}
    for rank in Loopback(dp_size * settings.get("pp_size", 1)).run(run):
        found.update(rank)
    assert_near(found, expected, 1e-6)


@pytest.mark.parametrize("settings", [{"num_microbatches": 2}, {"num_microbatches": 2, "pp_size": 2}], ids=str)
@pytest.mark.parametrize("of", ["attention", "scale"])
def test_models_that_put_samples_together_show_with_torchs_losses(of, settings, caplog):
    class Together(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 5)

        def forward(self, x):
            h = self.up(x)
            h = (h @ h.T).softmax(1) @ h if of == "attention" else h / h.abs().max()
            return self.down(h)

    def run():
        booster, model, optimizer = boosted(Together(), sgd, torch.ones(2, 8), **settings)
        booster.execute_pipeline(iter([(_pairs()["input"], _CLASSES)]), model, nn.CrossEntropyLoss(), optimizer)

    if of == "attention":
        with pytest.raises(ConfigError, match="each sample with each other"):
            Loopback(settings.get("pp_size", 1)).run(run)
    else:
        Loopback(settings.get("pp_size", 1)).run(run)
        assert "applies a statistic of all samples of a micro-batch to each of them" in caplog.text


LATER_COUPLED = {
    "centred": lambda o, y: F.mse_loss(o - o.mean(0), y),
    "standardised": lambda o, y: F.mse_loss(o / o.std(0), y),
    "of the batch's norm": lambda o, y: F.mse_loss(o / o.norm(), y),
    "over samples": lambda o, y: F.mse_loss(o.softmax(0), y),
    "ranked": lambda o, y: F.mse_loss(o.sort(0).values, y),
    "decorrelated": lambda o, y: F.mse_loss(o, y) + (o.T @ o).square().mean(),
}
LATER_PLAIN = {
    "limited": lambda o, y: F.mse_loss(o.clamp(-0.5, 0.5), y),
    "of places": lambda o, y: F.mse_loss((o - o.mean(1, keepdim=True)).softmax(1), y),
    "hard": lambda o, y: F.mse_loss(torch.where(o > 0, o.tanh(), o), y),
}


def _flagged(then, flag):
    return lambda o, i: then(o, i["y"]) if flag else F.mse_loss(o, i["y"])


@pytest.mark.parametrize("name", LATER_COUPLED)
@pytest.mark.parametrize("settings", [{"num_microbatches": 2, "pp_size": 2}, {"num_microbatches": 1}], ids=str)
def test_a_loss_that_puts_samples_together_in_a_later_step_is_refused(name, settings):
    def run():
        flag = []
        criterion = _flagged(LATER_COUPLED[name], flag)
        booster, model, optimizer = boosted(_net(), sgd, {"input": torch.ones(1, 8)}, **settings)
        part = replica_part(_pairs(), booster.plugin.layout.here.dp, 2)
        for _ in range(4):
            booster.execute_pipeline(iter([part]), model, criterion, optimizer)
            optimizer.step()
        flag.append(True)
        with pytest.raises(ConfigError, match=r"the criterion calls|made in another way|a term that"):
            booster.execute_pipeline(iter([part]), model, criterion, optimizer)

    Loopback(2 * settings.get("pp_size", 1)).run(run)


def _weighted_by_loss(o, y):
    losses = (o - y).square().mean(1)
    return (losses.detach().softmax(0) * losses).sum() * len(o) / 8


def _targets_centred(o, y):
    return F.mse_loss(o, y - y.mean(0))


@pytest.mark.parametrize("then", [_weighted_by_loss, _targets_centred])
@pytest.mark.parametrize("settings", [{"num_microbatches": 2, "pp_size": 2}, {"num_microbatches": 1}], ids=str)
def test_couplings_without_a_graph_are_found_in_steps_that_look_again(then, settings):
    """The fourth and the eighth do."""

    def run():
        flag, number = [], 0
        criterion = _flagged(then, flag)
        booster, model, optimizer = boosted(_net(), sgd, {"input": torch.ones(1, 8)}, **settings)
        part = replica_part(_pairs(), booster.plugin.layout.here.dp, 2)
        words = r"neither a mean nor a sum|made in another way|cannot be counted"
        with pytest.raises(ConfigError, match=words):  # noqa: PT012
            for number in range(1, 9):
                if number == 5:
                    flag.append(True)
                booster.execute_pipeline(iter([part]), model, criterion, optimizer)
                optimizer.step()
        assert number in (5, 8)

    Loopback(2 * settings.get("pp_size", 1)).run(run)


class Later(nn.Module):
    """Begins in some step to do something with samples together."""

    def __init__(self, what):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.what, self.is_on = nn.Linear(8, 16), nn.Linear(16, 5), what, False

    def forward(self, input, y=None):
        h = self.up(input)
        if self.is_on and self.what == "mixes":
            h = h + h.flip(0)
        if self.is_on and self.what == "scales":
            h = h / h.std(0)
        if self.is_on and self.what == "hook" and h.requires_grad:
            h.register_hook(lambda gradient: gradient / gradient.norm())
        out = self.down(h)
        return out if y is None else F.mse_loss(out, y)


@pytest.mark.parametrize("in_model", [False, True])
@pytest.mark.parametrize("what", ["mixes", "scales", "hook"])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_models_that_begin_to_put_samples_together_are_noticed(what, in_model, dp_size, caplog):
    def criterion(o, i):
        return o if in_model else F.mse_loss(o, i["target"])

    def run():
        model = Later(what)
        given = _pairs() if in_model else {"input": _pairs()["input"], "target": _pairs()["y"]}
        settings = {"num_microbatches": 3 - dp_size}
        booster, model, optimizer = boosted(model, sgd, first_microbatch(given, settings), **settings)
        part = replica_part(given, booster.plugin.layout.here.dp, dp_size)
        for number in range(1, 9):
            model.is_on = number > 5
            booster.execute_pipeline(iter([part]), model, criterion, optimizer)
            optimizer.step()

    if what == "scales":
        Loopback(dp_size).run(run)
        assert "applies a statistic of all samples" in caplog.text
    else:
        with pytest.raises(ConfigError, match=r"flip over the samples|makes something of all samples"):
            Loopback(dp_size).run(run)


@pytest.mark.parametrize("name", LATER_PLAIN)
def test_a_loss_of_each_sample_may_become_another_one_of_each(name):
    def steps(flag, step):
        for number in range(6):
            if number == 2:
                flag.append(True)
            step()

    def run():
        flag = []
        criterion = _flagged(LATER_PLAIN[name], flag)
        booster, model, optimizer = boosted(_net(), sgd, {"input": torch.ones(1, 8)}, num_microbatches=4, pp_size=2)

        def step():
            booster.execute_pipeline(iter([_pairs()]), model, criterion, optimizer)
            optimizer.step()

        steps(flag, step)
        return {key: held.detach().clone() for key, held in model.named_parameters()}

    flag, model = [], _net()
    criterion, optimizer = _flagged(LATER_PLAIN[name], flag), sgd(model.parameters())

    def step():
        optimizer.zero_grad()
        criterion(model(_pairs()["input"]), _pairs()).backward()
        optimizer.step()

    steps(flag, step)
    found = {key: held for rank in Loopback(2).run(run) for key, held in rank.items()}
    assert_near(found, dict(model.named_parameters()), 1e-6)


class OfLabels(nn.Module):
    """Computes its loss, of labels that it changes first."""

    def __init__(self, loss_of):
        super().__init__()
        self.net, self.loss_of = _net(), loss_of

    def forward(self, input, y):
        return self.loss_of(self.net(input), y)


def _weighted_classes(o, y):
    of_class = F.one_hot(y.argmax(1), 5).float()
    return F.binary_cross_entropy_with_logits(
        o, of_class, pos_weight=(1 - of_class).sum(0) / of_class.sum(0).clamp(min=1)
    )


TOGETHER_LABELS = {
    "weighted classes": _weighted_classes,
    "mixed": lambda o, y: F.cross_entropy(o, y.argmax(1)) + F.cross_entropy(o, y.argmax(1).flip(0)),
    "centred": lambda o, y: F.mse_loss(o, (y - y.mean(0)) / y.std(0)),
    "ranks": lambda o, y: F.mse_loss(o, y.argsort(0).argsort(0).float()),
}
LABELS_APART = {
    "classes": lambda o, y: F.cross_entropy(o.view(-1, 5), y.argmax(1).view(-1)),
    "masked": lambda o, y: F.mse_loss(o[y > 0], y[y > 0]),
    "active": lambda o, y: F.cross_entropy(o, torch.where(y[:, 0] > 0, y.argmax(1), -100)),
    "shifted": lambda o, y: F.mse_loss(o[:, :-1].flatten(), y[:, 1:].flatten()),
    "of a sample": lambda o, y: F.mse_loss(o, (y - y.mean(1, keepdim=True)) / y.std(1, keepdim=True)),
    "weights": lambda o, y: F.binary_cross_entropy_with_logits(o, y.sigmoid(), weight=(y > 0) + 0.5),
}


@pytest.mark.parametrize("name", TOGETHER_LABELS)
@pytest.mark.parametrize("settings", [{"num_microbatches": 2, "pp_size": 2}, {"num_microbatches": 2}], ids=str)
def test_labels_that_a_model_makes_of_several_samples_are_refused(name, settings):
    def run():
        booster, model, optimizer = boosted(OfLabels(TOGETHER_LABELS[name]), sgd, _pairs(), **settings)
        booster.execute_pipeline(iter([_pairs()]), model, lambda o, i: o, optimizer)

    with pytest.raises(ConfigError, match="a number of all samples is applied to each of them"):
        Loopback(settings.get("pp_size", 1)).run(run)


@pytest.mark.parametrize("name", LABELS_APART)
def test_labels_that_a_model_makes_of_each_sample_give_the_same_result(name):
    model = OfLabels(LABELS_APART[name])
    model(**_pairs()).backward()

    def run():
        booster, model, optimizer = boosted(OfLabels(LABELS_APART[name]), sgd, _pairs(), num_microbatches=3)
        booster.execute_pipeline(iter([_pairs()]), model, lambda o, i: o, optimizer)
        return gradients_of(booster, model)

    (found,) = Loopback(1).run(run)
    assert_near(found, {key: held.grad for key, held in model.named_parameters()}, 1e-6)


def _of_all_sizes(o, y):
    rows, width = o.shape
    return F.mse_loss(o.view(rows * width), y.view(rows * width))


RESHAPED = {
    "sizes of outputs": _of_all_sizes,
    "length of outputs": lambda o, y: F.mse_loss(o, y.reshape(len(o), 5)),
    "length and the rest": lambda o, y: F.mse_loss(o, y.view(len(o), -1)),
    "length of labels": lambda o, y: F.cross_entropy(o, y.argmax(1).view(len(y))),
    "product": lambda o, y: F.mse_loss(o.flatten(), y.reshape(len(y) * y.size(1))),
    "expanded": lambda o, y: F.mse_loss(o, y[:, :1].expand(len(o), 5)),
}


@pytest.mark.parametrize("name", RESHAPED)
@pytest.mark.parametrize("in_model", [False, True])
def test_labels_are_reshaped_by_plain_numbers(name, in_model):
    loss_of, given = RESHAPED[name], [_pairs(), {key: one[:6] for key, one in _pairs().items()}]

    def make():
        return OfLabels(loss_of) if in_model else _net()

    def run():
        sample = given[0] if in_model else {"input": given[0]["input"]}
        booster, model, optimizer = boosted(make(), sgd, sample, num_microbatches=3)
        for one in given:
            booster.execute_pipeline(
                iter([one]), model, (lambda o, i: o) if in_model else (lambda o, i: loss_of(o, i["y"])), optimizer
            )
            optimizer.step()
        return [held.detach().clone() for held in model.parameters()]

    model = make()
    optimizer = sgd(model.parameters())
    for one in given:
        optimizer.zero_grad()
        (model(**one) if in_model else loss_of(model(one["input"]), one["y"])).backward()
        optimizer.step()
    (found,) = Loopback(1).run(run)
    for held, expected in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(held, expected, rtol=1e-5, atol=1e-6)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))


def _pairs():
    generator = torch.Generator().manual_seed(1)
    return {"input": torch.randn(8, 8, generator=generator), "y": torch.randn(8, 5, generator=generator)}


@pytest.mark.parametrize(
    "first", ["causal", "masked mean, limited", "chosen mean", "means of rows", "elements", "item"]
)
def test_evaluations_are_looked_at_again_for_a_loss_that_is_made_otherwise(first):
    then = HEADS["masked mean"] if first == "elements" else HEADS["elements"]

    def run():
        later = []

        def criterion(o, i):
            if later:
                return then(o, i)
            return HEADS[first](o, i) if HEADS[first].__code__.co_argcount == 2 else HEADS[first](o)

        booster, model, _ = boosted(Head(), sgd, {"ids": batch()["ids"][:1]}, num_microbatches=3, pp_size=2)

        def evaluate(lengths=LENGTHS):
            with torch.no_grad():
                return float(booster.execute_pipeline(iter([batch(lengths)]), model, criterion)["loss"])

        for lengths in (LENGTHS, [0, 0, 0, 1, 2, 3, 6, 1], [2] * 8, LENGTHS[::-1]):
            evaluate(lengths)
        later.append(True)
        for _ in range(3):
            evaluate()
        with pytest.raises(ConfigError, match="the loss is made in another way than in the criterion's first step"):
            evaluate()
        return evaluate()

    found = Loopback(2).run(run)
    assert found == pytest.approx([float(alone(then, batch())[0])] * 2, rel=1e-5)


def test_evaluations_that_are_looked_at_again_leave_out_what_has_no_items():
    lengths = [0, 0, 0, 1, 2, 3, 6, 1]

    def run():
        booster, model, _ = boosted(Head(), sgd, {"ids": batch()["ids"][:1]}, num_microbatches=3)
        with torch.no_grad():
            return [
                float(booster.execute_pipeline(iter([batch(one)]), model, HEADS["masked mean"])["loss"])
                for one in (LENGTHS, lengths, lengths, lengths)
            ]

    (found,) = Loopback(1).run(run)
    assert found[1:] == pytest.approx([float(alone(HEADS["masked mean"], batch(lengths))[0])] * 3, rel=1e-5)


def by_tokens(o, i):
    num_tokens, num_rows = int(i["mask"].sum()), len(i["labels"])
    return 4 * (per_token(o, i) * i["mask"]).sum() / num_tokens + 0.5 * o["pooled"].square().sum() / num_rows


def by_rows(o, i):
    num_rows, num_tokens = len(i["labels"]), float(i["mask"].sum())
    return (per_token(o, i) * i["mask"]).sum() / num_rows + 0 * num_tokens


@pytest.mark.parametrize("criterion", [by_tokens, by_rows, lambda o, i: 4.0 + by_rows(o, i)])
def test_numbers_that_are_equal_in_the_first_micro_batch_are_told_apart(criterion):
    whole = batch([1, 1, 1, 1, 6, 5, 4, 6])
    loss, gradients = alone(criterion, whole)

    def run():
        booster, model, optimizer = boosted(Head(), sgd, {"ids": whole["ids"][:1]}, num_microbatches=2)
        with torch.no_grad():
            found = booster.execute_pipeline(iter([whole]), model, criterion)["loss"].item()
        for _ in range(2):
            optimizer.zero_grad()
            booster.execute_pipeline(iter([whole]), model, criterion, optimizer)
        return found, gradients_of(booster, model)

    ((found, merged),) = Loopback(1).run(run)
    assert found == pytest.approx(loss, rel=1e-6)
    assert_near(merged, gradients, 1e-6)


def test_every_rank_says_why_a_loss_is_refused():
    def run():
        booster, model, optimizer = boosted(Head(), sgd, {"ids": batch()["ids"][:1]}, pp_size=2, num_microbatches=2)
        with pytest.raises(ConfigError, match="sqrt of a sum over samples"):
            booster.execute_pipeline(iter([batch()]), model, lambda o, i: per_token(o, i).mean().sqrt(), optimizer)

    Loopback(2).run(run)


class InModel(Head):
    """Divides in the model, by one of two numbers that may be equal."""

    def forward(self, ids, labels=None):
        logits = super().forward(ids)["logits"]
        mask = labels != -100
        sums = (F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * mask).sum()
        num_tokens, num_rows = int(mask.sum()), len(labels)
        return {"loss": sums / num_tokens, "num_rows": num_rows}


@pytest.mark.parametrize("training", [True, False])
def test_equal_numbers_of_a_model_are_refused_where_they_differ_later(training):
    whole = {name: one for name, one in batch([1, 1, 1, 1, 6, 5, 4, 6]).items() if name in ("ids", "labels")}

    def run():
        booster, model, optimizer = boosted(InModel(), sgd, {k: v[:1] for k, v in whole.items()}, num_microbatches=2)
        with torch.set_grad_enabled(training), pytest.raises(ConfigError, match="cannot be counted from a batch"):
            booster.execute_pipeline(iter([whole]), model, lambda o: o["loss"], optimizer if training else None)

    Loopback(1).run(run)


def later(o, i):
    return objects(o, i) / max(int(i["objects"].sum()), 1)


@pytest.mark.parametrize("known", [False, True])
def test_a_batch_without_any_item_is_refused_by_name(known):
    whole = batch()
    whole["labels"][:] = -100

    def run():
        booster, model, optimizer = boosted(Head(), sgd, {"ids": whole["ids"][:1]}, num_microbatches=2)
        if known:
            booster.execute_pipeline(iter([batch()]), model, HEADS["causal"], optimizer)
            optimizer.step()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with pytest.raises(DataError, match="the loss is a mean over no items: no replica's batch has any"):
            booster.execute_pipeline(iter([whole]), model, HEADS["causal"], optimizer)
        assert_near({name: parameter.detach() for name, parameter in model.named_parameters()}, before, 0)
        return True

    assert all(Loopback(2).run(run))


@pytest.mark.parametrize("is_global", [True, False])
@pytest.mark.parametrize("settings", [{"num_microbatches": 4}, {"num_microbatches": 2, "dp_size": 2}], ids=str)
def test_num_items_in_batch_is_of_all_replicas_or_of_one(settings, is_global):
    whole = batch([6, 1, 5, 3, 6, 1, 5, 3])  # replicas with equally many
    _, expected = alone(HEADS["causal"], whole)
    counts = int((whole["labels"][:, 1:] != -100).sum())
    size = settings.get("dp_size", 1)
    total = counts if is_global else counts // size
    given = {name: value for name, value in settings.items() if name != "dp_size"}

    def run():
        booster, model, optimizer = boosted(Head(), sgd, {"ids": whole["ids"][:1]}, **given)
        part = {**replica_part(whole, booster.plugin.layout.here.dp, size), "num_items_in_batch": total}
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            booster.execute_pipeline(iter([part]), model, HEADS["causal"], optimizer)
            found.append(gradients_of(booster, model))
        return found

    for rank in Loopback(size).run(run):
        for gradients in rank:
            assert_near(gradients, expected, 1e-6)


class WithPixels(nn.Module):
    """What the loss is a mean over shows as elements of ``x`` only where there are pixels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tower, self.blocks = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x, pixels=None):
        x = x if pixels is None else x + self.tower(pixels)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("is_declared", [False, True])
def test_replicas_that_count_unlike_things_are_not_added_up(is_declared):
    def criterion(outputs, inputs):
        return outputs.square().mean()

    if is_declared:
        criterion.reduction = "mean"
    whole = {"x": torch.randn(4, 4), "pixels": torch.randn(4, 4)}

    def run():
        booster, model, optimizer = boosted(WithPixels(), sgd, whole)
        replica = booster.plugin.layout.here.dp
        own = replica_part(whole if replica else {"x": whole["x"]}, replica, 2)
        try:
            booster.execute_pipeline(iter([own]), model, criterion, optimizer)
        except ConfigError as error:
            return str(error)
        return gradients_of(booster, model)

    found = Loopback(2).run(run)
    if not is_declared:
        assert all("the replicas' losses are made in different ways" in one for one in found)
        return
    expected = WithPixels()
    for replica in range(2):
        own = replica_part(whole if replica else {"x": whole["x"]}, replica, 2)
        (criterion(expected(**own), own) / 2).backward()
    assert_near(found[0], {name: parameter.grad for name, parameter in expected.named_parameters()})


def with_an_optional_term(o, i):
    loss = F.cross_entropy(o["pooled"], i["kinds"])
    chosen = i["labels"][:, 0] > 0
    if chosen.any():
        loss = loss + F.mse_loss(o["logits"][chosen, 0, 0], i["labels"][chosen, 0].float())
    return loss


def with_some_labels(*rows):
    whole = batch()
    whole["labels"][:, 0] = torch.tensor([3 if row in rows else -100 for row in range(ROWS)])
    return whole


@pytest.mark.parametrize("rows", [(5, 6, 7), (0, 5)], ids=str)
def test_a_term_that_some_micro_batches_lack_counts_by_its_own_items(rows):
    whole = with_some_labels(*rows)
    loss, gradients = alone(with_an_optional_term, whole)
    (rank,) = everywhere({"optional": with_an_optional_term}, {"num_microbatches": 4}, whole)
    assert rank["optional"][0] == pytest.approx([loss] * 4, rel=1e-6)
    for parameter, gradient in gradients.items():
        assert (rank["optional"][2][parameter] - gradient).abs().max() <= 5e-6, parameter


def two_tasks(o, i):
    loss, kinds = o["logits"].new_zeros(()), i["kinds"]
    if (kinds == 0).any():
        loss = loss + F.cross_entropy(o["pooled"][kinds == 0], kinds[kinds == 0])
    if (kinds == 1).any():
        loss = loss + 0.5 * o["logits"][kinds == 1, 0, 0].square().mean()
    return loss


def a_term_of_each_kind(o, i):
    loss = 0.0
    for kind in i["kinds"].unique():
        loss = loss + o["logits"][i["kinds"] == kind, 0, 0].square().mean()
    return loss


def added_in_place(o, i):
    loss = torch.zeros(())
    for kind in range(3):
        chosen = i["kinds"] == kind
        if chosen.sum() > 0:
            loss += (kind + 1) * o["pooled"][chosen].square().sum() / chosen.sum()
    loss += o["hidden"].square().mean()
    return loss


def divided_by_lengths(o, i):
    loss = 0
    for kind in range(3):
        chosen = o["pooled"][i["kinds"] == kind, 0].square()
        if len(chosen):
            loss = loss + (kind + 1) * chosen.sum() / len(chosen)
    return loss


def divided_by_numbers(o, i):
    loss, losses = o["hidden"].square().mean(), o["pooled"].square().sum(1)
    for kind in range(3):
        chosen = i["kinds"] == kind
        number = int(chosen.sum())
        if number:
            loss = loss + 2 * losses[chosen].sum() / number
    return loss


def divided_by_shapes(o, i):
    loss = torch.zeros(())
    for kind in range(3):
        chosen = o["pooled"][i["kinds"] == kind]
        if chosen.shape[0] > 0:
            loss += F.cross_entropy(chosen, torch.full((len(chosen),), kind), reduction="sum") / chosen.shape[0]
    return loss


BY_NUMBERS = divided_by_lengths, divided_by_numbers, divided_by_shapes
OF_KINDS = {one.__name__: one for one in (two_tasks, a_term_of_each_kind, added_in_place, *BY_NUMBERS)}


def with_kinds(*kinds):
    return {**batch(), "kinds": torch.tensor(kinds)}


def test_micro_batches_of_as_many_but_other_terms_count_by_their_items():
    whole = with_kinds(0, 0, 1, 1, 2, 2, 0, 1)
    (rank,) = everywhere(OF_KINDS, {"num_microbatches": 4}, whole)
    for name, criterion in OF_KINDS.items():
        loss, gradients = alone(criterion, whole)
        assert rank[name][0] == pytest.approx([loss] * 4, rel=1e-6), name
        for which in (1, 2):
            assert_near(rank[name][which], gradients, 1e-6)


def of_tasks(o, i):
    """The losses of seven tasks, and which of them have labels."""
    losses = F.binary_cross_entropy_with_logits(
        o["logits"][:, 0, :7], (i["ids"][:, :1] > torch.arange(7)).float(), reduction="none"
    )
    return losses, i["tasks"]


def task_by_task(o, i):
    losses, has_label = of_tasks(o, i)
    return sum((losses[:, k] * has_label[:, k]).sum() / has_label[:, k].sum() for k in range(7)) / 7


def all_tasks_at_once(o, i):
    losses, has_label = of_tasks(o, i)
    return ((losses * has_label).sum(0) / has_label.sum(0).clamp(min=1)).mean()


def tasks_that_have_labels(o, i):
    losses, has_label = of_tasks(o, i)
    return torch.stack([losses[has_label[:, k], k].mean() for k in range(7) if has_label[:, k].any()]).sum()


def with_tasks(num_tasks=7):
    present = torch.rand(ROWS, num_tasks, generator=torch.Generator().manual_seed(3)) < 0.6
    return {**batch(), "tasks": present}


@pytest.mark.parametrize("criterion", [task_by_task, all_tasks_at_once, tasks_that_have_labels])
def test_each_of_many_tasks_counts_by_its_own_labels(criterion):
    whole = with_tasks()

    def run():
        booster, model, optimizer = boosted(Head(), sgd, {"ids": whole["ids"][:1]}, num_microbatches=2)
        part = replica_part(whole, booster.plugin.layout.here.dp, 2)
        booster.execute_pipeline(iter([part]), model, criterion, optimizer)
        return gradients_of(booster, model)

    for gradients in Loopback(2).run(run):
        assert_near(gradients, alone(criterion, whole)[1], 1e-6)


@pytest.mark.parametrize(
    "reduce",
    [
        lambda means, numbers: means[numbers > 0].mean(),
        lambda means, numbers: means.sum() / (numbers > 0).sum(),
        lambda means, numbers: (means * numbers.sqrt()).mean(),
        lambda means, numbers: means.square().mean(),
    ],
)
def test_what_couples_tasks_by_which_have_labels_is_refused(reduce):
    def criterion(o, i):
        losses, has_label = of_tasks(o, i)
        return reduce((losses * has_label).sum(0) / has_label.sum(0).clamp(min=1), has_label.sum(0))

    booster, model, optimizer = boosted(Head(), sgd, {"ids": batch()["ids"][:1]}, num_microbatches=2)
    with pytest.raises(ConfigError, match="neither a mean nor a sum over items"):
        booster.execute_pipeline(iter([with_tasks()]), model, criterion, optimizer)


def test_more_numbers_than_can_be_counted_are_refused_with_a_way_out():
    def criterion(o, i):
        return ((o["logits"].flatten(1)[:, :40] * i["tasks"]).square().sum(0) / i["tasks"].sum(0)).sum()

    booster, model, optimizer = boosted(Head(), sgd, {"ids": batch()["ids"][:1]}, num_microbatches=2)
    with pytest.raises(ConfigError, match="40 different numbers, of which 32 can be counted: divide the sum"):
        booster.execute_pipeline(iter([with_tasks(40)]), model, criterion, optimizer)


def test_replicas_with_as_many_but_other_terms_are_refused_by_name():
    def run():
        booster, model, optimizer = boosted(Head(), sgd, {"ids": batch()["ids"][:1]}, num_microbatches=2)
        whole = with_kinds(0, 0, 0, 0, 1, 1, 1, 1)
        part = replica_part(whole, booster.plugin.layout.here.dp, 2)
        with pytest.raises(ConfigError, match="the replicas' losses are made in different ways; write a term"):
            booster.execute_pipeline(iter([part]), model, two_tasks, optimizer)

    Loopback(2).run(run)


@pytest.mark.parametrize("kinds", [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0, 0, 1]], ids=["alone", "beside"])
@pytest.mark.parametrize("trains", [True, False])
def test_a_term_that_no_micro_batch_of_the_first_step_had_is_refused(trains, kinds):
    booster, model, optimizer = boosted(Head(), sgd, {"ids": batch()["ids"][:1]}, num_microbatches=2)

    def step(*kinds):
        whole, trained = with_kinds(*kinds), optimizer if trains else None
        return booster.execute_pipeline(iter([whole]), model, two_tasks, trained)["loss"].item()

    with torch.set_grad_enabled(trains):
        assert step(0, 0, 0, 2, 0, 2, 0, 0) > 0
        assert step(0, 0, 0, 2, 2, 2, 2, 2) > 0
        with pytest.raises(ConfigError, match=re.escape("(losses * mask).sum() / mask.sum().clamp(min=1) instead")):
            step(*kinds)


def test_a_term_that_appears_in_a_later_step_is_refused_with_a_way_out():
    def without_branch(o, i):
        chosen = i["labels"][:, 0] > 0
        losses = (o["logits"][:, 0, 0] - i["labels"][:, 0].float()).square() * chosen
        return F.cross_entropy(o["pooled"], i["kinds"]) + losses.sum() / chosen.sum().clamp(min=1)

    booster, model, optimizer = boosted(Head(), sgd, {"ids": batch()["ids"][:1]}, num_microbatches=2)
    lacking, whole = with_some_labels(), with_some_labels(1, 6, 7)
    booster.execute_pipeline(iter([lacking]), model, with_an_optional_term, optimizer)
    with pytest.raises(ConfigError, match=re.escape("(losses * mask).sum() / mask.sum().clamp(min=1) instead")):
        booster.execute_pipeline(iter([whole]), model, with_an_optional_term, optimizer)
    for one in (lacking, whole):
        optimizer.zero_grad()
        found = booster.execute_pipeline(iter([one]), model, without_branch, optimizer)["loss"].item()
        expected, gradients = alone(without_branch, one)
        assert found == pytest.approx(expected, rel=1e-6)
        assert_near(gradients_of(booster, model), gradients, 1e-6)


class Tasks(nn.Module):
    """Two tasks, and a learned number for the loss of each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.scales = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x, x.sum(1), self.scales * 1


def task_losses(outputs, inputs):
    classes, values, _ = outputs
    return torch.stack([F.cross_entropy(classes, inputs[1]), (values - inputs[2])[inputs[3]].square().mean()])


STACKED = {
    "times": lambda o, i: (torch.exp(-o[2]) * task_losses(o, i)).sum() + o[2].sum(),
    "times, added": lambda o, i: (torch.exp(-o[2]) * task_losses(o, i) + o[2]).mean(),
    "divided": lambda o, i: (task_losses(o, i) / (2 * o[2].exp()) + torch.log1p(o[2].exp())).sum(),
    "product": lambda o, i: o[2].softmax(0) @ task_losses(o, i),
    "einsum": lambda o, i: torch.einsum("t,t->", task_losses(o, i), o[2].exp()) - o[2][0],
}


@pytest.mark.parametrize(
    "settings",
    [
        {"num_microbatches": 4},  # of two samples, as many as there are terms
        {"num_microbatches": 2, "pp_size": 2},
        {"num_microbatches": 1, "dp_size": 2, "zero_stage": 3},
    ],
    ids=str,
)
def test_stacked_terms_with_learned_factors_count_each_by_its_own(settings):
    generator = torch.Generator().manual_seed(0)
    x, values = torch.randn(8, 5, generator=generator), torch.randn(8, generator=generator)
    # The mask is not empty in any two samples.
    mask = torch.tensor([True, False, True, True, False, True, True, False])
    batches = [(x, torch.randint(0, 5, (8,), generator=generator), values, mask)]
    for name, criterion in STACKED.items():
        model = Tasks()
        criterion(model(x), batches[0]).backward()
        found = train(Tasks, batches, criterion=criterion, **settings)
        for parameter, value in model.named_parameters():
            torch.testing.assert_close(found["gradients"][parameter], value.grad, atol=1e-6, rtol=1e-5, msg=name)


def _boxes(counts):
    generator = torch.Generator().manual_seed(sum(counts))
    targets = [{"boxes": torch.rand(number, 4, generator=generator)} for number in counts]
    return {"input": torch.randn(len(counts), 8, generator=generator), "targets": targets}


def _lists(o, i):
    return [(row - one["boxes"]).abs().sum(1) for row, one in zip(o, i["targets"], strict=True)]


def _of_image(row, target):
    return F.l1_loss(row.expand_as(target["boxes"]), target["boxes"])


def _of_all(o, i):
    lists = _lists(o, i)
    return sum(one.sum() for one in lists) / max(sum(map(len, lists)), 1)


def _hard(o, i):
    losses = F.softplus(o[:, 0])
    hard = losses > 0.02
    return (losses * hard).sum() / max(hard.sum().item(), 1)


def _hard_in_tensors(o, i):
    losses = F.softplus(o[:, 0])
    hard = losses > 0.02
    return losses[hard].mean() if hard.any() else (losses * 0).sum()


def _detector():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def _with_outputs(values):
    """Inputs for which the detector's first output has about these values."""
    inputs = torch.zeros(len(values), 8, requires_grad=True)
    optimizer, model = torch.optim.Adam([inputs], lr=5.0), _detector()
    for _ in range(200):
        optimizer.zero_grad()
        F.smooth_l1_loss(model(inputs)[:, 0], torch.tensor(values, dtype=torch.float)).backward()
        optimizer.step()
    return inputs.detach()


def _unlike():
    return _boxes(_UNLIKE)


def _easy():
    """Five are hard, one of which is in the second half."""
    return _boxes(_ALIKE) | {"input": _with_outputs([0, 0, 0, 0, -99, 0, -99, -99])}


_ALIKE, _UNLIKE = [1] * 8, [1, 1, 1, 1, 4, 3, 4, 2]
_BOXES = {"num_microbatches": 2, "batch_dims": {"targets": "list"}}


@pytest.mark.parametrize(
    ("loss_of", "later"),
    [
        (_of_all, _unlike),
        (lambda o, i: torch.cat(_lists(o, i)).mean(), _unlike),
        (lambda o, i: torch.stack([one for of in _lists(o, i) for one in of]).mean(), _unlike),
        (_hard, _easy),
        (_hard_in_tensors, _easy),
    ],
)
@pytest.mark.parametrize(("num_microbatches", "dp_size"), [(2, 1), (1, 2)])
def test_a_loss_that_the_first_step_shows_as_a_mean_over_samples(loss_of, later, num_microbatches, dp_size):
    """By chance: each sample has one box, or is a hard one."""
    settings, others = _BOXES | {"num_microbatches": num_microbatches}, later()

    def run():
        booster, model, optimizer = boosted(_detector(), sgd, _boxes([1]), **settings)
        replica = booster.plugin.layout.here.dp

        def step(given):
            batch = {
                name: one[replica * len(one) // dp_size : (replica + 1) * len(one) // dp_size]
                for name, one in given.items()
            }
            booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)
            optimizer.step()

        step(_boxes(_ALIKE))
        with pytest.raises(ConfigError, match=r"is made in another way|cannot be counted"):
            step(others)

    Loopback(dp_size).run(run)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda o, i: torch.stack([one.mean() for one in _lists(o, i)]).mean(),
        lambda o, i: sum(one.sum() / len(one) for one in _lists(o, i)) / len(o),
        lambda o, i: sum(map(_of_image, o, i["targets"])) / len(o) + o.square().mean(),
        lambda o, i: o.square().mean(0).mean(),
    ],
)
def test_means_over_the_items_of_each_sample_are_means_over_samples(loss_of):
    given = [_boxes(_UNLIKE), _boxes(_ALIKE), _boxes([2, 2, 2, 2, 5, 5, 5])]
    losses = []

    def run():
        booster, model, optimizer = boosted(_detector(), sgd, _boxes([1]), **_BOXES)
        for one in given:
            losses.append(booster.execute_pipeline(iter([one]), model, loss_of, optimizer)["loss"].item())
            optimizer.step()

    Loopback(1).run(run)
    model = _detector()
    optimizer = sgd(model.parameters())
    for one, found in zip(given, losses, strict=True):
        optimizer.zero_grad()
        loss = loss_of(model(one["input"]), one)
        loss.backward()
        optimizer.step()
        assert found == pytest.approx(loss.item(), rel=1e-5)


class Prioritised:
    """Importance weights that are normalised, with a power that a script anneals, and a factor of another term."""

    def __init__(self, power):
        self.power, self.factor = power, 0.1

    def __call__(self, o, i):
        weights = i["targets"] ** -self.power
        return (weights / weights.mean() * o.square().sum(1)).mean() + self.factor * o.abs().mean()


def _priorities():
    return _boxes(_ALIKE) | {"targets": torch.arange(1.0, 9)}


@pytest.mark.parametrize("power", [0.4, 1])
@pytest.mark.parametrize(("num_microbatches", "dp_size"), [(2, 1), (1, 2)])
def test_a_number_that_items_depend_on_may_not_change(power, num_microbatches, dp_size):
    def run():
        settings = {"num_microbatches": num_microbatches}
        booster, model, optimizer = boosted(_detector(), sgd, _boxes([1]), **settings)
        batch = replica_part(_priorities(), booster.plugin.layout.here.dp, dp_size)
        criterion = Prioritised(power)
        for _ in range(2):
            booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
            criterion.factor *= 2
        criterion.power += 1
        with pytest.raises(ConfigError, match="is made in another way than in the criterion's first step"):
            booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        optimizer.zero_grad()
        loss = booster.execute_pipeline(iter([batch]), model, Prioritised(criterion.power), optimizer)["loss"]
        return float(loss), gradients_of(booster, model)

    model = _detector()
    loss = Prioritised(power + 1)(model(_priorities()["input"]), _priorities())
    loss.backward()
    found = Loopback(dp_size).run(run)
    if dp_size == 1:
        assert found[0][0] == pytest.approx(loss.item(), rel=1e-5)
    assert_near(found[0][1], {name: one.grad for name, one in model.named_parameters()})


class _Queries(nn.Module):
    """Boxes and classes for a number of queries, as a detector with a decoder makes them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.classes, self.boxes = nn.Linear(8, 6 * 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, input):
        of_queries = self.queries(input).view(-1, 6, 8).tanh()
        return {"classes": self.classes(of_queries), "boxes": self.boxes(of_queries).sigmoid()}


@torch.no_grad()
def _assigned(o, targets):
    """Of each image, the queries that are assigned to its boxes, as scipy gives them: arrays without a device."""
    found = []
    for boxes, one in zip(o["boxes"], targets, strict=True):
        costs = torch.cdist(boxes, one["boxes"], p=1).cpu().numpy()
        free = list(range(len(costs)))
        rows = [free.pop(int(costs[free, column].argmin())) for column in range(costs.shape[1])]
        found.append(torch.as_tensor(rows, dtype=torch.int64))
    return found


def _detection(count_of):
    """DETR's loss: classes of all queries, and distances of boxes over the number of boxes in the batch."""

    def criterion(o, i):
        targets = i["targets"]
        queries = _assigned(o, targets)
        images = torch.cat([torch.full_like(one, n) for n, one in enumerate(queries)])
        queries = torch.cat(queries)
        classes = torch.full(o["classes"].shape[:2], 3)
        classes[images, queries] = torch.cat([one["labels"] for one in targets])
        of_classes = F.cross_entropy(o["classes"].transpose(1, 2), classes)
        boxes = torch.cat([one["boxes"] for one in targets])
        distances = F.l1_loss(o["boxes"][images, queries], boxes, reduction="none").sum() / count_of(targets)
        return of_classes + 5 * distances

    return criterion


def _labelled(counts):
    batch = _boxes(counts)
    generator = torch.Generator().manual_seed(1)
    for one in batch["targets"]:
        one["labels"] = torch.randint(0, 3, (len(one["boxes"]),), generator=generator)
    return batch


COUNTS_OF_BOXES = {
    "len": lambda targets: max(sum(len(one["labels"]) for one in targets), 1),
    "shape": lambda targets: sum(one["boxes"].shape[0] for one in targets),
    "numel": lambda targets: sum(one["labels"].numel() for one in targets),
    "float": lambda targets: max(float(sum(len(one["boxes"]) for one in targets)), 1.0),
    "item": lambda targets: torch.as_tensor([sum(len(one["boxes"]) for one in targets)]).clamp(min=1).item(),
    "cat": lambda targets: torch.cat([one["labels"] for one in targets]).numel(),
}


@pytest.mark.parametrize("counted", COUNTS_OF_BOXES)
@pytest.mark.parametrize(
    "settings", [{"num_microbatches": 2}, {"num_microbatches": 4, "pp_size": 2}, {"dp_size": 2}], ids=str
)
def test_a_term_over_the_boxes_of_all_images_counts_by_their_number(counted, settings):
    criterion = _detection(COUNTS_OF_BOXES[counted])
    fewest = 0 if counted in ("len", "float", "item") else 1  # which divide by 1 where there is no box
    given = [_labelled(counts) for counts in ([3, 1, 2, 4], [1, 2, 1, 1], [5, 1, fewest, 3])]
    given[1]["targets"].reverse()
    dp_size = settings.get("dp_size", 1)
    layout = {"num_microbatches": 1, **settings}
    layout.pop("dp_size", None)

    def run():
        sample = first_microbatch({"input": given[0]["input"][: 4 // dp_size]}, layout)
        booster, model, optimizer = boosted(_Queries(), sgd, sample, **layout)
        replica, losses = booster.plugin.layout.here.dp, []
        for one in given:
            part = replica_part(one, replica, dp_size)
            losses.append(booster.execute_pipeline(iter([part]), model, criterion, optimizer)["loss"].item())
            optimizer.step()
        return losses, {name: one.detach().clone() for name, one in model.named_parameters() if not one.is_meta}

    ranks = Loopback(layout.get("pp_size", 1) * dp_size).run(run)
    model = _Queries()
    optimizer = sgd(model.parameters())
    for one in given:
        optimizer.zero_grad()
        criterion(model(one["input"]), one).backward()
        optimizer.step()
    weights = {name: value for _, found in ranks for name, value in found.items()}
    for name, value in model.named_parameters():
        torch.testing.assert_close(weights[name], value.detach(), atol=1e-6, rtol=1e-5, msg=name)


def test_boxes_that_are_as_many_as_images_at_first_are_counted():
    given = [_labelled(counts) for counts in ([1, 1, 1, 1], [3, 1, 2, 4])]

    def run():
        booster, model, optimizer = boosted(_Queries(), sgd, {"input": given[0]["input"][:2]}, **_BOXES)
        for one in given:
            booster.execute_pipeline(iter([one]), model, _detection(COUNTS_OF_BOXES["len"]), optimizer)
            optimizer.step()
        return {name: one.detach().clone() for name, one in model.named_parameters()}

    model = _Queries()
    optimizer = sgd(model.parameters())
    for one in given:
        optimizer.zero_grad()
        _detection(COUNTS_OF_BOXES["len"])(model(one["input"]), one).backward()
        optimizer.step()
    (found,) = Loopback(1).run(run)
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), atol=1e-6, rtol=1e-5, msg=name)


def _of_classes_that_are_there(o, i):
    losses = F.cross_entropy(o, i["y"], reduction="none")
    return torch.stack([losses[i["y"] == c].mean() for c in range(4) if (i["y"] == c).any()]).mean()


def _of_values_that_are_there(o, i):
    losses = F.cross_entropy(o, i["y"], reduction="none")
    return torch.stack([losses[i["y"] == c].mean() for c in i["y"].unique()]).mean()


@pytest.mark.parametrize("criterion", [_of_classes_that_are_there, _of_values_that_are_there])
def test_a_mean_over_classes_is_refused_where_all_are_there_at_first(criterion):
    batch = {"input": torch.randn(8, 5), "y": torch.arange(8) % 4}

    def run():
        booster, model, optimizer = boosted(nn.Linear(5, 4), sgd, batch["input"][:4], num_microbatches=2)
        with pytest.raises(ConfigError, match="over the groups that are there"):
            booster.execute_pipeline(iter([batch]), model, criterion, optimizer)

    Loopback(1).run(run)


def _one_hot(o, i):
    targets = torch.zeros(len(o), 4)
    targets[torch.arange(len(o)), i["y"]] = 1
    return F.binary_cross_entropy_with_logits(o, targets)


def _one_by_one(o, i):
    losses = [F.mse_loss(row, number.float().expand_as(row)) for row, number in zip(o, i["y"], strict=True)]
    return torch.stack(losses).mean() + F.cross_entropy(o, i["y"], ignore_index=3)


@pytest.mark.parametrize("criterion", [_one_hot, _one_by_one])
@pytest.mark.parametrize(("num_microbatches", "dp_size"), [(2, 1), (1, 2)])
def test_what_a_script_makes_for_as_many_samples_is_made_for_each_part(criterion, num_microbatches, dp_size):
    generator = torch.Generator().manual_seed(0)
    batch = {"input": torch.randn(8, 5, generator=generator), "y": torch.randint(0, 4, (8,), generator=generator)}

    def model():
        torch.manual_seed(1)
        return nn.Linear(5, 4)

    def run():
        first = batch["input"][: 8 // dp_size // num_microbatches]
        booster, made, optimizer = boosted(model(), sgd, {"input": first}, num_microbatches=num_microbatches)
        part = replica_part(batch, booster.plugin.layout.here.dp, dp_size)
        booster.execute_pipeline(iter([part]), made, criterion, optimizer)
        return gradients_of(booster, made)

    whole = model()
    criterion(whole(batch["input"]), batch).backward()
    for found in Loopback(dp_size).run(run):
        assert_near(found, {name: one.grad for name, one in whole.named_parameters()}, 1e-6)
