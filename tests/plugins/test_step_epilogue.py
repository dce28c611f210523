"""What ranks tell each other at the end of a step. Norms and clipped gradients are torch's of the whole model."""

import functools
import itertools
import math

import pytest
import torch
from copies import copied
from divided_models import LLAMA, SIZES, token_batch
from hybridpp_plugins.manual_clipping import ManualScaling
from hybridpp_plugins.step_epilogue import (
    NUM_WITHOUT_NORM,
    BadLoss,
    OptimizerCalls,
    RankReport,
    message_of,
    summary_of,
)
from support import boosted, in_half, model_loss, replica_part, sgd, whole_over_tp
from transformers import LlamaConfig, LlamaForCausalLM

from hybridpp.cluster import Loopback
from hybridpp.pipeline import LossReduction, StepResult, split_batch

BATCH, NUM_MICROBATCHES = token_batch(4), 2
MAX_NORM, LIMIT, LOSS_SCALE = 0.05, 0.01, 2.0**8
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@copied
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


@pytest.mark.covering("tp_size pp_size dp_size", "tp_size tied", "pp_size tied", "tied precision")
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


TWO_AND_ONE = split_batch([torch.zeros(3)], num_microbatches=2, microbatch_size=None)  # of two samples and of one


def message(losses=(), **report):
    result = StepResult(torch.tensor(losses), [True] * len(losses) or [False] * 2, {})
    return message_of(TWO_AND_ONE, result, list(losses), RankReport(**report))


NOTHING = message()


def test_every_rank_learns_the_mean_loss_of_its_replica():
    messages = [NOTHING, message([1.0, 4.0]), NOTHING, message([7.0, 7.0])]
    assert {len(one) for one in messages} == {NUM_WITHOUT_NORM}
    first, second = (summary_of(messages, [[1], [3]], last) for last in (1, 3))
    assert (first.loss, second.loss) == (2.0, pytest.approx(7.0))
    assert (first.bad_loss, first.reduction, first.unequal, first.failed) == (None, LossReduction.MEAN, {}, [])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_bad_loss_is_named(bad):
    summary = summary_of([NOTHING, message([1.0, bad]), message([bad, bad])], [[1], [2]], 1)
    assert repr(summary.bad_loss) == repr(BadLoss(bad, 1, 1))
    assert not math.isfinite(summary.loss)


def test_infinities_of_both_signs_add_up_to_nan():
    assert math.isnan(summary_of([message([math.inf, -math.inf])], [[0]], 0).loss)


def test_ranks_that_share_layers_must_have_one_loss():
    assert summary_of([message([1.0, 1.0]), message([1.0, 2.0])], [[0, 1]], 0).unequal == {
        0: 1.0,
        1: pytest.approx(4 / 3),
    }
    nan = message([math.nan, 1.0])
    assert summary_of([nan, nan], [[0, 1]], 0).unequal == {}


def test_the_most_severe_finding_and_all_refusals_are_known():
    messages = [
        message(failed=1.0),
        message([1.0, 1.0], reduction=float(max(LossReduction))),
        message([1.0, 1.0], scaled=ManualScaling(0.5, 3.0)),
    ]
    summary = summary_of(messages, [[1], [2]], 1)
    assert (summary.reduction, summary.failed) == (max(LossReduction), [0])
    assert [report.scaled for report in summary.reports] == [ManualScaling(), ManualScaling(), ManualScaling(0.5, 3.0)]


def test_a_message_keeps_every_number_of_a_report():
    scaled, calls, hashes = ManualScaling(0.5, 3.0), OptimizerCalls(4.0, 5.0), (10.0, 11.0, 12.0)
    report = RankReport(1.0, 2.0, scaled, calls, 6.0, 7.0, 8.0, 9.0, hashes, 13.0, 14.0, 15.0)
    (received,) = summary_of([message([1.0, 1.0], **report._asdict())], [[0]], 0).reports
    assert received == report
    assert summary_of([message([1.0, 1.0], digest=7.0), NOTHING], [[0]], 0).digests == [7.0, None]


@pytest.mark.parametrize(
    "problem",
    [
        {"failed": 1.0},
        {"reduction": 1.0},
        {"scaled": ManualScaling(0.5, 3.0)},
        {"calls": OptimizerCalls(1.0, 2.0)},
        {"losses": [math.nan, 1.0]},
        {"losses": [1.0, 2.0]},
    ],
    ids=str,
)
def test_a_report_with_a_problem_is_not_clean(problem):
    clean = message([1.0, 1.0], digest=3.0)
    assert summary_of([clean, clean], [[0, 1]], 0).is_clean
    losses = problem.pop("losses", [1.0, 1.0])
    assert not summary_of([clean, message(losses, **problem)], [[0, 1]], 0).is_clean
