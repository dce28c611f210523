"""The gradient of losses that the script computes itself: that of the whole batch, in one process."""

from contextlib import nullcontext

import pytest
import torch
from hybridpp_plugins.manual_loss import ManualLosses
from support import assert_near, boosted, gradients_of, sgd
from torch import nn
from torch.nn import functional

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

_TARGETS = torch.randint(0, 5, (6, 7), generator=torch.Generator().manual_seed(1))
_TARGETS[:2, 3:] = -100
_TARGETS[2, 1:] = -100
_ROWS = torch.randn(6, 7, 4, generator=torch.Generator().manual_seed(2))
_SPLIT = (4, 2)  # a ragged last batch


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, rows):
        return self.head(self.body(rows).tanh())


class Weighed(Tagger):
    """Returns the logarithms of two tasks' weights, too."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, rows):
        return super().forward(rows), self.scales


def _weighed():
    torch.manual_seed(0)
    return Weighed()


def _tagger():
    torch.manual_seed(0)
    return Tagger()


def _cross_entropy(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def _masked(logits, targets):
    mask = (targets != -100).float()
    losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (losses * mask).sum() / mask.sum()


def _fused(logits, targets):
    if not hasattr(functional, "linear_cross_entropy"):  # in torch from 2.13 on
        return _cross_entropy(logits, targets)
    return functional.linear_cross_entropy(logits.flatten(0, 1), torch.ones(5, 5).tril(), targets.flatten())


def _two_terms(logits, targets):
    return _cross_entropy(logits, targets) + 0.1 * logits.square().mean() + 0.3


def _negative(logits, targets):
    divergence = (-0.5 * (1 + logits - logits.exp()).sum((1, 2))).mean()
    return _cross_entropy(logits, targets) - 0.1 * divergence - 2 * logits.square().mean()


def _smoothed(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1) / 4


def _of_samples(logits, targets):
    mask = (targets != -100).float()
    losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def _stacked(logits, targets):
    return torch.stack([_cross_entropy(logits, targets), 0.1 * _masked(logits, targets)]).sum()


def _stacked_dot(logits, targets):
    terms = torch.stack([_masked(logits, targets), logits.square().mean(), _cross_entropy(logits, targets)])
    return terms @ torch.tensor([0.5, 0.1, 2.0])


def _einsum(logits, targets):
    mask = (targets != -100).float()
    losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return torch.einsum("bt,bt->", losses, mask) / mask.sum()


def _divided_before(logits, targets):
    mask = (targets != -100).float()
    losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (losses * mask / mask.sum() + logits.square().mean(-1) / targets.numel()).sum()


def _learned(outputs, targets):
    logits, scales = outputs
    return (torch.exp(-scales) * torch.stack([_cross_entropy(logits, targets), logits.square().mean()]) + scales).sum()


def _learned_sum(outputs, targets):
    logits, (one, other) = outputs
    terms = torch.exp(-one) * _cross_entropy(logits, targets), logits.square().mean() / (2 * torch.exp(other))
    return terms[0] + terms[1] + 0.5 * (one + other)


def _parts(targets):
    starts = (0, _SPLIT[0])
    return [(_ROWS[at : at + n], targets[at : at + n]) for at, n in zip(starts, _SPLIT, strict=True)]


def _expected(loss_of, batches, model):
    sum(loss_of(model(rows), targets) for rows, targets in batches).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _check(loss_of, calls, *, num_items=None, make=_tagger, **settings):
    """Train on the targets of each call; all but the last inside no_sync."""
    whole = _expected(loss_of, [(_ROWS, targets) for targets in calls], make())

    def run():
        booster, model, optimizer = boosted(make(), sgd, _ROWS[:2], **settings)
        for index, targets in enumerate(calls):
            rows, own = _parts(targets)[booster.plugin.layout.here.dp]
            with booster.no_sync(model) if index < len(calls) - 1 else nullcontext():
                loss = loss_of(model(rows), own)
                booster.backward(loss, optimizer, **({} if num_items is None else {"num_items": num_items(own)}))
        return {name: gradient.clone() for name, gradient in optimizer.gradients()}

    for found in Loopback(2).run(run):
        for name, gradient in whole.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_backward_weighs_replicas_by_targets_that_count(zero_stage):
    _check(_cross_entropy, [_TARGETS], zero_stage=zero_stage)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda x: x.mean(0).mean(),
        lambda x: x.mean(0).sum(),
        lambda x: x.mean(-3).mean(0).sum() / 5,
        lambda x: x.mean(0, keepdim=True).sum(-1).mean(),
        lambda x: (3 * x.mean(0) * torch.arange(5.0) - 1).mean(),
        lambda x: x.mean(0).flatten() @ torch.arange(35.0),
        lambda x: -x.sum(0).mean() / len(x),
        lambda x: x.mean(1).mean(0).mean() + x.mean((0, 2)).sum(),
        lambda x: x.mean(1).mean(1).mean(),
    ],
)
def test_means_over_samples_may_come_before_those_of_other_dimensions(loss_of):
    _check(lambda logits, _: loss_of(logits.square()), [_TARGETS])


@pytest.mark.parametrize(
    "loss_of",
    [_masked, _fused, _two_terms, _negative, _smoothed, _of_samples, _stacked, _stacked_dot, _einsum, _divided_before],
)
def test_backward_weighs_each_term_by_what_it_is_a_mean_over(loss_of):
    _check(loss_of, [_TARGETS])


@pytest.mark.parametrize(
    ("loss_of", "zero_stage", "has_items"),
    [(_learned, 0, True), (_learned, 3, True), (_learned, 0, False), (_learned_sum, 0, True), (_learned_sum, 0, False)],
)
def test_backward_weighs_learned_factors_with_their_terms(loss_of, zero_stage, has_items):
    targets = _TARGETS.clone()
    targets[_SPLIT[0] :] = _TARGETS[_SPLIT[0] :] if has_items else -100
    _check(loss_of, [targets], make=_weighed, zero_stage=zero_stage)


def test_calls_inside_no_sync_count_by_their_own_numbers():
    _check(_cross_entropy, [_TARGETS, _TARGETS.flip(0), _TARGETS.roll(1, 0)])


def test_a_replica_without_items_adds_nothing():
    targets = _TARGETS.clone()
    targets[4:] = -100
    _check(_cross_entropy, [targets])
    _check(_masked, [targets])


def test_a_replica_without_items_of_a_learned_term_adds_nothing():
    has_label = torch.tensor([0.0, 0, 0, 1, 1, 0])

    class Weighed(Tagger):
        def __init__(self):
            super().__init__()
            self.log_variances = nn.Parameter(torch.zeros(2))

    def loss_of(model, part):
        out, (first, second) = model(_ROWS[part, 0]), model.log_variances
        of_labels = (out.square().mean(1) * has_label[part]).sum() / has_label[part].sum()
        return (-first).exp() * out.abs().mean() + (-second).exp() * of_labels + first + second

    def made():
        torch.manual_seed(0)
        return Weighed()

    whole = made()
    loss_of(whole, slice(0, 6)).backward()

    def run():
        booster, model, optimizer = boosted(made(), sgd, _ROWS[:2, 0])
        booster.backward(loss_of(model, (slice(0, 3), slice(3, 6))[booster.plugin.layout.here.dp]), optimizer)
        return gradients_of(booster, model)

    for found in Loopback(2).run(run):
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-5)


def test_declared_items_weigh_a_loss_of_any_making():
    def opaque(logits, targets):
        return _Opaque.apply(_cross_entropy(logits, targets))

    _check(opaque, [_TARGETS], num_items=lambda targets: (targets != -100).sum())


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_script_that_weighs_its_losses_itself_is_not_weighed_again():
    def run():
        booster, model, optimizer = boosted(_tagger(), sgd, _ROWS[:2])
        parts = _parts(_TARGETS)
        counts = [int((targets != -100).sum()) for _, targets in parts]
        rows, own = parts[booster.plugin.layout.here.dp]
        count = counts[booster.plugin.layout.here.dp]
        booster.backward(_cross_entropy(model(rows), own) * count / (sum(counts) / 2), optimizer)
        return gradients_of(booster, model)

    whole = _expected(_cross_entropy, [(_ROWS, _TARGETS)], _tagger())
    for found in Loopback(2).run(run):
        for name, gradient in whole.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)


def test_equal_numbers_of_items_change_no_bit(monkeypatch):
    def run():
        booster, model, optimizer = boosted(_tagger(), sgd, _ROWS[:2])
        rows = _ROWS[:4].chunk(2)[booster.plugin.layout.here.dp]
        before, optimizer.manual_losses = optimizer.manual_losses, None
        found = []
        for losses in (None, before):
            optimizer.manual_losses = losses
            booster.backward(_cross_entropy(model(rows), torch.full((2, 7), 3)), optimizer)
            found.append(gradients_of(booster, model))
            optimizer.zero_grad()
        return found

    for plain, weighed in Loopback(2).run(run):
        assert all(torch.equal(plain[name], weighed[name]) for name in plain)


@pytest.mark.parametrize("sizes", [_SPLIT, (3, 3)])
@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out: _Opaque.apply(out.mean()),
        torch.sum,
        lambda out: sum(out.sum(1).sum(1)),
        lambda out: out.sum(0).mean(),
    ],
)
def test_an_unknown_loss_is_named_once_whatever_the_sizes_of_batches(loss_of, sizes, monkeypatch):
    said = []
    monkeypatch.setattr("hybridpp_plugins.manual_loss._warn", said.append)

    def run():
        booster, model, optimizer = boosted(_tagger(), sgd, _ROWS[:2])
        rows = _ROWS.split(sizes)[booster.plugin.layout.here.dp]
        for _ in range(4):
            booster.backward(loss_of(model(rows)), optimizer)
            optimizer.step()

    Loopback(2).run(run)
    assert len(said) == 2
    assert all("num_items=" in text for text in said)


def test_a_known_or_a_declared_loss_is_not_named(monkeypatch):
    said = []
    monkeypatch.setattr("hybridpp_plugins.manual_loss._warn", said.append)

    def run():
        booster, model, optimizer = boosted(_tagger(), sgd, _ROWS[:2])
        rows, targets = _parts(_TARGETS)[booster.plugin.layout.here.dp]
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        booster.backward(_two_terms(model(rows), targets) + 0.01 * penalty, optimizer)
        booster.backward(model(rows).sum(), optimizer, num_items=1)
        optimizer.step()

    Loopback(2).run(run)
    assert said == []


def _kl(logits):
    return (logits.exp() - logits - 1).sum()


def _said_of(loss_of, monkeypatch, rows=_ROWS, steps=3, model=_tagger):
    said = []
    monkeypatch.setattr("hybridpp_plugins.manual_loss._warn", said.append)

    def run():
        torch.manual_seed(0)
        booster, boosted_model, optimizer = boosted(model(), sgd, rows[:2])
        replica = booster.plugin.layout.here.dp
        for step in range(steps):
            booster.backward(loss_of(boosted_model, rows.split(5)[replica], step), optimizer)
            optimizer.step()

    Loopback(2).run(run)
    return said


_TEN = torch.randn(10, 7, 4, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("loss_of", "how"),
    [
        (lambda out: 0.1 * out.square().sum(), "multiplied with constants"),
        (lambda out: out.square().sum() / 8, "divided by 8"),
        (lambda out: (out.square() / 8).sum(), "divided by 8"),
        (lambda out: 0.5 * out.square().sum() / 4, "divided by 4"),
        (lambda out: out.square().mean() * len(out) / 8, "the number of samples"),
        (lambda out: functional.mse_loss(out, out.detach() + 1, reduction="sum") / 4, "divided by 4"),
        (lambda out: out.square().mean() + 0.01 * _kl(out), "multiplied with constants"),
        (lambda out: out.square().mean() + _kl(out), "divided by nothing"),
        (lambda out: out.square().mean() - 0.5 * torch.sum(1 + out - out.exp()) / 3, "divided by 3"),
    ],
)
def test_a_sum_that_no_count_divides_is_named_once(loss_of, how, monkeypatch):
    said = _said_of(lambda model, rows, step: loss_of(model(rows)), monkeypatch, _TEN)
    assert len(said) == 2
    assert all(how in text and "num_items=" in text for text in said)


def test_a_sum_that_begins_with_a_factor_of_0_is_named_later(monkeypatch):
    said = _said_of(lambda model, rows, step: model(rows).mean() + 0.1 * step * _kl(model(rows)), monkeypatch, _TEN)
    assert len(said) == 2


class _OwnLoss(Tagger):
    def forward(self, rows):
        out = super().forward(rows)
        return out.square().mean() + 0.1 * _kl(out)


def test_a_sum_in_the_loss_that_the_model_makes_is_named(monkeypatch):
    said = _said_of(lambda model, rows, step: model(rows), monkeypatch, _TEN, model=_OwnLoss)
    assert len(said) == 2
    assert "multiplied with constants" in said[0]


class _OwnPenalty(Tagger):
    def forward(self, rows):
        return super().forward(rows).square().mean() + 0.1 * self.head.weight.square().sum()


def test_a_penalty_on_weights_is_no_sum_over_samples(monkeypatch):
    assert _said_of(lambda model, rows, step: model(rows), monkeypatch, _TEN, model=_OwnPenalty) == []


def _masked_by(out, number_of):
    mask = torch.arange(7) < 4
    return (out.square().mean(-1) * mask).sum() / number_of(mask.expand(len(out), 7))


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out, step: out.square().sum() / len(out),
        lambda out, step: 0.1 * out.square().sum() / len(out) / 3,
        lambda out, step: out.square().sum() * (1 / out.numel()),
        lambda out, step: out.square().sum(-1).sum() / (len(out) * 7),
        lambda out, step: out.square().mean() * len(out) / (len(out) * 7),
        lambda out, step: (out.square().sum() + out.abs().sum()) / (2 * len(out)),
        lambda out, step: 2 * out.square().mean() + 0.1 * out.square().sum((1, 2)).mean() / 8,
        lambda out, step: out.square().mean(0).sum() + 0.1 * _kl(out) / len(out),
        lambda out, step: 10 * out.square().mean() + out.abs().mean(),
        lambda out, step: out.square().sum() / (len(out) * 7 * 4),  # elements of what the model was given
        # The number of items is another one in each batch.
        lambda out, step: out.square().sum() / (11 + step),
        lambda out, step: _masked_by(out, lambda mask: int(mask[0].sum()) * 5),
        lambda out, step: _masked_by(out, lambda mask: mask.sum().float() + 1),
        lambda out, step: out.reshape(-1, 5)[:11].square().sum() / 11,
    ],
)
def test_a_sum_that_a_count_divides_is_not_named(loss_of, monkeypatch):
    assert _said_of(lambda model, rows, step: loss_of(model(rows), step), monkeypatch, _TEN) == []


def _refused(call, model=_tagger, **settings):
    """The error of each replica in its first call."""

    def run():
        torch.manual_seed(0)
        booster, boosted_model, optimizer = boosted(model(), sgd, _ROWS[:2], **settings)
        replica = booster.plugin.layout.here.dp
        with pytest.raises(ConfigError) as error:
            booster.backward(call(boosted_model, replica), optimizer)
        booster.backward(call(boosted_model, replica), optimizer, num_items=1)
        return str(error.value)

    return Loopback(2).run(run)


def _in_batch(out):
    codes = functional.normalize(out.mean(1), dim=-1)
    return functional.cross_entropy(codes @ codes.T / 0.1, torch.arange(len(codes)))


def _standardised(out):
    scores = out.mean((1, 2))
    return ((scores - scores.mean()) / scores.std()).pow(3).mean()


def _relativistic(out):
    real, made = out.mean((1, 2)).chunk(2)
    return functional.softplus(made.mean() - real).mean()


def _hardest(out):
    return out.square().mean((1, 2)).topk(2).values.mean()


def _limited(out):
    return out.square().mean(0).clamp(min=0.1).mean()


def _farthest(out):
    return -torch.cdist(out.flatten(1), out.flatten(1)).amax(1).mean()


COUPLED = [_in_batch, _standardised, _relativistic, _hardest, _limited, _farthest]


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("loss_of", [*COUPLED, lambda out: out.square().mean().sqrt()])
def test_a_loop_whose_loss_couples_samples_is_refused_on_every_replica(loss_of, zero_stage):
    for error in _refused(lambda model, replica: loss_of(model(_ROWS[:4])), zero_stage=zero_stage):
        assert "puts samples together" in error
        assert "coupled = True" in error


def test_a_loop_whose_loss_couples_samples_later_on_is_refused_then():
    def run():
        booster, model, optimizer = boosted(_tagger(), sgd, _ROWS[:2])
        for _ in range(5):
            booster.backward(model(_ROWS).square().mean(), optimizer)
            optimizer.step()
        with pytest.raises(ConfigError, match="puts samples together"):
            booster.backward(_in_batch(model(_ROWS)), optimizer)

    Loopback(2).run(run)


@pytest.mark.parametrize("of", ["detached", "no graph", "inputs"])
def test_negatives_whose_keys_have_no_graph_are_refused_in_a_loop(of):
    def call(booster, model, rows, optimizer):
        queries = model(rows).flatten(1)
        with torch.no_grad():
            keys = model(rows + 1).flatten(1)
        keys = {"detached": queries.detach(), "no graph": keys, "inputs": queries.detach() * 0 + rows.sum()}[of]
        booster.backward(functional.cross_entropy(queries @ keys.T, torch.arange(len(queries))), optimizer)

    assert "classes that are the samples themselves" in _refused_call(call, _tagger)


class WithFeatures(Tagger):
    """Returns what it makes its outputs of, too; with a normalisation over the batch between them, if asked."""

    def __init__(self, normalises=False):
        super().__init__()
        self.last = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(7) if normalises else nn.Identity()

    def forward(self, x):
        features = super().forward(x)
        return features, self.last(self.norm(features).tanh())


def _with_features(normalises=False):
    torch.manual_seed(0)
    return WithFeatures(normalises)


OF_FEATURES = {
    "negatives": lambda f: functional.cross_entropy(f.flatten(1) @ f.flatten(1).T, torch.arange(len(f))),
    "spread": lambda f: functional.relu(1 - f.flatten(1).std(0)).mean(),
    "distances": lambda f: (-torch.cdist(f.flatten(1), f.flatten(1))).exp().mean(),
}


@pytest.mark.parametrize("term", OF_FEATURES)
def test_a_coupling_of_outputs_that_others_are_made_of_is_refused(term):
    def call(booster, model, rows, optimizer):
        features, outputs = model(rows)
        loss = outputs.square().mean() + 0.5 * OF_FEATURES[term](features)
        booster.backward(loss, optimizer)

    assert "puts samples together" in _refused_call(call, _with_features)


@pytest.mark.parametrize("normalises", [False, True])
def test_what_a_model_makes_of_its_own_outputs_is_its_own(normalises):
    def call(booster, model, rows, optimizer):
        features, outputs = model(rows)
        booster.backward(outputs.square().mean() + features.square().mean(), optimizer)

    assert not _refused_call(call, lambda: _with_features(normalises))


def _refused_call(call, make):
    found = []

    def run():
        booster, model, optimizer = boosted(make(), sgd, _TEN[:2])
        try:
            call(booster, model, _TEN.split(5)[booster.plugin.layout.here.dp], optimizer)
        except ConfigError as error:
            found.append(str(error))

    Loopback(2).run(run)
    return found[0] if found else ""


class Scaled(Tagger):
    """Divides by what it makes of all samples: a number without a graph."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        out = super().forward(x)
        return out * self.scale(out.detach())


