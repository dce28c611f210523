import resource

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hybridpp.checkpoint import allocate
from hybridpp.estimate import AllocationLog, Hollow, NeedsValuesError

CPU = torch.device("cpu")


def gpt2():
    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=500, n_positions=32, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    config.loss_type = "ForCausalLMLoss"
    return GPT2LMHeadModel(config).train()


def passes(model, batch):
    """Bytes after the forward, and the most there were."""
    for _ in range(2):
        model.zero_grad()
        with AllocationLog() as log:
            loss = model(**batch).loss
            held = log.now
            loss.backward()
    return held, log.peak, len(log.allocations)


def test_a_hollow_model_allocates_what_the_model_allocates():
    ids = torch.full((3, 32), 3)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    expected = passes(gpt2(), batch)
    with torch.device("meta"):
        model = gpt2()
    with Hollow():
        allocate(model, (), CPU)
        assert passes(model, batch) == expected


def test_a_hollow_model_of_many_gigabytes_takes_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2**16, 2**16, bias=False) for _ in range(4)])  # 64 GiB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Hollow():
        allocate(model, (), CPU)
        with AllocationLog() as log:
            model(torch.ones(2, 2**16)).sum().backward()
    assert log.peak > 64 * 2**30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 2**10  # KiB


def test_what_is_made_of_real_tensors_is_real():
    with Hollow() as hollow:
        weight = torch.empty(100, 100)
        mask = torch.ones(5, dtype=torch.bool)
        assert hollow.is_hollow(weight)
        assert not hollow.is_hollow(mask)
        assert bool(mask.all())
        assert not hollow.is_hollow(torch.zeros(1024, 1024))  # may be a mask
        assert hollow.is_hollow(torch.zeros(1024 * 1024))
        assert not hollow.is_hollow(torch.arange(5) + 1)
        product = weight @ weight
        assert hollow.is_hollow(product)
        assert hollow.is_hollow(product.t())
        assert product.sum().item() == 0


def test_writes_of_hollow_tensors_are_left_out():
    with Hollow() as hollow:
        losses = torch.ones(2)
        losses[0] = torch.empty(100, 100).sum()
        assert losses.tolist() == [1, 1]
        total = torch.empty(200)
        assert total.add_(1.0) is total
        assert hollow.is_hollow(total)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x, x], 1),
        lambda x: x.unbind(0),
        lambda x: nn.functional.layer_norm(x, (8,)),
        lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
        lambda x: torch.sort(x),
        lambda x: x.to(torch.bfloat16),
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: x[:, :2].reshape(-1),
        lambda x: torch.nonzero(x),
        lambda x: x[torch.tensor([True, False, True, False])],
    ],
)
def test_results_have_the_sizes_and_formats_of_real_ones(function):
    def described(result):
        leaves = result if isinstance(result, tuple | list) else (result,)
        return [(tuple(leaf.shape), leaf.stride(), leaf.dtype) for leaf in leaves]

    expected = described(function(torch.zeros(4, 8)))
    with Hollow():
        assert described(function(torch.empty(4, 8))) == expected


@pytest.mark.parametrize(
    ("choose", "size"),
    [
        (lambda scores: scores.topk(2, dim=-1)[1], 2),
        (lambda scores: scores.softmax(-1).topk(2)[1], 2),
        (lambda scores: scores.sort(dim=1, descending=True)[1][:, :3], 3),
        (lambda scores: scores.argsort(dim=-1, stable=True)[:, :3], 3),
        (lambda scores: scores.max(dim=-1)[1], 1),
        (lambda scores: scores.t().max(0, keepdim=True)[1], 1),
        (lambda scores: scores.argmax(-1), 1),
    ],
)
def test_the_largest_elements_of_hollow_rows_are_spread_over_all(choose, size):
    with Hollow() as hollow:
        chosen = choose(torch.empty(64, 8))
        assert not hollow.is_hollow(chosen)
    assert torch.bincount(chosen.flatten(), minlength=8).tolist() == [64 * size // 8] * 8
    assert size == 1 or all(len(set(row)) == size for row in chosen.tolist())


def test_what_is_chosen_of_hollow_rows_has_a_size():
    with Hollow() as hollow:
        hidden, scores = torch.empty(64, 300), torch.empty(64, 8)
        best = scores.topk(2)[1]
        own = (best == 3).any(-1)
        assert hidden[own].shape == hidden[torch.where(own)].shape == (16, 300)
        assert hollow.is_hollow(hidden[own])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_experts_in_groups_take_no_memory_in_any_format(dtype):
    with Hollow() as hollow:
        rows = torch.empty(64, 4096, dtype=dtype, requires_grad=True)
        weights = torch.empty(16, 2**15, 4096, dtype=dtype, requires_grad=True)  # 4 to 8 GiB
        ends = torch.arange(4, 68, 4, dtype=torch.int32)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        product = torch.nn.functional.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
        assert (product.shape, product.dtype) == ((64, 2**15), dtype)
        (product * product).sum().backward()
        assert hollow.is_hollow(weights.grad)
        assert weights.grad.dtype == dtype
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10  # KiB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matrices_that_do_not_go_together_are_refused(dtype):
    ends = torch.arange(4, 68, 4, dtype=torch.int32)
    with Hollow(), pytest.raises(RuntimeError):
        torch.nn.functional.grouped_mm(torch.empty(64, 32, dtype=dtype), torch.empty(16, 64, 8, dtype=dtype), offs=ends)


def causal(size):
    return torch.arange(size)[:, None] >= torch.arange(size)


def test_large_values_are_withheld_until_they_may_be_read():
    with Hollow(withholds=True) as hollow:
        weight = torch.empty(1, 4096, 4096)
        mask = torch.where(causal(4096), 0.0, float("-inf"))[None]
        assert hollow.is_hollow(mask)
        assert mask.shape == weight.shape
        assert (weight + mask).shape == weight.shape
        # What is made of something hollow has no values, whatever is withheld.
        assert float((weight + mask).sum()) == 0
        for read in (
            lambda: mask.all(),
            lambda: mask[0, 0, 0].item(),
            lambda: mask.nonzero(),
            lambda: torch.ones(8).copy_(mask.view(-1)[:8]),
        ):
            with pytest.raises(NeedsValuesError):
                read()
    with Hollow() as hollow:
        assert causal(4096)[1].sum() == 2


def test_small_values_are_never_withheld():
    with Hollow(withholds=True) as hollow:
        torch.empty(4096, 4096)
        mask = causal(64)
        assert not hollow.is_hollow(mask)
        assert mask.sum() == 64 * 65 // 2


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.unsqueeze_(1),
        lambda x: x[None].squeeze_(0),
        lambda x: x.t_(),
        lambda x: x.transpose_(0, 1),
        lambda x: x.swapaxes_(0, 1),
        lambda x: x.as_strided_((10, 10), (1, 10)),
        lambda x: x.resize_(10, 10),
        lambda x: x.set_(torch.empty(100, 50)),
    ],
)
def test_a_hollow_tensor_that_is_shown_otherwise_has_the_new_shape(change):
    expected = change(torch.zeros(100, 100))
    with Hollow() as hollow, AllocationLog() as log:
        tensor = torch.empty(100, 100)
        given = tensor
        found = change(given)
        assert hollow.is_hollow(found)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert all(one.size in (40_000, 20_000) for one in log.allocations)
