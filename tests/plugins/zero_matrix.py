"""Every stage of ZeRO in every layout, schedule and precision, against training without it and against one process.

PYTHONPATH=.:plugins:tests python tests/plugins/zero_matrix.py [--processes] [--only "dp3 .* fp32"]

A case is 6 steps of AdamW with clipping: dropout, a tied weight, two groups, a frozen stage, an unused parameter,
parameters that replicas tear, and a last batch that gives replicas different numbers of micro-batches. Sums once per
step must have the bits of zero_stage=0; sums per micro-batch, and one process, are compared in fp32.
"""

import argparse
import re
import sys
import time
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch
from plugins.zero_models import SAMPLE, WIDTH, Block, TiedModel, batches, cross_entropy, step, two_groups, weights_of
from processes import run_ranks
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.cluster import Loopback

NUM_STEPS, BATCH, RAGGED = 6, 12, 7
EXACT = {
    "1": {"zero_stage": 1},
    "2 by step": {"zero_stage": 2, "zero_reduce": "step"},
    "3 by step": {"zero_stage": 3, "zero_reduce": "step"},
}
BY_MICROBATCH = {"2": {"zero_stage": 2}, "3": {"zero_stage": 3}}
# AdamW's first steps make the rounding of small gradients as large as others.
TOLERANCE = 2e-6


class Wide(Block):
    """Draws random numbers behind the sharded layers, where tensor-parallel ranks draw the same."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x):
        return x + self.drop(self.down(self.up(self.norm(x)).relu()))


class MatrixModel(TiedModel):
    """Of four stages, the second one is frozen; the last one has matrices of more than a segment."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Wide(width) for width in (64, 64, 96, 400))
        for parameter in self.blocks[1].parameters():
            parameter.requires_grad_(False)


class Case(NamedTuple):
    """A layout, a schedule and a precision."""

    dp: int
    pp: int
    tp: int
    schedule: str
    precision: str

    def __str__(self):
        return f"dp{self.dp} pp{self.pp} tp{self.tp} {self.schedule} {self.precision}"

    @property
    def num_ranks(self):
        return self.dp * self.pp * self.tp

    @property
    def settings(self):
        chunks = {"num_model_chunks": 2} if self.schedule == "interleaved" and self.pp > 1 else {}
        sizes = {"pp_size": self.pp, "tp_size": self.tp, "schedule": self.schedule, "precision": self.precision}
        return {**sizes, **chunks, "microbatch_size": 1, "num_microbatches": None, "max_norm": 0.5}


def cases():
    """All of them; schedules differ with several stages only."""
    schedules = ("1f1b", "interleaved", "zb-h1", "zb-v")
    for precision, dp, tp, pp in product(("fp32", "bf16", "fp16"), (2, 3), (1, 2), (1, 2)):
        for schedule in schedules if pp > 1 else schedules[:1]:
            yield Case(dp, pp, tp, schedule, precision)


def train(settings, zero):
    """The losses, the weights of this rank and the last norm."""
    plugin = HybridParallelPlugin(**settings, **zero)
    booster, model = Booster(plugin=plugin), MatrixModel()
    _, optimizer, *_ = booster.boost(model, two_groups(model.parameters()), criterion=cross_entropy, sample=SAMPLE)
    losses = []
    for number, batch in enumerate(batches(NUM_STEPS, BATCH)):
        losses.append(step(booster, model, optimizer, batch[:RAGGED] if number == NUM_STEPS - 1 else batch))
        optimizer.step()
    assert optimizer.get_grad_norm() > 0.5, "clipping is active"
    with booster.unsharded(model):
        return losses, weights_of(model)


@cache
def alone():
    """The weights of one process."""
    [(_, weights)] = Loopback(1).run(partial(train, Case(1, 1, 1, "1f1b", "fp32").settings, {}))
    return weights


def on_ranks(case, zero, processes):
    run = partial(train, case.settings, zero)
    return run_ranks(run, case.num_ranks, timeout_s=300) if processes else Loopback(case.num_ranks).run(run)


def largest_difference(ranks, expected):
    """Of weights of equal shape."""
    return max(
        (weights[name].float() - others[name].float()).abs().max().item()
        for (_, weights), (_, others) in zip(ranks, expected, strict=True)
        for name in weights
        if weights[name].shape == others[name].shape
    )


def problems(case, *, processes=False):
    """What is not as it must be, in words; and the largest difference to one process in fp32."""
    plain, found, worst = on_ranks(case, {}, processes), [], 0.0
    for mode, zero in (EXACT | BY_MICROBATCH).items():
        ranks = on_ranks(case, zero, processes)
        if mode in EXACT:
            same = all(
                losses == others and all(map(torch.equal, weights.values(), expected.values()))
                for (losses, weights), (others, expected) in zip(ranks, plain, strict=True)
            )
            if not same:
                found.append(f"{mode}: not the bits of stage 0, off by {largest_difference(ranks, plain):.1e}")
        elif case.precision == "fp32" and (off := largest_difference(ranks, plain)) > TOLERANCE:
            found.append(f"{mode}: {off:.1e} from stage 0")
        if case.precision == "fp32":
            worst = max(worst, largest_difference(ranks, [(None, alone())] * len(ranks)))
    if worst > TOLERANCE:
        found.append(f"{worst:.1e} from one process")
    return found, worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", action="store_true", help="gloo processes instead of ranks in this process")
    parser.add_argument("--only", default="", help="regular expression of the cases' names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed, start = [], time.monotonic()
    chosen = [case for case in cases() if re.search(options.only, str(case))]
    for number, case in enumerate(chosen, 1):
        found, worst = problems(case, processes=options.processes)
        failed += [case] if found else []
        away = f", at most {worst:.1e} from one process" if case.precision == "fp32" else ""
        print(f"{number:3} of {len(chosen)} {case!s:30} {'; '.join(found) or 'right'}{away}", flush=True)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} right in {time.monotonic() - start:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
