"""Where tensors hold samples: in the dimension in which they change with one sample of the input."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hybridpp.pipeline.loss_trace import LossTrace
from hybridpp.pipeline.sample_dims import SampleDim, guessed_samples, lack_samples, samples_at

ROWS, LENGTH, WIDTH = 4, 6, 3
WEIGHT = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))

MOVING = {
    "transpose": lambda x: x.transpose(0, 2),
    "T": lambda x: x.mean(1).T,
    "permute": lambda x: x.permute(1, 2, 0),
    "movedim": lambda x: x.movedim(0, 1),
    "heads": lambda x: x.view(ROWS, 2, 3, WIDTH).transpose(1, 2).reshape(ROWS, 3, -1),
    "tokens": lambda x: x.reshape(-1, WIDTH).T,
    "tokens back": lambda x: x.reshape(-1, WIDTH).T.unflatten(1, (ROWS, LENGTH)),
    "windows": lambda x: x.view(ROWS, 2, 3, WIDTH).permute(0, 2, 1, 3).flatten(0, 1),
    "length first": lambda x: x.transpose(0, 1).reshape(-1, WIDTH),
    "squeeze": lambda x: x[None, :, :, None].squeeze(0).transpose(0, 2),
    "sum": lambda x: x.sum(1),
    "kept": lambda x: x.transpose(0, 1).mean(0, keepdim=True),
    "norm": lambda x: x.transpose(0, 1).norm(dim=-1),
    "maximum": lambda x: x.transpose(0, 1).max(0).values,
    "index": lambda x: x.transpose(0, 1)[-1],
    "slice": lambda x: x.transpose(0, 1)[1:, :, None],
    "chosen": lambda x: x.transpose(0, 2)[[0, 2], 1:],
    "apart": lambda x: x.transpose(0, 1)[[0, 2], :, [1, 2]],
    "mask": lambda x: x.transpose(0, 1)[torch.arange(LENGTH) > 2],
    "last of each": lambda x: x[torch.arange(len(x)), torch.arange(len(x)) + 1],
    "last of each, apart": lambda x: x.transpose(0, 1)[torch.arange(len(x)) + 1, None, torch.arange(len(x))],
    "rows": lambda x: x.flatten(0, 1)[torch.arange(len(x)) * LENGTH + 2],
    "two rows of each": lambda x: x.flatten(0, 1).index_select(0, torch.arange(2 * len(x)) * 3 + 1),
    "mask of rows": lambda x: x[F.one_hot(torch.arange(len(x)) + 1, LENGTH).bool()],
    "rows in turn": lambda x: torch.stack([x[i, i + 1] for i in range(len(x))], 1),
    "rows in turn, joined": lambda x: torch.cat([row[i + 1][None] for i, row in enumerate(x)]),
    "stack": lambda x: torch.stack([x, 2 * x]),
    "stack behind": lambda x: torch.stack([x, 2 * x], -1),
    "cat": lambda x: torch.cat([x, x[:, :1]], 1),
    "twice": lambda x: torch.cat([x, 2 * x]).chunk(2)[1],
    "repeat": lambda x: x.repeat(2, 1, 1),
    "repeat each": lambda x: x.repeat_interleave(2, 0),
    "expand": lambda x: x.mean(1).expand(5, ROWS, WIDTH),
    "unbind": lambda x: x.unbind(1)[2],
    "split": lambda x: x.transpose(0, 1).split([2, 4])[1],
    "broadcast": lambda x: x[:, :, None] - x[:, None],
    "linear": lambda x: F.linear(x.transpose(0, 1), WEIGHT),
    "matmul": lambda x: WEIGHT @ x.transpose(1, 2),
    "attention": lambda x: x @ x.transpose(1, 2) @ x,
    "einsum": lambda x: torch.einsum("nld,nle->den", x, x),
    "einsum of more": lambda x: torch.einsum("...d,ed->...e", x, WEIGHT),
    "tensordot": lambda x: torch.tensordot(WEIGHT, x, ([1], [2])),
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), WEIGHT[:, :, None]),
    "softmax": lambda x: x.transpose(0, 1).softmax(0),
    "layers": lambda x: torch.lstm(
        x, (torch.zeros(1, ROWS, 2),) * 2, [torch.ones(8, 3), torch.ones(8, 2)], False, 1, 0.0, False, False, True
    )[1],
    "scatter": lambda x: torch.zeros(len(x), LENGTH, 5).scatter(2, torch.zeros_like(x).long(), x),
    "images": lambda x: (
        torch.zeros(len(x), LENGTH, WIDTH)
        .add(x)
        .masked_scatter((torch.arange(LENGTH) < 2)[:, None], x[:, :2].flatten(0, 1))
    ),
    "classes": lambda x: F.cross_entropy(x.transpose(1, 2), torch.zeros(ROWS, LENGTH).long(), reduction="none"),
}

ENDING = {
    "sum of rows": lambda x: x.transpose(0, 1).sum(1),
    "product": lambda x: x.mean(1).T @ x.mean(1),
    "einsum": lambda x: torch.einsum("nld,nle->de", x, x),
    "deviation": lambda x: x.std(0),
    "largest": lambda x: x.max(),
}


def found_of(function, x):
    """The result of a function of a tensor with samples, and where it has them."""
    trace = LossTrace([{"x": x}], len(x))
    weight = nn.Parameter(torch.ones(()))
    with trace:
        result = function(x * weight)
    return result.detach(), trace.samples_of(result), trace._tracker.made(result)


@pytest.mark.parametrize("name", MOVING)
def test_samples_are_where_the_result_changes_with_one_of_them(name):
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    result, samples, made = found_of(MOVING[name], x)
    assert samples is not None
    assert not made.why
    size = result.shape[samples.dim]
    for sample in range(ROWS):
        other = x.clone()
        other[sample] += 1 + torch.rand(LENGTH, WIDTH)
        changed = (MOVING[name](other) != result).movedim(samples.dim, 0).flatten(1).any(1)
        assert changed.tolist() == [index // samples.rows % ROWS == sample for index in range(size)]


# Written for a number of samples.
FIXED = {"index", "heads", "tokens back", "windows", "expand", "layers", "classes"}


@pytest.mark.parametrize("name", [name for name in MOVING if name not in FIXED])
def test_a_single_sample_is_where_several_would_be(name):
    several = found_of(MOVING[name], torch.rand(ROWS, LENGTH, WIDTH))[1]
    assert found_of(MOVING[name], torch.rand(1, LENGTH, WIDTH))[1] == several


@pytest.mark.parametrize("name", ENDING)
def test_what_goes_over_all_samples_has_none(name):
    _, samples, made = found_of(ENDING[name], torch.rand(ROWS, LENGTH, WIDTH))
    assert samples is None
    assert made.is_gone
    assert made.is_sum == (name not in ("deviation", "largest"))


SORTED = {
    "sorted": (lambda x, order: x[order].exp(), ""),
    "back": (lambda x, order: x[order].exp()[order.argsort()] * x, ""),
    "over them": (lambda x, order: x[order].logcumsumexp(0), "logcumsumexp over the samples"),
    "with others": (lambda x, order: x[order] * x, "mul of each sample with each other"),
}


@pytest.mark.parametrize("name", SORTED)
def test_samples_that_an_input_sorts_are_told_from_others(name):
    function, why = SORTED[name]
    x, time = torch.randn(ROWS, WIDTH), torch.tensor([3.0, 1.0, 0.0, 2.0])
    trace = LossTrace([{"x": x, "time": time}], ROWS)
    weight = nn.Parameter(torch.ones(()))
    with trace:
        result = function(x * weight, time.argsort())
    assert trace._tracker.made(result).why == why
    if not why:
        assert trace.samples_of(result) == SampleDim(0, order=(2, 1, 3, 0) if name == "sorted" else ())


def test_samples_of_received_tensors_are_guessed_by_size():
    shapes = [(4, 6, 8), (1, 8, 8), (8, 3)]
    assert guessed_samples(shapes, 4) == [SampleDim(0), None, SampleDim(0, 2, is_sure=False)]
    assert guessed_samples([(6, 4, 8)], 4) == [SampleDim(1)]
    # A bias of positions that all samples share, with more elements than they have.
    assert guessed_samples([(1, 4, 9, 9), (4, 9, 8)], 4) == [None, SampleDim(0)]
    assert guessed_samples([(1, 4, 9, 9), (1, 9, 8)], 1) == [SampleDim(0, 1), SampleDim(0, 1, is_sure=False)]
    lack = lack_samples([(2, 6, 8), (), (1,), (5,), (8,), (2,), (12,), (3, 5), (12, 3)], 2)
    assert lack == [False, True, True, True, True, False, False, True, False]
    assert samples_at(-1, (6, 8), 4) == SampleDim(1, 2)
    assert samples_at(0, (6, 8), 4) is None


def test_an_index_of_rows_says_nothing_of_a_dimension_that_is_as_long():
    def routed(x):
        rows = x.flatten(0, 1)
        order = rows.sum(1).argsort()
        return x + torch.zeros(8, 8).index_add(0, order, rows[order]).view(x.shape)

    _, samples, made = found_of(routed, torch.rand(2, 4, 8))
    assert samples == SampleDim(0)
    assert not made.why
