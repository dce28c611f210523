"""Gradient functions in the forward: those that make something else of parts of a batch are found, others are right."""

import pytest
import torch
from support import assert_near, boosted, sgd
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

SIZE = 6
GENERATOR = torch.Generator().manual_seed(0)
DATA = torch.randn(8, 3, SIZE, generator=GENERATOR)
LIMIT = 1e-3


class Changed(Function):
    """Passes a tensor on, and its gradient through a function."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


class Rounded(Function):
    """Straight through a rounding, for what is in range; its gradient is changed by a function."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.save_for_backward(x.abs() <= 1)
        ctx.change = change
        return (x * 7).clamp(-7, 7).round() / 7

    @staticmethod
    def backward(ctx, gradient):
        (mask,) = ctx.saved_tensors
        return ctx.change(gradient * mask), None


class Product(Function):
    """A linear layer whose weight's gradient is changed by one function, that of its input by another."""

    @staticmethod
    def forward(ctx, x, weight, of_input, of_weight):
        ctx.save_for_backward(x, weight)
        ctx.of_input, ctx.of_weight = of_input, of_weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        return ctx.of_input(gradient @ weight), ctx.of_weight(of_weight), None, None


class Normed(Function):
    """A root mean square norm, over positions in one dimension."""

    @staticmethod
    def forward(ctx, x, weight):
        flat = x.reshape(-1, x.shape[-1])
        over = torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(flat, weight, over)
        return (flat * over * weight).view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, over = ctx.saved_tensors
        gradient = gradient.reshape(x.shape)
        inner = gradient * weight
        of_x = over * inner - x * over**3 * (inner * x).mean(-1, keepdim=True)
        return of_x.view(-1, DATA.shape[1], SIZE), (gradient * x * over).sum(0)


class Attention(Function):
    @staticmethod
    def forward(ctx, x):
        shares = (x @ x.transpose(1, 2)).softmax(-1)
        ctx.save_for_backward(x, shares)
        return shares @ x

    @staticmethod
    def backward(ctx, gradient):
        x, shares = ctx.saved_tensors
        of_shares = gradient @ x.transpose(1, 2)
        of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True))
        return shares.transpose(1, 2) @ gradient + (of_scores + of_scores.transpose(1, 2)) @ x


class Standardised(Function):
    """Over the samples, as batch normalisation: its backward pass puts them together as its forward does."""

    @staticmethod
    def forward(ctx, x):
        std, mean = torch.std_mean(x, 0, correction=0)
        made = (x - mean) / std
        ctx.save_for_backward(made, std)
        return made

    @staticmethod
    def backward(ctx, gradient):
        made, std = ctx.saved_tensors
        return (gradient - gradient.mean(0) - made * (gradient * made).mean(0)) / std


def same(gradient):
    return gradient


def clip_norm(gradient):
    return gradient * (LIMIT / gradient.norm()).clamp(max=1.0)


def clip_samples(gradient):
    return gradient * (LIMIT / gradient.flatten(1).norm(dim=1)).clamp(max=1.0)[:, None, None]


def clip_rows(gradient):
    return functional.normalize(gradient, dim=-1) * LIMIT


def clip_elements(gradient):
    return gradient.clamp(-LIMIT, LIMIT)


def normalise(gradient):
    return gradient / gradient.norm()


def centre(gradient):
    return gradient - gradient.mean(0, keepdim=True)


def quantise(gradient, bits=8, largest=None):
    step = (gradient.abs().max() if largest is None else largest) / (2 ** (bits - 1) - 1)
    return (gradient / step).round() * step


def quantise_by_chance(gradient):
    step = gradient.abs().max() / 7
    return (gradient / step + torch.rand_like(gradient) - 0.5).round() * step


def keep_largest(gradient):
    return gradient * (gradient.abs() >= gradient.abs().median())


# Each is given a block's linear layer and what goes into it, and gives what comes out.
def on_activations(change):
    return lambda layer, x: Changed.apply(layer(x), change)


def on_weights(change):
    return lambda layer, x: functional.linear(x, Changed.apply(layer.weight, change), layer.bias)


