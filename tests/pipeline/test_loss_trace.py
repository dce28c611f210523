"""The terms of a loss, as the calls that made it show them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hybridpp.pipeline.loss_trace import LossTrace

ROWS, LENGTH, CLASSES = 4, 6, 5
MASK = torch.arange(LENGTH) < torch.tensor([2, 6, 3, 1])[:, None]
IDS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % CLASSES
INPUTS = {"ids": IDS, "labels": IDS.masked_fill(~MASK, -100), "mask": MASK.float()}


def traced(make, training=True):
    """What the terms of a loss are divided by: numbers, None for a constant, text for what is no sum."""
    torch.manual_seed(0)
    embedding = nn.Embedding(CLASSES, CLASSES)
    trace = LossTrace([INPUTS], ROWS)
    with torch.set_grad_enabled(training), trace:
        outputs = embedding(INPUTS["ids"])
        trace.in_criterion = True
        loss = make(outputs, INPUTS)
    terms = trace.terms(loss)
    if terms is None:
        return None
    if not any(term.why for term in terms):
        assert torch.isclose(sum(torch.as_tensor(term.make()) for term in terms), loss)
    return [
        term.why
        or (None if term.factors is None else [float(one.count.of(INPUTS, ROWS)) ** -one.power for one in term.factors])
        for term in terms
    ]


def tokens(o, i):
    return F.cross_entropy(o.transpose(1, 2), i["labels"], reduction="none")


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda o, i: F.cross_entropy(o.view(-1, CLASSES), i["labels"].view(-1)), [[12]]),
        (lambda o, i: F.cross_entropy(o[:, :-1].flatten(0, 1), i["labels"][:, 1:].flatten()), [[8]]),
        (lambda o, i: F.nll_loss(o.transpose(1, 2), i["labels"], ignore_index=-100), [[12]]),
        (lambda o, i: (tokens(o, i) * i["mask"]).sum() / i["mask"].sum(), [[12]]),
        (lambda o, i: tokens(o, i)[i["mask"].bool()].mean(), [[12]]),
        (lambda o, i: tokens(o, i).masked_select(i["mask"] > 0).mean(), [[12]]),
        (lambda o, i: tokens(o, i).sum() / max(int(i["mask"].sum()), 1), [[12]]),
        (lambda o, i: tokens(o, i).sum() / (2 * i["labels"].shape[0] * i["labels"].size(1) - 1), [[47]]),
        (lambda o, i: tokens(o, i).sum(1).mean(), [[4]]),
        (lambda o, i: tokens(o, i).sum() / len(o), [[4]]),
        (lambda o, i: tokens(o, i).mean() * len(o) / 2, [[24]]),  # a plain factor is a constant first
        (lambda o, i: tokens(o, i).sum() * 0.5, [[]]),
        (lambda o, i: F.mse_loss(o, F.one_hot(i["ids"], CLASSES).float()), [[120]]),
        (lambda o, i: F.mse_loss(o, 0 * o.detach(), weight=i["mask"][..., None].expand(-1, -1, CLASSES)), [[60]]),
        (lambda o, i: F.l1_loss(o, 0 * o.detach(), weight=i["mask"][..., None].expand(-1, -1, CLASSES)), [[60]]),
        (lambda o, i: F.mse_loss(o, 0 * o.detach(), weight=i["mask"][..., None].expand_as(o)), [[60]]),
        (lambda o, i: F.mse_loss(o[..., 0], i["mask"], size_average=False), [[]]),
        (lambda o, i: F.kl_div(o, o.softmax(-1), reduction="batchmean"), [[4]]),
        (lambda o, i: F.kl_div(o.transpose(0, 1), o.transpose(0, 1).softmax(-1), reduction="batchmean"), [[]]),
        (lambda o, i: F.ctc_loss(o.transpose(0, 1), i["ids"][:, 1:3], (LENGTH,) * ROWS, (2,) * ROWS), [[4]]),
        (lambda o, i: tokens(o, i).mean() + 3.0 - o.square().mean(), [[24], None, [4]]),
        (lambda o, i: torch.stack([tokens(o, i).mean(), torch.tensor(1.0)]).mean(), [[24], None]),
        (lambda o, i: (tokens(o, i) * i["mask"] / i["mask"].sum()).sum(), [[12]]),
        (lambda o, i: (tokens(o, i) * (i["mask"] / i["mask"].sum().item())).sum(1).sum(), [[12]]),
        (lambda o, i: (tokens(o, i) * i["mask"] / int(i["mask"].sum())).sum(), [[12]]),
        (lambda o, i: (tokens(o, i) * i["mask"] / i["mask"].mean()).mean(), [[12]]),
        (lambda o, i: torch.dot(tokens(o, i).flatten(), (i["mask"] / i["mask"].sum()).flatten()), [[12]]),
        (lambda o, i: torch.einsum("bt,bt->", tokens(o, i), i["mask"] / i["mask"].sum()), [[12]]),
        (lambda o, i: torch.where(i["mask"] > 0, tokens(o, i) / i["mask"].sum(), 0.0).sum(), [[12]]),
        (lambda o, i: (tokens(o, i) / i["mask"].sum() + o.square().mean(-1) / i["mask"].sum()).sum(), [[12]]),
        # Of eight experts, which are no samples.
        (lambda o, i: o.flatten(0, 1).repeat(8, 1).view(8, -1, CLASSES).sum(0).square().mean(), [[4]]),
        (lambda o, i: tokens(o, i).mean().exp(), ["exp of a sum over samples"]),
        (lambda o, i: tokens(o, i).mean() * o.mean(), ["mul of a sum over samples"]),
        (lambda o, i: (o - o.mean(0)).square().mean(), ["sub of samples and of a sum over them"]),
        (lambda o, i: (o[:, 0] @ o[:, 0].T).square().mean(), ["matmul of each sample with each other"]),
        (
            lambda o, i: F.cross_entropy(o[:, 0, :4], torch.arange(ROWS)),
            ["classes that are the samples themselves"],
        ),
        (lambda o, i: o.abs().max(), ["max over the samples"]),
        (lambda o, i: o.max(-1).values.mean() - o.topk(2).values.mean(), [[4], [4]]),
        (lambda o, i: tokens(o, i).flatten().topk(3).values.mean(), ["topk over the samples"]),
        (lambda o, i: tokens(o, i)[tokens(o, i).mean(1).topk(2).indices].mean(), ["topk over the samples"]),
        (lambda o, i: tokens(o, i).mean(1).sort().values[:2].sum(), ["sort over the samples"]),
        (lambda o, i: tokens(o, i)[tokens(o, i) > tokens(o, i).median()].mean(), ["median over the samples"]),
        (lambda o, i: tokens(o, i).nanmean() + o.mean(), ["nanmean over the samples", [4]]),
    ],
)
def test_a_term_is_a_sum_divided_by_counts_of_the_inputs(make, expected, training):
    assert traced(make, training) == expected


HEAD = nn.Parameter(torch.linspace(-1, 1, CLASSES * CLASSES).view(CLASSES, CLASSES))
WEIGHT = torch.arange(1.0, CLASSES + 1)
LABELS = INPUTS["labels"].flatten()


def fused(o, i, head=HEAD, target=None, **settings):
    target = i["labels"].flatten() if target is None else target
    return F.linear_cross_entropy(o.flatten(0, 1), head, target, **settings)


IS_FUSED = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 is the first that has it")


@IS_FUSED
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (fused, [[12]]),
        (lambda o, i: fused(o, i, ignore_index=-100, options=nn.LinearCrossEntropyOptions()), [[12]]),
        (lambda o, i: fused(o, i, target=i["ids"].flatten(), linear_bias=HEAD[0], ignore_index=3), [[19]]),
        (lambda o, i: fused(o, i, weight=WEIGHT), [[float(WEIGHT[LABELS[LABELS >= 0]].sum())]]),
        (lambda o, i: fused(o, i, label_smoothing=0.1), [[12]]),
        (lambda o, i: fused(o, i, reduction="sum"), [[]]),
        (lambda o, i: fused(o, i, reduction="sum") / i["mask"].sum(), [[12]]),
        (lambda o, i: (fused(o, i, reduction="none") * i["mask"].flatten()).sum() / i["mask"].sum(), [[12]]),
        (lambda o, i: fused(o, i, reduction="none")[i["mask"].flatten() > 0].mean(), [[12]]),
        (lambda o, i: fused(o, i, target=F.one_hot(i["ids"].flatten(), CLASSES).float()), [[4]]),
        (lambda o, i: F.linear_cross_entropy(i["mask"], HEAD[:, :1].expand(-1, LENGTH), i["labels"][:, 0]), [[4]]),
        (
            lambda o, i: F.linear_cross_entropy(o[:, 0], o[:, 1], torch.arange(ROWS)),
            ["classes that are the samples themselves"],
        ),
    ],
)
def test_a_head_that_is_fused_with_its_loss_counts_as_its_loss(make, expected, training):
    assert traced(make, training) == expected


@IS_FUSED
def test_a_fused_head_made_of_other_samples_is_told():
    trace, embedding = LossTrace([INPUTS], ROWS), nn.Embedding(CLASSES, CLASSES)
    with trace:
        o = embedding(INPUTS["ids"])
        loss = F.linear_cross_entropy(o[:, 0], o[:, 1], INPUTS["labels"][:, 0] % ROWS)
    (term,) = trace.terms(loss)
    assert term.why == "linear_cross_entropy of each sample with each other"


def other_samples(o):
    return torch.tensor([*range(1, len(o)), 0])


def pooled_parts(o):
    return o.mean(1)[: len(o) // 2], o.mean(1)[len(o) // 2 :]


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        (lambda o: o.mean(1).T.sum(1).square().mean(), "square of a sum over samples"),
        (lambda o: o.permute(2, 1, 0).mean(-1).square().mean(), "square of a sum over samples"),
        (lambda o: (o.mean(1).T @ o.mean(1)).square().mean(), "square of a sum over samples"),
        (lambda o: torch.einsum("nld,nle->de", o, o).square().mean(), "square of a sum over samples"),
        (
            lambda o: torch.einsum("nd,md->nm", o[:, 0], o[:, 1]).square().mean(),
            "einsum of each sample with each other",
        ),
        (lambda o: (o.mean(1)[:, None] - o.mean(1)[None]).square().mean(), "sub of each sample with each other"),
        (lambda o: torch.cdist(o[:, 0], o[:, 1]).mean(), "cdist of each sample with each other"),
        (lambda o: -o.mean(1).T.softmax(-1).log().mean(), "softmax over the samples"),
        (lambda o: (o - o.roll(1, 0)).square().mean(), "roll over the samples"),
        (lambda o: (o - o[other_samples(o)]).square().mean(), "getitem of chosen samples"),
        (lambda o: F.mse_loss(*pooled_parts(o)), "a part of the samples"),
        (lambda o: sum(o.mean(1).unbind(0)).square().mean(), "add of samples with others"),
        (lambda o: o.mean(1).std(0).mean(), "std of the samples"),
        (lambda o: o.mean(1).max(0).values.mean(), "max of the samples"),
        (lambda o: o.norm(), "norm of the samples"),
        (lambda o: o.mean(1).T.sum(0).square().mean(), ""),
        (lambda o: o.reshape(-1, CLASSES).T.sum(0).view(-1, LENGTH).sum(1).square().mean(), ""),
        (lambda o: -o.transpose(0, 1).softmax(0).log().mean(), ""),
        (lambda o: (o @ o.transpose(1, 2)).square().mean(), ""),
        (lambda o: (o[:, :, None] - o[:, None]).square().mean(), ""),
        (lambda o: (o.mean(1).T @ o.mean(1)).trace() / len(o), ""),
        (lambda o: torch.stack([o, 2 * o])[-1].norm(dim=-1).mean(), ""),
        (lambda o: sum(one.square().mean() for one in o) / len(o), ""),
        (lambda o: sum(one.square().mean() for one in o.split(1)) / len(o), ""),
    ],
)
@pytest.mark.parametrize("is_received", [False, True])
def test_a_model_that_couples_samples_in_any_dimension_is_told(inside, why, is_received):
    trace, embedding = LossTrace([INPUTS], ROWS), nn.Embedding(CLASSES, CLASSES)
    if is_received:
        hidden = embedding(INPUTS["ids"]) * 1
        trace.of_earlier_stages([hidden, torch.ones(1, LENGTH, CLASSES)])
    with trace:
        loss = inside(hidden if is_received else embedding(INPUTS["ids"]))
    assert next((term.why for term in trace.terms(loss) if term.why), "") == why


@pytest.mark.parametrize(
    ("derive", "expected"),
    [
        (lambda energy, x, weight: torch.autograd.grad(energy.sum(), x, create_graph=True), [[24]]),
        (lambda energy, x, weight: torch.autograd.grad(energy, [x], torch.ones(ROWS), create_graph=True), [[24]]),
        (
            lambda energy, x, weight: torch.autograd.grad(energy.mean(), x, create_graph=True),
            ["derivative of a mean over samples"],
        ),
        (
            lambda energy, x, weight: torch.autograd.grad(energy, weight, torch.ones(ROWS), create_graph=True),
            ["derivative by parameters of a sum over samples"],
        ),
    ],
)
def test_derivatives_by_samples_are_each_samples_own(derive, expected):
    weight, inputs = nn.Parameter(torch.rand(LENGTH)), {"x": torch.rand(ROWS, LENGTH)}
    trace = LossTrace([inputs], ROWS)
    with trace:
        x = inputs["x"].detach().requires_grad_()
        (force,) = derive((x * weight).tanh().sum(1), x, weight)
        loss = (force - 1).square().mean()
    found = [
        term.why or (term.factors and [float(one.count.of(inputs, ROWS)) for one in term.factors])
        for term in trace.terms(loss)
    ]
    assert found == expected


def test_counts_of_one_batch_are_those_of_another():
    trace = LossTrace([INPUTS], ROWS)
    with trace:
        labels = INPUTS["labels"].clone()
        labels[labels == 1] = -100
        logits = nn.Embedding(CLASSES, CLASSES)(INPUTS["ids"])
        loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
    (term,) = trace.terms(loss)
    count = term.factors[0].count
    more = {"labels": torch.tensor([[1, 2, 3], [-100, 1, 0]])}
    assert int(count.of(more, 2)) == 3
    assert torch.equal(more["labels"], torch.tensor([[1, 2, 3], [-100, 1, 0]]))


def test_what_is_drawn_is_no_count():
    trace = LossTrace([INPUTS], ROWS)
    with trace:
        kept = (torch.rand_like(INPUTS["mask"]) > 0.5).float()
        logits = nn.Embedding(CLASSES, 1)(INPUTS["ids"])[..., 0]
        loss = (logits * kept).sum() / kept.sum()
    (term,) = trace.terms(loss)
    (factor,) = term.factors
    assert (factor.is_observed, factor.observed) == (True, kept.sum())


def test_terms_keep_their_values_where_a_loss_is_written_to_in_place():
    trace = LossTrace([INPUTS], ROWS)
    outputs = nn.Embedding(CLASSES, CLASSES)
    with trace:
        computed = outputs(INPUTS["ids"])
        trace.in_criterion = True
        loss = F.cross_entropy(computed.transpose(1, 2), INPUTS["labels"])
        loss += 0.5 * computed.softmax(-1).mean((0, 1)).square().sum()
        loss += computed.square().mean()
    terms = trace.terms(loss)
    assert len(terms) == 3
    torch.testing.assert_close(sum(term.make() for term in terms), loss)