def _scaled_by(scale):
    torch.manual_seed(0)
    return Scaled(scale)


@pytest.mark.parametrize(
    ("scale", "how"),
    [
        (lambda out: 1 / out.std(), "mul of samples and of their std"),
        (lambda out: 1 / out.std().item(), "mul of samples and of a number that is read of all of them"),
        (lambda out: 2.0 if out.abs().max() > 0.1 else 1.0, "a branch by their max"),
    ],
)
def test_a_loop_whose_model_scales_by_all_samples_is_told_once(scale, how, monkeypatch):
    loss_of = lambda model, rows, step: model(rows).square().mean()  # noqa: E731
    said = _said_of(loss_of, monkeypatch, _TEN, model=lambda: _scaled_by(scale))
    assert len(said) == 2, "one on each replica, of which the first one's is shown"
    assert how in said[0]
    of_each = _said_of(loss_of, monkeypatch, _TEN, model=lambda: _scaled_by(lambda out: 1 / out.std(-1, keepdim=True)))
    assert not of_each


def test_a_loop_that_declares_its_items_is_not_told_of_statistics(monkeypatch):
    said = []
    monkeypatch.setattr("hybridpp_plugins.manual_loss._warn", said.append)

    def run():
        booster, model, optimizer = boosted(_scaled_by(lambda out: 1 / out.std().item()), sgd, _TEN[:2])
        booster.backward(model(_TEN[:5]).square().mean(), optimizer, num_items=1)

    Loopback(2).run(run)
    assert not said