def rounded_weights(change):
    return lambda layer, x: functional.linear(x, Rounded.apply(layer.weight * 0.5, change), layer.bias)


def hooked_weights(change):
    def call(layer, x):
        weight = layer.weight * 1
        if weight.requires_grad:
            weight.register_hook(change)
        return functional.linear(x, weight, layer.bias)

    return call


def product(of_input=same, of_weight=same):
    return lambda layer, x: Product.apply(x, layer.weight, of_input, of_weight) + layer.bias


FOUND = {
    "activations, norm": on_activations(clip_norm),
    "activations, largest": on_activations(lambda gradient: gradient / gradient.abs().max()),
    "activations, mean": on_activations(centre),
    "activations, chosen": on_activations(keep_largest),
    "weights, elements": on_weights(clip_elements),
    "weights, sign": on_weights(torch.sign),
    "weights, norm": on_weights(normalise),
    "weights, positive": on_weights(torch.relu),
    "weights, rounded and clipped": rounded_weights(clip_elements),
    "weights, hook of elements": hooked_weights(clip_elements),
    "weights, hook of the norm": hooked_weights(normalise),
    "weights, hook of the positive": hooked_weights(lambda gradient: gradient.relu()),
    "product, weight's elements": product(of_weight=clip_elements),
    "product, input's norm": product(of_input=clip_norm),
}
RIGHT = {
    "activations, reversed": on_activations(torch.neg),
    "activations, elements": on_activations(clip_elements),
    "activations, sign": on_activations(torch.sign),
    "activations, samples": on_activations(clip_samples),
    "activations, positions": on_activations(clip_rows),
    "activations, rounded": lambda layer, x: Rounded.apply(layer(x), clip_elements),
    "weights, factor": on_weights(torch.neg),
    "weights, centred": on_weights(centre),
    "weights, rounded": rounded_weights(same),
    "weights, hook of a factor": hooked_weights(lambda gradient: -gradient),
    "weights, hook that centres": hooked_weights(centre),
    "product": product(),
    "norm": lambda layer, x: Normed.apply(layer(x), layer.bias),
    "attention": lambda layer, x: Attention.apply(layer(x)),
    "positions, flat": lambda layer, x: Changed.apply(layer(x).flatten(0, 1), clip_rows).view_as(x),
    "sum over the sequence": on_activations(lambda gradient: gradient.cumsum(1)),
    "product, input's elements": product(of_input=clip_elements),
    "recomputed": lambda layer, x: checkpoint(
        lambda given: on_activations(clip_elements)(layer, given), x, use_reentrant=False
    ),
}
# Their results depend on parts by rounding, by what is drawn, or as their forwards do.
LEFT_ALONE = {
    "activations, quantised": on_activations(quantise),
    "activations, quantised by chance": on_activations(quantise_by_chance),
    "weights, quantised": on_weights(quantise),
    "weights, quantised by chance": on_weights(quantise_by_chance),
    "standardised": lambda layer, x: Standardised.apply(layer(x)),
    "turned": on_activations(lambda gradient: gradient.flip(0)),
}


class Block(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layer, self.call = nn.Linear(SIZE, SIZE), call

    def forward(self, x):
        return self.call(self.layer, x.tanh())


def make_model(call):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), *(Block(call) for _ in range(2)), nn.Linear(SIZE, SIZE))


def mean_square(outputs, _=None):
    return outputs.float().square().mean()


def trained(call, num_ranks=1, *, own=False, data=DATA, **settings):
    """Weights after two steps, or what every rank raises."""

    def run():
        booster, model, optimizer = boosted(make_model(call), sgd, data[:1], **settings)
        part = data.chunk(booster.plugin.dp_size)[booster.plugin.layout.here.dp]
        try:
            for _ in range(2):
                if own:
                    booster.backward(mean_square(model(part)), optimizer)
                else:
                    booster.execute_pipeline(iter([part]), model, mean_square, optimizer)
                optimizer.step()
        except ConfigError as error:
            return str(error)
        with booster.unsharded(model):
            return {name: one.detach().float().clone() for name, one in model.named_parameters()}

    ranks = Loopback(num_ranks).run(run)
    refusals = {found for found in ranks if isinstance(found, str)}
    if refusals:
        assert len(refusals) == 1
        assert all(isinstance(found, str) for found in ranks)
        return refusals.pop()
    return {name: one for found in ranks for name, one in found.items()}


