"""The loss of logits divided by vocabulary, against torch's of the whole ones: values and gradients."""

import pytest
import torch
from torch.nn import functional

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import ConfigError
from hybridpp.sharded_activations import vocab_parallel_cross_entropy


def part_of(logits, dim, rank, size):
    """A rank's part with its filling, which is no number that may count."""
    vocab = logits.shape[dim]
    width = -(-vocab // size)
    whole = torch.full_like(logits.movedim(dim, -1)[..., :1], 1e4).expand(*logits.movedim(dim, -1).shape[:-1], width)
    start = min(rank * width, vocab)
    own = logits.movedim(dim, -1)[..., start : start + width]
    return torch.cat([own, whole[..., : width - own.shape[-1]]], -1).movedim(-1, dim).contiguous()


def on_ranks(size, logits, target, **options):
    """The loss on every rank, and the whole gradient of its sum weighted by 1, 2, …."""
    dim = min(logits.dim() - 1, 1)

    def run():
        group = current_world().split([list(range(size))])
        own = part_of(logits, dim, group.rank, size).requires_grad_()
        loss = vocab_parallel_cross_entropy(own, target, group, logits.shape[dim], **options)
        loss.backward(torch.arange(1.0, loss.numel() + 1, dtype=loss.dtype).view(loss.shape))
        return loss.detach(), own.grad

    ranks = Loopback(size).run(run)
    whole = torch.cat([gradient for _, gradient in ranks], dim)
    assert not whole.narrow(dim, logits.shape[dim], whole.shape[dim] - logits.shape[dim]).any()
    for loss, _ in ranks:
        torch.testing.assert_close(loss, ranks[0][0], atol=0, rtol=0, equal_nan=True)
    return ranks[0][0], whole.narrow(dim, 0, logits.shape[dim])


def check(size, logits, target, tolerance=2e-6, **options):
    whole = logits.clone().requires_grad_()
    expected = functional.cross_entropy(whole, target, **options)
    expected.backward(torch.arange(1.0, expected.numel() + 1, dtype=expected.dtype).view(expected.shape))
    loss, gradient = on_ranks(size, logits, target, **options)
    assert (loss.shape, loss.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(loss, expected.detach(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(gradient, whole.grad, atol=tolerance, rtol=tolerance)


def numbers(*shape, dtype=torch.float32):
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_gradients_of_gradients_are_torchs(label_smoothing):
    logits, target, size = numbers(3, 5, dtype=torch.float64), torch.tensor([4, -100, 1]), 4

    def penalty(x, loss):
        (slope,) = torch.autograd.grad(loss.exp(), x, create_graph=True)
        return slope.square()

    def run():
        group = current_world().split([list(range(size))])
        own = part_of(logits, 1, group.rank, size).requires_grad_()
        loss = vocab_parallel_cross_entropy(own, target, group, 5, label_smoothing=label_smoothing)
        (gradient,) = torch.autograd.grad(penalty(own, loss).sum(), own)
        return gradient

    whole = logits.clone().requires_grad_()
    loss = functional.cross_entropy(whole, target, label_smoothing=label_smoothing)
    (expected,) = torch.autograd.grad(penalty(whole, loss).sum(), whole)
    torch.testing.assert_close(torch.cat(Loopback(size).run(run), 1)[:, :5], expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_is_torchs(size, label_smoothing, reduction):
    target = torch.tensor([0, 9, 3, -100, 4, 6])
    check(size, numbers(6, 10), target, label_smoothing=label_smoothing, reduction=reduction)


@pytest.mark.parametrize("vocab", [1, 5, 7, 8])
def test_a_vocabulary_that_no_equal_shares_fit(vocab):
    # 5 over 4 ranks: two each, and the last one has nothing but filling.
    check(4, numbers(3, vocab), torch.tensor([0, vocab - 1, vocab // 2]), label_smoothing=0.2)


@pytest.mark.parametrize("shape", [(7,), (3, 7, 2), (3, 7, 2, 4)])
def test_classes_lie_along_the_dimension_torch_expects(shape):
    target = torch.randint(0, 7, shape[:1] * (len(shape) > 1) + shape[2:], generator=torch.Generator().manual_seed(1))
    check(2, numbers(*shape), target, reduction="none")


@pytest.mark.parametrize("ignore_index", [-100, -1, 2, 50])
def test_what_is_ignored_has_no_gradient(ignore_index):
    check(2, numbers(4, 6), torch.tensor([ignore_index, 1, 5, ignore_index]), ignore_index=ignore_index)


def test_the_mean_of_nothing_is_nan_with_gradients_of_zero():
    loss, gradient = on_ranks(2, numbers(2, 6), torch.tensor([-100, -100]))
    assert loss.isnan()
    assert not gradient.any()


def test_no_positions_at_all():
    check(2, numbers(0, 6), torch.zeros(0, dtype=torch.long), reduction="sum")


def test_large_logits_do_not_overflow():
    check(2, numbers(4, 6) * 1000, torch.tensor([0, 1, 4, 5]), tolerance=1e-4, reduction="none")


def test_masked_classes():
    logits = numbers(3, 8)
    logits[:, 4:] = float("-inf")
    check(2, logits, torch.tensor([0, 1, 3]))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float64, 1e-12)]
)
def test_other_dtypes(dtype, tolerance):
    check(2, numbers(4, 10, dtype=dtype), torch.tensor([0, 9, 3, 4]), tolerance, label_smoothing=0.1)


def test_half_logits_are_summed_in_fp32():
    # 4096 equal classes: in bf16 a running sum of ones would stop at 256.
    logits, target = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.tensor([7])
    loss, gradient = on_ranks(2, logits, target)
    assert loss.item() == pytest.approx(8.3178, rel=4e-3)
    assert gradient[0, 0].item() == pytest.approx(1 / 4096, rel=4e-3)


def test_a_second_backward_pass_finds_the_same():
    def run():
        group = current_world().split([[0, 1]])
        own = part_of(numbers(3, 6), 1, group.rank, 2).requires_grad_()
        loss = vocab_parallel_cross_entropy(own, torch.tensor([0, 3, 5]), group, 6)
        first, second = (torch.autograd.grad(loss, own, retain_graph=True)[0] for _ in range(2))
        return torch.equal(first, second)

    assert Loopback(2).run(run) == [True, True]


@pytest.mark.parametrize("bad", [6, 7, -1])
def test_a_target_that_is_no_class_is_refused(bad):
    # 7 would lie in the last rank's filling.
    with pytest.raises(RuntimeError, match=r"cross-entropy needs targets from 0 to 5, or ignore_index=-100\."):
        on_ranks(4, numbers(2, 6), torch.tensor([0, bad]))


@pytest.mark.parametrize("option", [{"reduction": "median"}, {"label_smoothing": 1.5}])
def test_what_torch_does_not_know_is_refused(option):
    with pytest.raises(
        ConfigError, match="takes a reduction of mean, sum or none and label_smoothing from 0 to 1: got"
    ):
        on_ranks(2, numbers(2, 6), torch.tensor([0, 1]), **option)
