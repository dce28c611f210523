"""What a forward makes of several samples at once and applies to each of them is found, in every stage."""

import pytest
import torch
from support import boosted, sgd
from torch import nn
from torch.nn import functional as F

from hybridpp.cluster import Loopback
from hybridpp.errors import ConfigError

WIDTH = 6
LOGGED = []


def logging_its_loss(x):
    LOGGED.append(float(F.mse_loss(x.detach(), torch.zeros_like(x))))
    return x * 0.7310585786300049


def logging_its_mean(x):
    LOGGED.append(float(x.detach().mean()))
    return x


def of_a_mask(x):
    chosen = x[x.detach() > 0]
    return x + chosen.clamp(max=chosen.detach().max() * 0.2).sum() * x


def with_its_derivative(x):
    if not x.requires_grad:
        return x
    return x * torch.autograd.grad(x.square().sum(), x, create_graph=True)[0].norm(dim=1, keepdim=True)


def backwards(x):
    return x + 0.4 * x[torch.arange(len(x) - 1, -1, -1)]


def in_range(x):
    low, high = torch.aminmax(x.detach())
    return torch.fake_quantize_per_tensor_affine(x, float((high - low) / 255), 0, -128, 127)


def by_running_mean(x, mean):
    return x - mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)


APPLIED = {
    "div of samples and of their std": [
        lambda x: x / x.std(),
        lambda x: x / (x.detach().std() + 1e-5),
        lambda x: (x - 1) / x.view(-1).std().square().sqrt(),
    ],
    "sub of samples and of their": [
        lambda x: x - x.mean(0),
        lambda x: x - torch.std_mean(x, 0)[1],
        lambda x: x - x.max(0).values,
        lambda x: by_running_mean(x, torch.zeros(WIDTH)),
    ],
    "mul of samples and of a number that is read of all of them": [
        lambda x: x * (1 / x.detach().std().item()),
        lambda x: x * (1 / float(x.detach().std())),
        lambda x: x * float(x.detach().numpy().std()),
        lambda x: x * max(max(row) for row in x.tolist()),
    ],
    "fake_quantize_per_tensor_affine of samples and of a number that is read of all": [in_range],
    "a branch by their std": [lambda x: x * 0.5 if x.std() > 0.1 else x * 2],
    "their std, which Python reads as a number": [
        lambda x: x * 0.5 if float(x.detach().std()) > 0.1 else x * 2,
        lambda x: x * (0.5 + 3 * float(x.detach().std())),
        lambda x: x * 0.5 if f"{x.detach().std().item():.3f}" > "0.1" else x * 2,
    ],
    "their mean, which Python reads as a number; if that is only logged, all is right": [logging_its_mean],
    "clamp of samples and of their max": [of_a_mask],
    "of samples and of one of them": [
        lambda x: x + x[0],
        lambda x: x - x[-1:],
        lambda x: x + x[x.norm(dim=1).argmax()],
    ],
    "layer_norm over the samples": [lambda x: F.layer_norm(x, x.shape)],
    "avg_pool1d over the samples": [lambda x: x + F.avg_pool1d(x.T[None], 3, 1, 1)[0].T],
    "gt of samples and of their topk": [lambda x: x * (x > x.detach().flatten().topk(5).values[-1])],
}
CASES = [(words, function) for words, functions in APPLIED.items() for function in functions]
APART = [
    lambda x: x / x.std(1, keepdim=True),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: F.batch_norm(x, None, None, training=True),
    lambda x: x * (1 / x.shape[0] ** 0.5),
    lambda x: x * 0.5 if torch.isfinite(x).all() else x,
    lambda x: x + x.new_ones(4, 4).tril().flip(0).sum() * 0,
    with_its_derivative,
    lambda x: F.layer_norm(x, x.shape[1:]),
    lambda x: torch.stack([row - row.mean() for row in x]),
    logging_its_loss,
]


class Block(nn.Module):
    """Applies a function to what a layer makes."""

    def __init__(self, function=torch.tanh):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.function(self.linear(x))


def squares(outputs, inputs):
    return F.mse_loss(outputs, inputs.flip(1))