class Balanced(Tagger):
    """Returns what is no sum over samples: numbers of each pair, and a balance of all."""

    def forward(self, rows):
        logits = super().forward(rows)
        shares = logits.softmax(-1)
        used = torch.nn.functional.one_hot(logits.argmax(-1), 5).float().mean((0, 1))
        codes = logits.mean(1)
        return {"logits": logits, "balance": (shares.mean((0, 1)) * used).sum(), "pairs": codes @ codes.T}


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out: out["logits"].square().mean() + 0.1 * out["balance"],
        lambda out: functional.cross_entropy(out["pairs"], torch.arange(6)),
    ],
)
def test_a_loop_with_what_the_model_made_of_several_samples_is_refused(loss_of):
    for error in _refused(lambda model, replica: loss_of(model(_ROWS)), Balanced):
        assert "puts samples together" in error


def test_a_loop_may_leave_unused_what_the_model_made_of_several_samples():
    def run():
        torch.manual_seed(0)
        booster, model, optimizer = boosted(Balanced(), sgd, _ROWS[:2])
        booster.backward(model(_ROWS)["logits"].square().mean(), optimizer)

    Loopback(2).run(run)


def _of_pairs(out):
    chosen, rejected = out.mean((1, 2)).chunk(2)
    return -functional.logsigmoid(chosen - rejected).mean()


