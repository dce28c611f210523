"""Losses that put samples together, and those that look like it."""

import re
import weakref

import pytest
import torch
from torch.nn import functional

from hybridpp.pipeline import loss_coupling
from hybridpp.pipeline.loss_coupling import LossSection, mark_outputs, num_samples_of

_CLASSES = torch.arange(6) % 4
_WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
_ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def _model(rows):
    outputs = rows @ _WEIGHT
    mark_outputs([outputs], len(rows))
    return outputs


def _coupling(loss_of, rows=_ROWS, is_of_one_item=None):
    loss = loss_of(_model(rows))
    return LossSection(loss).coupling(loss, is_of_one_item=is_of_one_item)


def _contrastive(out):
    codes = functional.normalize(out, dim=-1)
    return functional.cross_entropy(codes @ codes.T, torch.arange(len(out)))


def _dice(out):
    shares = out.sigmoid()
    return 1 - 2 * (shares * _CLASSES[:, None]).sum() / (shares.sum() + _CLASSES.sum())


COUPLED = {
    "contrastive": _contrastive,
    "root of a mean": lambda out: out.square().mean().sqrt(),
    "ratio of sums": _dice,
    "standardised": lambda out: ((out - out.mean(0)) / out.std(0)).pow(3).mean(),
    "compared with a mean": lambda out: functional.softplus(out[:, 0] - _model(-_ROWS)[:, 0].mean()).mean(),
}
UNCOUPLED = {
    "cross entropy": lambda out: functional.cross_entropy(out, _CLASSES),
    "linear": lambda out: out.mean(),
    "hinge": lambda out: functional.relu(1 - out[:, 0]).mean(),
    "pairs": lambda out: -functional.logsigmoid(out[:3] - out[3:]).mean(),
    "lists": lambda out: functional.cross_entropy(out[:, 0].view(2, 3), torch.tensor([0, 1])),
    "pairs of two calls": lambda out: functional.softplus(out - _model(-_ROWS)).mean(),
    "rows of samples": lambda out: functional.cross_entropy(out.reshape(12, 2), torch.arange(12) % 2),
    "another dimension": lambda out: functional.cross_entropy(out.T, torch.arange(4)),
}


def _hard(out):
    distances = torch.cdist(out, out)
    same = _CLASSES[:, None] == _CLASSES
    return (distances.where(same, 0).amax(1) - distances.where(~same, 9).amin(1) + 0.3).relu().mean()


BENT = {
    "free bits": (lambda out: out.square().mean(0).clamp(min=0.5).sum(), "limited"),
    "flooding": (lambda out: (functional.cross_entropy(out, _CLASSES) - 0.1).abs() + 0.1, "limited"),
    "hinge of means": (lambda out: (out[:, 0].mean() - out[:, 1].mean() + 1).relu(), "limited"),
    "distances of means": (lambda out: (out - out.mean(0)).abs().mean(), "limited"),
    "norm of a mean": (lambda out: out.mean(0).norm(p=1), "limited"),
    "hardest": (lambda out: functional.cross_entropy(out, _CLASSES, reduction="none").topk(2).values.mean(), "chooses"),
    "worst": (lambda out: functional.cross_entropy(out, _CLASSES, reduction="none").max(), "chooses"),
    "median": (lambda out: out[:, 0].median(), "chooses"),
    "sorted": (lambda out: (out.sort(0).values * torch.arange(6.0)[:, None]).sum(), "chooses"),
    "largest of each class": (lambda out: out.max(0).values.sum(), "chooses"),
    "quantile": (lambda out: out[:, 0].quantile(0.3), "chooses"),
    "batch-hard triplets": (_hard, "chooses|distances"),
    "distances": (lambda out: torch.cdist(out, out).mean(), "distances"),
    "condensed distances": (lambda out: torch.pdist(out).mean(), "distances"),
    "hinge of neighbours": (lambda out: (1 - (out[:-1, 0] - out[1:, 0])).relu().mean(), "compared"),
    "neighbours": (lambda out: (out[1:] - out[:-1]).abs().mean() + functional.cross_entropy(out, _CLASSES), "compared"),
    "neighbours of features": (lambda out: (out.T[:, 1:] - out.T[:, :-1]).abs().sum(0).mean(), "compared"),
    "a ring": (lambda out: functional.l1_loss(out, out.roll(1, 0)), "compared"),
    "distances of two halves": (lambda out: torch.cdist(out[:3], out[3:]).mean(), ""),
}
STRAIGHT = {
    "hinge": lambda out: functional.relu(1 - out[:, 0]).mean(),
    "absolute values": lambda out: functional.l1_loss(out, torch.ones_like(out)),
    "norms of samples": lambda out: out.norm(p=1, dim=1).mean() + out.norm(p=1),
    "largest logit": lambda out: out.max(1).values.mean() + out.topk(2, -1).values.mean() + out.amax(dim=-1).mean(),
    "triplets of calls": lambda out: functional.triplet_margin_loss(out, _model(-_ROWS), _model(_ROWS * 2)),
    "distances to prototypes": lambda out: torch.cdist(out, torch.eye(4)).amin(1).mean(),
    "distances of prototypes": lambda out: torch.cdist(torch.eye(4), out).mean(),
    "distances of pairs": lambda out: torch.cdist(out[:3], out[3:]).diagonal().mean(),
    "a guard": lambda out: functional.cross_entropy(out, _CLASSES).clamp(max=100.0),
    "limited samples": lambda out: functional.cross_entropy(out, _CLASSES, reduction="none").clamp(0.1, 2).mean(),
    "interleaved pairs": lambda out: (out[::2] - out[1::2]).abs().mean(),
    "triplets": lambda out: (out[:2] - out[2:4]).abs().mean() + (out[:2] - out[4:]).abs().mean(),
    "a list's hinge": lambda out: (1 - out.view(2, 3, 4)[:, :1] + out.view(2, 3, 4)[:, 1:]).relu().mean(),
    "changes along features": lambda out: (out[:, 1:] - out[:, :-1]).abs().mean(),
    "pairs' hinge": lambda out: (out[:3] - out[3:]).mean(1).clamp(min=0).mean(),
}