def run(blocks, caplog, num_ranks=1, num_steps=1, training=True, criterion=squares, num_microbatches=2, **settings):
    """The warnings about statistics in some steps with two micro-batches."""

    def steps():
        torch.manual_seed(0)
        batches = torch.randn(num_steps, 8, WIDTH)
        given = {"num_microbatches": num_microbatches, **settings}
        booster, model, optimizer = boosted(nn.Sequential(*blocks()), sgd, batches[0], **given)
        for batch in batches:
            with torch.set_grad_enabled(training):
                booster.execute_pipeline(iter([batch]), model, criterion, optimizer if training else None)[
                    "loss"
                ].item()
            if training:
                optimizer.step()

    caplog.clear()
    Loopback(num_ranks).run(steps)
    return [text for one in caplog.records if "statistic of all samples" in (text := one.getMessage())]


def with_first(function):
    return lambda: [Block(function), Block(), Block(), Block()]


def with_last(function):
    return lambda: [Block(), Block(), Block(), Block(function)]


@pytest.mark.parametrize(("words", "function"), CASES)
def test_statistics_are_named_wherever_a_layout_puts_them(words, function, caplog):
    for blocks in (with_first(function), with_last(function)):
        for pp_size in (1, 2):
            (warning,) = run(blocks, caplog, pp_size, pp_size=pp_size)
            assert words in warning
            assert "Sequential applies a statistic of all samples of a micro-batch to each of them" in warning
        (warning,) = run(blocks, caplog, training=False)
        assert words in warning


@pytest.mark.parametrize("function", APART)
def test_what_is_of_each_sample_is_no_statistic(function, caplog):
    for blocks in (with_first(function), with_last(function)):
        assert not run(blocks, caplog, 2, num_steps=4, pp_size=2)
        assert not run(blocks, caplog, training=False)


def test_what_earlier_stages_couple_is_named(caplog):
    coupled = lambda x: x * x.softmax(0)  # noqa: E731
    (warning,) = run(with_first(coupled), caplog, 2, pp_size=2)
    assert "softmax over the samples" in warning
    (warning,) = run(with_first(backwards), caplog, 2, pp_size=2)
    assert "getitem of chosen samples" in warning
    with pytest.raises(ConfigError, match="of chosen samples"):
        run(with_last(backwards), caplog)


def test_replicas_and_declared_means(caplog):
    divided = with_last(lambda x: x / x.std())
    assert run(divided, caplog, 2, num_microbatches=1, num_steps=2)
    assert not run(divided, caplog, 1, num_microbatches=1, num_steps=2)

    def declared(outputs, inputs):
        return squares(outputs, inputs)

    declared.reduction = "mean"
    assert not run(divided, caplog, criterion=declared)


def test_one_that_begins_later_is_found_in_the_next_look(caplog):
    class Later(Block):
        num_steps = 0

        def forward(self, x):
            made = super().forward(x)
            self.num_steps += 1
            return made - made.mean(0) if self.num_steps > 4 else made

    for pp_size in (1, 2):
        assert not run(lambda: [Later(), Block()], caplog, pp_size, num_steps=2, pp_size=pp_size)
        (warning,) = run(lambda: [Later(), Block()], caplog, pp_size, num_steps=8, pp_size=pp_size)
        assert "sub of samples and of their mean" in warning


class Standardising(nn.Module):
    """Standardises its inputs before a layer, or weights of its own loss."""

    def __init__(self, is_loss):
        super().__init__()
        self.linear, self.is_loss = nn.Linear(WIDTH, WIDTH), is_loss

    def forward(self, x):
        centred = x - x.mean(0)
        if not self.is_loss:
            return self.linear(centred).square().mean()
        weights = x.abs() / x.abs().sum()
        return (self.linear(x).square() * weights).sum()


@pytest.mark.parametrize("is_loss", [False, True])
def test_statistics_of_inputs_count_where_they_meet_a_parameter(is_loss, caplog):
    criterion = lambda outputs, inputs: outputs  # noqa: E731
    found = run(lambda: [Standardising(is_loss)], caplog, criterion=criterion)
    assert len(found) == (not is_loss)
    assert is_loss or "sub of samples and of their mean" in found[0]


def formatted(x):
    LOGGED.append(f"{x.detach().std():.3f} {x.dim()} {(x > 0).sum():d}")
    return x


def test_numbers_in_a_log_are_formatted_in_any_layout(caplog):
    for pp_size in (1, 2):
        (warning,) = run(with_first(formatted), caplog, pp_size, pp_size=pp_size)
        assert "their std, which Python reads as a number; if that is only logged, all is right" in warning