def _of_lists(out):
    return functional.cross_entropy(out.mean((1, 2)).view(-1, 3), torch.zeros(len(out) // 3, dtype=torch.long))


@pytest.mark.parametrize(("loss_of", "number"), [(_of_pairs, 4), (_of_lists, 6), (_of_lists, 3)])
def test_samples_that_belong_together_are_no_coupling_in_a_loop(loss_of, number):
    def run():
        booster, model, optimizer = boosted(_tagger(), sgd, _ROWS[:2])
        booster.backward(loss_of(model(_ROWS[:number])), optimizer)
        return gradients_of(booster, model)

    whole = _tagger()
    loss_of(whole(_ROWS[:number])).backward()
    for found in Loopback(2).run(run):
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


class TwoHeads(Tagger):
    def forward(self, rows):
        return super().forward(rows), self.body(rows)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out, replica: out[replica].square().mean(),
        lambda out, replica: out[0].square().mean() + (out[1].square().mean() if replica else 0),
        lambda out, replica: out[0].square().mean() if replica else out[0].abs().sum() / 3,
    ],
)
def test_replicas_whose_losses_are_made_in_different_ways_are_refused(loss_of):
    for error in _refused(lambda model, replica: loss_of(model(_ROWS), replica), TwoHeads):
        assert "made in different ways" in error