@pytest.mark.parametrize("name", BENT)
def test_what_has_no_second_derivative_and_couples_all_samples(name):
    loss_of, how = BENT[name]
    if how:
        assert re.search(how, _coupling(loss_of))
    assert _coupling(loss_of, is_of_one_item=True) == ""


@pytest.mark.parametrize("name", STRAIGHT)
def test_what_has_no_second_derivative_and_couples_none(name):
    assert _coupling(STRAIGHT[name]) == ""


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_all_samples_is_found(name):
    assert "all other samples" in _coupling(COUPLED[name])


@pytest.mark.parametrize("name", [one for one in UNCOUPLED if one != "another dimension"])
def test_a_loss_of_samples_or_of_groups_of_them_is_none(name):
    assert _coupling(UNCOUPLED[name]) == ""


def test_a_softmax_over_the_samples_is_found_whatever_it_is_called():
    assert _coupling(UNCOUPLED["another dimension"])


@pytest.mark.parametrize(("is_of_one_item", "is_found"), [(True, False), (False, True), (None, False)])
def test_two_coupled_samples_may_be_a_pair(is_of_one_item, is_found):
    assert bool(_coupling(_contrastive, _ROWS[:2], is_of_one_item)) is is_found


def test_a_sum_of_losses_of_which_one_couples_samples_is_found():
    assert _coupling(lambda out: functional.cross_entropy(out, _CLASSES) + 0.1 * _contrastive(out))


def test_outputs_of_which_others_are_made_are_not_gone_through():
    calls = []

    class Head(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return rows * 2

        @staticmethod
        def backward(ctx, gradient):
            calls.append(1)
            return gradient * 2

    hidden = _model(_ROWS)
    logits = Head.apply(hidden.tanh()).exp()  # some nodes away
    mark_outputs([hidden, logits], 6)
    loss = _contrastive(logits) + hidden.mean()
    assert LossSection(loss).coupling(loss, is_of_one_item=None)
    assert calls == []


def test_a_function_of_the_script_is_not_asked_twice():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return rows.exp()

        @staticmethod
        def backward(ctx, gradient):
            raise AssertionError("it may change what it keeps")

    assert _coupling(lambda out: Own.apply(out).mean().sqrt()) == ""


def test_what_is_too_large_is_not_known(monkeypatch):
    monkeypatch.setattr(loss_coupling, "MAX_ELEMENTS", 23)
    assert _coupling(_contrastive) == ""


def test_memory_that_runs_out_in_the_look_is_said(monkeypatch, caplog):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(loss_coupling, "_are_coupled", out_of_memory)
    assert _coupling(_contrastive) == ""
    assert "out of memory while a loss" in caplog.text


def test_gradients_and_kept_gradients_are_as_without_the_look():
    def gradients(looks):
        out = _model(_ROWS)
        out.retain_grad()
        loss = _contrastive(out)
        if looks:
            assert LossSection(loss).coupling(loss, is_of_one_item=None)
        loss.backward()
        gradient, _WEIGHT.grad = _WEIGHT.grad, None
        return out.grad, gradient

    for looked, plain in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(looked, plain)


def test_a_mark_keeps_no_graph():
    rows = _ROWS.clone()  # which only the graph holds then
    held, out = weakref.ref(rows), _model(rows)
    del rows
    assert held() is not None
    del out
    assert held() is None


def test_signatures_tell_outputs_and_functions_apart_and_not_sizes():
    def signature(loss_of, rows=_ROWS):
        first, second = rows @ _WEIGHT, rows @ _WEIGHT * 2
        mark_outputs([first, second], len(rows))
        return LossSection(loss_of(first, second)).signature

    assert signature(lambda first, _: first.mean()) == signature(lambda first, _: first.mean(), _ROWS[:4])
    assert signature(lambda first, _: first.mean()) != signature(lambda _, second: second.mean())
    assert signature(lambda first, _: first.mean()) != signature(lambda first, _: first.exp().mean())


def test_the_number_of_samples_is_the_most_usual_first_size():
    assert num_samples_of([torch.zeros(()), torch.zeros(1, 7), torch.zeros(6, 2), torch.zeros(6)]) == 6
    assert num_samples_of([]) == 0