def trained_plainly(call):
    model = make_model(call)
    optimizer = sgd(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        mean_square(model(DATA)).backward()
        optimizer.step()
    return {name: one.detach() for name, one in model.named_parameters()}


TWO = {"num_microbatches": 2}
LAYOUTS = [
    (2, {}),
    (2, {"zero_stage": 3}),
    (2, {"own": True}),
    (2, {"pp_size": 2, **TWO}),
    (1, {"num_microbatches": 8}),
    (1, {**TWO, "gradient_checkpoint_config": {}}),
]


def words_of(kind):
    return "is not linear" if kind.startswith(("weights", "product, weight")) else "makes something of all samples"


@pytest.mark.parametrize("kind", FOUND)
def test_what_depends_on_the_part_of_a_batch_is_refused(kind):
    found = trained(FOUND[kind], **TWO)
    assert isinstance(found, str)
    assert words_of(kind) in found
    assert ("the hook" if "hook" in kind else "autograd function") in found


@pytest.mark.parametrize(("num_ranks", "settings"), LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["activations, norm", "weights, elements", "weights, hook of the norm"])
def test_it_is_refused_in_every_layout_on_every_rank(kind, num_ranks, settings):
    assert words_of(kind) in trained(FOUND[kind], num_ranks, **settings)


@pytest.mark.parametrize("kind", FOUND)
def test_a_whole_batch_runs_and_is_what_torch_gives(kind):
    assert_near(trained(FOUND[kind]), trained_plainly(FOUND[kind]), 1e-6)


@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_right_in_parts_runs_and_is_what_torch_gives(kind):
    assert_near(trained(RIGHT[kind], **TWO), trained_plainly(RIGHT[kind]), 1e-6)


@pytest.mark.parametrize(("num_ranks", "settings"), LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["activations, elements", "activations, samples", "weights, rounded", "product"])
def test_what_is_right_in_parts_is_so_in_every_layout(kind, num_ranks, settings):
    assert_near(trained(RIGHT[kind], num_ranks, **settings), trained_plainly(RIGHT[kind]), 1e-6)


@pytest.mark.parametrize("shape", [(6, 3), (12, 6), (12, 3), (4, 1)])
@pytest.mark.parametrize("kind", ["positions, flat", "activations, positions", "sum over the sequence", "attention"])
def test_sizes_that_are_equal_by_chance_are_not_taken_for_samples(kind, shape):
    data = torch.randn(*shape, SIZE, generator=GENERATOR)
    assert isinstance(trained(RIGHT[kind], data=data, **TWO), dict)


@pytest.mark.parametrize("settings", [TWO, {**TWO, "precision": "bf16"}], ids=str)
@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_rounds_draws_or_follows_its_forward_is_left_alone(kind, settings):
    assert isinstance(trained(LEFT_ALONE[kind], **settings), dict)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", FOUND)
def test_it_is_refused_in_half_precision(kind, precision):
    assert words_of(kind) in trained(FOUND[kind], precision=precision, **TWO)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_right_in_parts_runs_in_half_precision(kind, precision):
    assert isinstance(trained(RIGHT[kind], precision=precision, **TWO), dict)


def test_the_refusal_says_what_is_changed_and_the_way_out():
    found = trained(FOUND["weights, elements"], **TWO)
    assert "the backward pass of the autograd function 'Changed' on what is made of 2.layer.weight" in found
    assert "optimizer.clip_grad_by_norm" in found
    assert "num_microbatches=1 and one replica" in found
    found = trained(FOUND["weights, hook of the norm"], **TWO)
    assert "the hook 'normalise' on the gradient of what is made of 2.layer.weight" in found