_ONE_AND_TWO = {
    "mean": lambda losses, weights: losses.mean(),
    "masked": lambda losses, weights: (losses * weights).sum() / weights.sum(),
    "by length": lambda losses, weights: 2 * losses.sum() / len(losses),
    "two terms": lambda losses, weights: losses.square().mean() - 0.5 * (losses * weights).mean(),
    "chosen": lambda losses, weights: losses[weights > 0].mean(),
    "stacked": lambda losses, weights: torch.stack([one * 2 for one in losses]).mean(),
    "dot": lambda losses, weights: losses @ weights / weights.sum(),
    "number with a dimension": lambda losses, weights: losses.mean().unsqueeze(0).mean(),
}


@pytest.mark.parametrize("name", _ONE_AND_TWO)
def test_a_replica_with_one_sample_counts_one(name):
    """As in the last batch of an epoch."""
    weights = torch.tensor([0.5, 1.0, 2.0])

    def loss_of(model, part):
        losses = functional.cross_entropy(model(_ROWS[part, 0]), _TARGETS[part, 0].clamp(min=0), reduction="none")
        return _ONE_AND_TWO[name](losses, weights[part])

    whole = _tagger()
    loss_of(whole, slice(0, 3)).backward()

    def run():
        booster, model, optimizer = boosted(_tagger(), sgd, _ROWS[:2, 0])
        booster.backward(loss_of(model, (slice(0, 1), slice(1, 3))[booster.plugin.layout.here.dp]), optimizer)
        return gradients_of(booster, model)

    for found in Loopback(2).run(run):
        for parameter_name, parameter in whole.named_parameters():
            torch.testing.assert_close(found[parameter_name], parameter.grad, atol=1e-6, rtol=1e-5)


