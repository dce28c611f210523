"""The gradient norm and clipped gradients are those of torch on the whole model in one process, in every layout."""

import functools
import itertools
import math

import pytest
import torch
from divided_models import LLAMA, SIZES, token_batch
from support import boosted, in_half, model_loss, replica_part, sgd, whole_over_tp
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hybridpp.cluster import Loopback, current_world
from hybridpp.errors import DeadlockError

BATCH, NUM_MICROBATCHES = token_batch(4), 2
MAX_NORM, LIMIT, LOSS_SCALE = 0.05, 0.01, 2.0**8
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def llama(tied):
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied, use_cache=False)).train()


@functools.cache
def in_one_process(tied, precision):
    """torch's norm, the gradients clipped by value, and these by norm; of fp32 sums over micro-batches.

    It computes as a half-precision model does: rotary frequencies stay fp32, and fp16 goes backward with a loss scale,
    without which small gradients would lose bits.
    """
    model, scale = llama(tied), LOSS_SCALE if precision == "fp16" else 1.0
    if precision != "fp32":
        in_half(model, DTYPES[precision])
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    for n in range(NUM_MICROBATCHES):
        model.zero_grad()
        loss = model(**replica_part(BATCH, n, NUM_MICROBATCHES)).loss
        (loss * scale / NUM_MICROBATCHES).backward()
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad.float() / scale
    holders = {name: torch.nn.Parameter(value) for name, value in sums.items()}
    for name, holder in holders.items():
        holder.grad = sums[name].clone()
    norm = torch.nn.utils.get_total_norm([holder.grad for holder in holders.values()])
    torch.nn.utils.clip_grad_value_(holders.values(), LIMIT)
    by_value = {name: holder.grad.clone() for name, holder in holders.items()}
    assert torch.nn.utils.clip_grad_norm_(holders.values(), MAX_NORM) > 2 * MAX_NORM
    return norm.item(), by_value, {name: holder.grad for name, holder in holders.items()}


def distance(tensors, expected):
    """Relative, of all tensors as one vector."""
    assert set(tensors) == set(expected)
    difference = math.fsum((tensors[name] - expected[name]).square().sum().item() for name in expected)
    return math.sqrt(difference / math.fsum(tensor.square().sum().item() for tensor in expected.values()))


# Every layout with two of the formats, with tied weights in one of them; where all axes are used, in all.
SIZES_AND_FORMATS = [
    (*sizes, tied, list(DTYPES)[(number + tied) % len(DTYPES)])
    for number, sizes in enumerate(itertools.product([1, 2], repeat=3))
    for tied in (True, False)
]


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "dp_size", "tied", "precision"),
    [*SIZES_AND_FORMATS, *((2, 2, 2, True, precision) for precision in ("fp32", "fp16"))],
)
def test_norms_and_clipping_are_torchs_in_every_layout(tp_size, pp_size, dp_size, tied, precision):
    def run():
        booster, model, optimizer = boosted(
            llama(tied),
            sgd,
            token_batch(2),
            tp_size=tp_size,
            pp_size=pp_size,
            num_microbatches=NUM_MICROBATCHES // dp_size,
            precision=precision,
            max_norm=MAX_NORM,
            initial_scale=LOSS_SCALE,
            tensor_parallel_plan=LLAMA,
        )
        mine = replica_part(BATCH, booster.plugin.layout.here.dp, dp_size)
        booster.execute_pipeline(iter([mine]), model, model_loss, optimizer)
        norm = optimizer.get_grad_norm()
        optimizer.clip_grad_by_value(LIMIT)
        by_value = dict(optimizer.gradients())
        optimizer.step()
        by_norm = dict(optimizer.gradients())
        return norm, *(whole_over_tp(booster, model, tensors) for tensors in (by_value, by_norm))

    norms, *clipped = zip(*Loopback(tp_size * pp_size * dp_size).run(run), strict=True)
    norm, *expected = in_one_process(tied, precision)
    assert len(set(norms)) == 1, "the same number on every rank"
    assert norms[0] == pytest.approx(norm, rel=1e-5 if precision == "fp32" else 1e-3)
    # Nothing is rounded otherwise, but where ranks share layers the sums of parts, and where stages share a weight the
    # parts of its gradient.
    roundings = 2.0 if tp_size == 2 else 0.25 if tied and pp_size == 2 else 0.0
    tolerance = 1e-6 + roundings * torch.finfo(DTYPES[precision]).eps
    for tensors, wanted in zip(clipped, expected, strict=True):
        whole = dict(itertools.chain.from_iterable(part.items() for part in tensors))
        assert distance(whole, wanted) < tolerance


class PartlyTrained(torch.nn.Module):
    """The first stage of two is frozen, a weight is used by nothing, and another on the last stage only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(4)])
        self.scale, self.never = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(2))
        self.layers[:2].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


@pytest.mark.parametrize(
    ("pp_size", "dp_size", "precision"),
    [(1, 2, "bf16"), (2, 1, "fp16"), *((2, 2, precision) for precision in DTYPES)],
)
def test_norms_of_what_is_partly_frozen_and_adds_up_over_calls(pp_size, dp_size, precision):
    batches = [(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)),) for seed in range(2)]

    def loss(outputs, inputs):
        return outputs.float().square().mean()

    model = in_half(PartlyTrained(), DTYPES[precision])
    for (x,) in batches:
        loss(model(x.to(DTYPES[precision])), None).backward()
    exact = torch.nn.utils.get_total_norm([p.grad.float() for p in model.parameters() if p.grad is not None]).item()

    def run():
        booster, model, optimizer = boosted(
            PartlyTrained(), sgd, batches[0], pp_size=pp_size, precision=precision, max_norm=0.01, initial_scale=8.0
        )
        first, second = ([replica_part(*one, booster.plugin.layout.here.dp, dp_size)] for one in batches)
        with booster.no_sync(model, optimizer):
            booster.execute_pipeline(iter([tuple(first)]), model, loss, optimizer)
        booster.execute_pipeline(iter([tuple(second)]), model, loss, optimizer)
        before = optimizer.get_grad_norm()
        optimizer.step()
        held = math.fsum(gradient.square().sum().item() for _, gradient in optimizer.gradients())
        return before, optimizer.get_grad_norm(), held, booster.plugin.layout.here

    ranks = Loopback(pp_size * dp_size).run(run)
    assert len({norm for before, behind, *_ in ranks for norm in (before, behind)}) == 1
    assert ranks[0][0] == pytest.approx(exact, rel=1e-6 if precision == "fp32" else 2e-2)
    clipped = math.sqrt(math.fsum(held for *_, held, here in ranks if here.dp == 0))
    assert clipped == pytest.approx(0.01, rel=1e-3)


def test_a_loss_whose_exchange_failed_raises_the_same_error_at_every_read():
    def run():
        booster, model, _ = boosted(PartlyTrained(), None, torch.zeros(2, 6))
        data = iter(booster.plugin.prepare_dataloader(torch.zeros(8, 6), batch_size=1))
        raised = []
        with torch.no_grad():
            # The criterion is checked in the first one, by all ranks; rank 1 makes no second one.
            for _ in range(2 - current_world().rank):
                loss = booster.execute_pipeline(data, model, lambda outputs, inputs: outputs.square().mean())["loss"]
        if current_world().rank == 0:
            for read in (Tensor.item, Tensor.item, Tensor.double):
                with pytest.raises(DeadlockError) as caught:
                    read(loss)
                raised.append(caught.value)
        return len(set(raised))

    assert Loopback(2).run(run) == [1, 0]
