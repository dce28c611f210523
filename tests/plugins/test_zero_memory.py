"""What a replica holds between steps and at the peak of one, against the formulas of docs/memory.md."""

import gc
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from processes import run_ranks
from torch import nn

from hybridpp import Booster, HybridParallelPlugin
from hybridpp.data_parallel.accumulator import HiddenGradient
from hybridpp.estimate import AllocationLog

WIDTH, NUM_LAYERS = 300, 16
# At stage 3, where each layer has a bucket of its own, of which up to 2,048 elements per replica are padding.
WIDE, FEW = 900, 4


def alive_bytes():
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.device.type == "cpu"]
    tensors = [one for one in tensors if not isinstance(one, HiddenGradient)]  # it says a size, and has no memory
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def held(precision, zero_stage, offload, zero_size=None):
    """Bytes that training takes on this rank, and elements that it trains."""
    before = alive_bytes()
    settings = {"precision": precision, "zero_stage": zero_stage, "zero_size": zero_size}
    plugin = HybridParallelPlugin(offload_optimizer=offload, **settings)
    booster = Booster(plugin=plugin)
    width, num_layers = (WIDE, FEW) if zero_stage == 3 else (WIDTH, NUM_LAYERS)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(num_layers)])
    batch = torch.randn(2, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parts = booster.boost(model, optimizer, lambda outputs, inputs: outputs.float().square().mean(), sample=batch)
    del model, optimizer
    for _ in range(2):
        booster.execute_pipeline(iter([batch]), parts.model, parts.criterion, parts.optimizer)
        parts.optimizer.step()
    return alive_bytes() - before, sum(parameter.numel() for parameter in parts.model.parameters())


def formula(num_elements, precision, zero_stage, num_replicas, offload):
    """On the CPU, where what is offloaded lies in the same memory: of fp32 weights there are copies then."""
    shards = num_replicas if zero_stage else 1
    weights = (4 if precision == "fp32" else 2) / (num_replicas if zero_stage == 3 else 1)
    updated = (8 + 4 * offload if precision == "fp32" else 12) / shards
    return num_elements * (weights + updated + 4 / (num_replicas if zero_stage >= 2 else 1))


@pytest.mark.covering("precision zero_stage")
@pytest.mark.parametrize(
    ("num_replicas", "precision", "zero_stage", "offload"),
    [
        (2, "fp32", 0, 0.0),
        (2, "bf16", 0, 0.0),
        (2, "fp32", 1, 0.0),
        (4, "fp32", 1, 0.0),
        (2, "bf16", 1, 0.0),
        (4, "bf16", 1, 0.0),
        (4, "fp32", 2, 0.0),
        (2, "bf16", 2, 0.0),
        (4, "fp32", 3, 0.0),
        (2, "bf16", 3, 0.0),
        (2, "fp32", 3, 1.0),
        (2, "fp32", 1, 1.0),
        (2, "bf16", 1, 1.0),
    ],
)
def test_tensors_alive_between_steps_are_those_of_the_formula(num_replicas, precision, zero_stage, offload):
    for nbytes, num_elements in run_ranks(partial(held, precision, zero_stage, offload), num_replicas):
        expected = formula(num_elements, precision, zero_stage, num_replicas, offload)
        assert nbytes == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("precision", "zero_stage"), [("bf16", 1), ("fp32", 3)])
def test_sets_of_two_hold_what_two_replicas_do(precision, zero_stage):
    for nbytes, num_elements in run_ranks(partial(held, precision, zero_stage, 0.0, 2), 4):
        assert nbytes == pytest.approx(formula(num_elements, precision, zero_stage, 2, 0.0), rel=0.02)


class StepLog(AllocationLog):
    """Follows storages that are freed and allocated again, too."""

    @contextmanager
    def following_resizes(self):
        own = torch.UntypedStorage.resize_

        def resize(storage, size):
            self.resized(storage, size)
            return own(storage, size)

        torch.UntypedStorage.resize_ = resize
        try:
            yield self
        finally:
            torch.UntypedStorage.resize_ = own


# Each layer has a bucket, whose segment is too large for shared memory.
LARGE, NUM_LARGE = 1100, 4


def peaks(precision, zero_stage, fused):
    """The most bytes in passes and in an update, and the elements that are trained."""
    batch = torch.randn(2, LARGE)
    with StepLog() as log, log.following_resizes():
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(LARGE, LARGE) for _ in range(NUM_LARGE)])
        booster = Booster(plugin=HybridParallelPlugin(precision=precision, zero_stage=zero_stage, ddp_bucket_cap_mb=4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        parts = booster.boost(model, optimizer, lambda outputs, inputs: outputs.float().square().mean(), sample=batch)
        booster.init_model(parts.model)
        found = []
        for _ in range(2):
            for run in (
                lambda: booster.execute_pipeline(iter([batch]), parts.model, parts.criterion, parts.optimizer),
                parts.optimizer.step,
            ):
                gc.collect()
                log.peak = log.now
                run()
                found.append(log.peak)
    return *found[-2:], sum(parameter.numel() for parameter in parts.model.parameters())


@pytest.mark.parametrize(
    ("precision", "zero_stage", "fused"),
    [
        ("fp32", 0, False),
        ("fp32", 1, False),
        ("bf16", 1, True),
        ("fp32", 2, True),
        ("bf16", 2, False),
        ("fp32", 3, False),
    ],
)
def test_a_step_takes_no_more_than_the_formula_says(precision, zero_stage, fused):
    working = 4 if precision == "fp32" else 2
    largest, bucket = LARGE * LARGE, LARGE * LARGE + LARGE + 2 * 2048
    # The gradient that autograd has computed; of ZeRO, sums under way, open buckets, and gathered units.
    passes = working * largest + 4 * bucket / 2 * {0: 0, 1: 4, 2: 2, 3: 2}[zero_stage]
    passes += 12 * bucket * (zero_stage >= 2) + 3 * working * bucket * (zero_stage == 3)
    # Small segments, those in bf16 here, are received beside the weights, with a copy of the own one.
    received = (NUM_LARGE + 1) * bucket if precision == "bf16" and zero_stage else 0
    update = max(received, 0 if fused else 2 * 4 * largest)
    for in_passes, in_update, num_elements in run_ranks(partial(peaks, precision, zero_stage, fused), 2):
        state = formula(num_elements, precision, zero_stage, 2, 0.0)
        assert state + 0.5 * passes <= in_passes <= 1.02 * state + passes
        assert in_update <= 1.02 * state + update