_OF_BOXES = {
    "limit": lambda losses, has_box: (losses * has_box).sum() / has_box.sum().clamp(min=1),
    "number": lambda losses, has_box: (losses * has_box).sum() / max(int(has_box.sum()), 1),
    "chosen": lambda losses, has_box: losses[has_box > 0].sum() / max(int(has_box.sum()), 1),
    "dot": lambda losses, has_box: losses @ has_box / has_box.sum().clamp(min=1),
}


@pytest.mark.parametrize("name", _OF_BOXES)
def test_a_lower_limit_of_a_divisor_counts_no_items_where_there_are_none(name):
    has_box = torch.tensor([0.0, 0, 0, 1, 1, 0])

    def loss_of(model, part):
        out = model(_ROWS[part, 0])
        return out[:, :2].square().mean() + _OF_BOXES[name](out[:, 2:].abs().sum(1), has_box[part])

    whole = _tagger()
    loss_of(whole, slice(0, 6)).backward()

    def run():
        booster, model, optimizer = boosted(_tagger(), sgd, _ROWS[:2, 0])
        part = (slice(0, 3), slice(3, 6))[booster.plugin.layout.here.dp]
        booster.backward(loss_of(model, part), optimizer)
        return gradients_of(booster, model)

    for found in Loopback(2).run(run):
        for parameter_name, parameter in whole.named_parameters():
            torch.testing.assert_close(found[parameter_name], parameter.grad, atol=1e-6, rtol=1e-5)


def test_parts_of_one_sum_may_be_of_unlike_numbers():
    counts = (3, 1)

    def loss_of(model, replica):
        rows, targets = _parts(_TARGETS)[replica]
        parts = [
            functional.cross_entropy(model(rows + one).transpose(1, 2), targets, reduction="sum")
            for one in range(counts[replica])
        ]
        return sum(parts) / len(rows)

    whole = _tagger()
    sum(loss_of(whole, replica) * _SPLIT[replica] / sum(_SPLIT) for replica in range(2)).backward()

    def run():
        booster, model, optimizer = boosted(_tagger(), sgd, _ROWS[:2])
        booster.backward(loss_of(model, booster.plugin.layout.here.dp), optimizer)
        return gradients_of(booster, model)

    for found in Loopback(2).run(run):
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-5)


def test_replicas_losses_made_in_different_ways_are_refused_a_call_later():
    """As on a device, where the host does not wait for what replicas exchange."""
    one, other = (ManualLosses(None, torch.device("cpu")) for _ in range(2))
    one._note(5, 0)
    other._note(6, 0)
    with pytest.raises(ConfigError, match="made in different ways"):
        one.heard([one.digest(), other.digest()])
    one._note(5, 0)
    other._note(1 << 26, 0)
    one.heard([one.digest(), other.digest()])


@pytest.mark.parametrize("nothing", [lambda out: out.sum() * 0, lambda out: 0.0 * out.logsumexp((0, 1, 2))])
def test_a_replica_whose_loss_is_times_0_has_no_items(nothing):
    def loss_of(out, targets):
        return nothing(out) if (targets == -100).all() else _cross_entropy(out, targets)

    targets = _TARGETS.clone()
    targets[4:] = -100
    whole = _expected(_cross_entropy, [(_ROWS, targets)], _tagger())

    def run():
        booster, model, optimizer = boosted(_tagger(), sgd, _ROWS[:2])
        rows, own = _parts(targets)[booster.plugin.layout.here.dp]
        booster.backward(loss_of(model(rows), own), optimizer)
        return gradients_of(booster, model)

    for found in Loopback(2).run(run):
        for name, gradient in whole.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)


def test_num_items_must_be_a_number():
    def run():
        booster, model, optimizer = boosted(_tagger(), sgd, _ROWS[:2])
        with pytest.raises(ConfigError, match="got 'many'"):
            booster.backward(model(_ROWS).mean(), optimizer, num_items="many")

    Loopback(2).run(run)


class Labelled(Tagger):
    """Reads a number of a keyword argument."""

    def forward(self, x, labels=None):
        if labels.max() >= 9 or (labels >= 0).sum() == 0:
            raise ValueError("labels")
        return functional.cross_entropy(super().forward(x).flatten(0, 1), labels.flatten())


def test_a_model_may_branch_by_a_keyword_argument():
    labels = torch.randint(0, 4, (10, 7), generator=torch.Generator().manual_seed(0))

    def run():
        torch.manual_seed(0)
        booster, model, optimizer = boosted(Labelled(), sgd, {"x": _TEN[:2], "labels": labels[:2]})
        here = booster.plugin.layout.here.dp
        booster.backward(model(_TEN.split(5)[here], labels=labels.split(5)[here]), optimizer)
        return gradients_of(booster, model)

    whole = (torch.manual_seed(0), Labelled())[1]
    whole(_TEN, labels=labels).backward()
    for found in Loopback(2).run(run):
        assert_near(found, {name: one.grad for name, one in whole.named_parameters()}, 1e-6)


def test_a_divisor_of_1_on_some_replicas_is_told(monkeypatch):
    numbers = [(4, 3), (1, 1), (0, 3)]

    def said_of(each):
        def loss_of(model, rows, step):
            n = each[int(torch.equal(rows, _TEN[5:]))]
            return (model(rows).square().sum((1, 2)) * (torch.arange(5) < max(n, 2))).sum() / max(n, 1)

        return [text for text in _said_of(loss_of, monkeypatch, _TEN, steps=1) if "is divided by 1" in text]

    assert [bool(said_of(each)) for each in numbers] == [False, False, True]
