"""Search for the layouts of a job with the shortest step that fit the devices' memory."""

import gc
import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, TypeAlias

from hybridpp.errors import ConfigError, HybridppError, shown, some_of
from hybridpp.estimate.comparison import SAME_TIME
from hybridpp.estimate.layout_estimate import JobSizes, LayoutEstimate, LayoutEstimator
from hybridpp.schedule import SCHEDULES

_LARGEST_MICROBATCH = 16
# All divisors of these numbers are looked at.
_MOST = 2**32
# Of layouts that are too large by themselves, so many are estimated to name the nearest.
_NUM_NEAREST = 12
# The share of a rank's memory below which two layouts do not differ to who reads a table.
_SAME_SIZE = 5e-3

_Kept: TypeAlias = tuple[float, tuple[Any, ...], int, LayoutEstimate]
"""The time of a step, what decides between equal ones, the candidate's number and its estimate."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What is searched.

    Attributes:
        num_devices: ranks of the job.
        memory_bytes: of a device that a rank may use.
        global_batch: samples of a step.
        schedules: names of pipeline schedules.
        tp_sizes, pp_sizes, microbatch_sizes, zero_stages: that are allowed; None: all that go together.
        recomputes: whether blocks are recomputed: not, or all.
        num_kept: how many layouts are returned.
    """

    num_devices: int
    memory_bytes: int
    global_batch: int
    schedules: Sequence[str] = ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "v-min")
    tp_sizes: Sequence[int] | None = None
    pp_sizes: Sequence[int] | None = None
    microbatch_sizes: Sequence[int] | None = None
    zero_stages: Sequence[int] = (0, 1, 2, 3)
    recomputes: Sequence[bool] = (False, True)
    num_kept: int = 10

    def __post_init__(self) -> None:
        for name in ("num_devices", "global_batch", "memory_bytes", "num_kept"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1: got {getattr(self, name)}.")
        for name in ("num_devices", "global_batch"):
            if getattr(self, name) > _MOST:
                raise ConfigError(f"{name} must be at most {_MOST}: got {getattr(self, name)}.")
        unknown = [name for name in self.schedules if name not in SCHEDULES]
        if unknown:
            raise ConfigError(f"unknown schedule {shown(unknown[0])}: the schedules are {', '.join(SCHEDULES)}.")


@dataclass(frozen=True)
class Candidate:
    """A layout that may be the best one."""

    sizes: JobSizes
    settings: Mapping[str, Any]

    @property
    def order(self) -> tuple[Any, ...]:
        """Of two that take as long, the simpler one comes first."""
        given = self.settings
        return (
            given["tp_size"] * given["pp_size"],
            given["tp_size"],
            given.get("zero_stage", 0),
            "gradient_checkpoint_config" in given,
            str(given.get("schedule", "")),
            self.sizes.microbatch_size,
        )


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        best: the layouts that fit, the fastest first. Of those that differ only in ZeRO's stage or the schedule, and
            take as long, the simplest is there, and names those that hold no less (``alike``).
        num_candidates: layouts of the space.
        num_estimated: of which so many had to be estimated.
        num_too_large: of these, so many did not fit.
        least: of those that do not fit, the one that needs least; None: all fit.
    """

    best: tuple[LayoutEstimate, ...]
    num_candidates: int
    num_estimated: int
    num_too_large: int
    least: LayoutEstimate | None


def search(estimator: LayoutEstimator, space: SearchSpace) -> SearchResult:
    """The fastest layouts.

    Every layout of the space has a bound that its time cannot go below: what its busiest rank computes. Layouts are
    estimated in the order of these bounds, until no bound is below the time of the last that is kept. So the result is
    that of estimating all of them.

    Args:
        estimator: of the model.
        space: the layouts.

    Raises:
        ConfigError: no layout fits; with the one that needs least.
    """
    # Collections of cycles need not look at modules and the model again and again.
    gc.freeze()
    try:
        return _search(estimator, space)
    finally:
        gc.unfreeze()


def _search(estimator: LayoutEstimator, space: SearchSpace) -> SearchResult:
    candidates = list(_candidates(estimator, space))
    if not candidates:
        raise ConfigError(_no_candidate(estimator, space))
    bounded: list[tuple[float, tuple[Any, ...], int]] = []
    reasons: dict[str, int] = {}
    refused: list[tuple[int, int]] = []
    num_estimated = num_too_large = 0
    for number, candidate in enumerate(candidates):
        try:
            held = estimator.least_bytes(candidate.sizes, candidate.settings)
            if held > space.memory_bytes:
                num_too_large += 1
                refused.append((held, number))
                continue
            bounded.append((estimator.bound_ms(candidate.sizes, candidate.settings), candidate.order, number))
        except HybridppError as error:
            reasons[str(error)] = reasons.get(str(error), 0) + 1
    gc.freeze()  # also traces and ranks that were made for the bounds
    heapq.heapify(bounded)
    kept: list[_Kept] = []
    least: LayoutEstimate | None = None
    while bounded:
        bound, order, number = heapq.heappop(bounded)
        if len(kept) == space.num_kept and bound > kept[-1][0]:
            break
        candidate = candidates[number]
        try:
            estimate = estimator.quick_estimate(candidate.sizes, candidate.settings, space.memory_bytes)
        except HybridppError as error:
            reasons[str(error)] = reasons.get(str(error), 0) + 1
            continue
        num_estimated += 1
        if estimate.worst.total > space.memory_bytes:
            num_too_large += 1
            if least is None or estimate.worst.total < least.worst.total:
                least = estimate
            continue
        _keep(kept, (estimate.time.step_ms, order, number, estimate))
        del kept[space.num_kept :]
    if not kept:
        nearest = _nearest(estimator, space, candidates, refused)
        least = min((one for one in (least, nearest) if one), key=lambda one: one.worst.total, default=None)
        raise ConfigError(_nothing_fits(space, least, reasons))
    return SearchResult(tuple(one[3] for one in kept), len(candidates), num_estimated, num_too_large, least)


def _keep(kept: list[_Kept], new: _Kept) -> None:
    """Add a layout to those that are kept, or to one of them that nobody would choose it before."""
    for index, old in enumerate(kept):
        for first, second in ((old, new), (new, old)):
            if first[1:3] <= second[1:3] and _is_as_good(first[3], second[3]):
                others = (*first[3].alike, second[3].settings, *second[3].alike)
                kept[index] = (*first[:3], replace(first[3], alike=others))
                kept.sort(key=lambda one: one[:3])
                return
    kept.append(new)
    kept.sort(key=lambda one: one[:3])


def _is_as_good(one: LayoutEstimate, other: LayoutEstimate) -> bool:
    """Whether a layout takes as long as another one of its shape, and holds no more."""

    def shape(estimate: LayoutEstimate) -> tuple[Any, ...]:
        given = {name: value for name, value in estimate.settings.items() if name not in ("zero_stage", "schedule")}
        return estimate.sizes, given

    times = one.time.step_ms, other.time.step_ms
    is_as_fast = abs(times[0] - times[1]) <= SAME_TIME * max(times)
    return is_as_fast and one.worst.total <= (1 + _SAME_SIZE) * other.worst.total and shape(one) == shape(other)


def _nearest(
    estimator: LayoutEstimator, space: SearchSpace, candidates: Sequence[Candidate], refused: list[tuple[int, int]]
) -> LayoutEstimate | None:
    """Of layouts whose weights and states alone are too large, the one that needs least: among the likeliest."""

    def likely(one: tuple[int, int]) -> tuple[Any, ...]:
        candidate = candidates[one[1]]
        recomputes = "gradient_checkpoint_config" in candidate.settings
        return one[0], candidate.sizes.microbatch_size, not recomputes, -candidate.settings["tp_size"]

    chosen = [candidates[number] for _, number in sorted(refused, key=likely)[:_NUM_NEAREST]]
    estimates = []
    for one in chosen:
        with suppress(HybridppError):  # of micro-batches on which the model does not run
            estimates.append(estimator.quick_estimate(one.sizes, one.settings, space.memory_bytes))
    return min(estimates, key=lambda one: one.worst.total, default=None)


def _candidates(estimator: LayoutEstimator, space: SearchSpace) -> Iterator[Candidate]:
    device, num_blocks = estimator.given.device, estimator.num_blocks
    for tp_size in _divisors(space.num_devices):
        # Sums over tensor-parallel ranks are in the middle of each layer: they stay in a host.
        if tp_size > device.devices_per_host or tp_size & (tp_size - 1):
            continue
        if space.tp_sizes is not None and tp_size not in space.tp_sizes:
            continue
        for pp_size in _divisors(space.num_devices // tp_size):
            if pp_size > num_blocks or (space.pp_sizes is not None and pp_size not in space.pp_sizes):
                continue
            num_replicas = space.num_devices // (tp_size * pp_size)
            if space.global_batch % num_replicas == 0:
                yield from _with_batches(space, tp_size, pp_size, num_replicas, num_blocks)


def _with_batches(
    space: SearchSpace, tp_size: int, pp_size: int, num_replicas: int, num_blocks: int
) -> Iterator[Candidate]:
    share = space.global_batch // num_replicas
    for size in _divisors(share):
        if space.microbatch_sizes is None and (size > _LARGEST_MICROBATCH or size & (size - 1)):
            continue
        if space.microbatch_sizes is not None and size not in space.microbatch_sizes:
            continue
        sizes = JobSizes(world_size=space.num_devices, microbatch_size=size, num_microbatches=share // size)
        for more in _settings(space, pp_size, num_replicas, sizes.num_microbatches, num_blocks):
            yield Candidate(sizes, {"tp_size": tp_size, "pp_size": pp_size, **more})


def _settings(
    space: SearchSpace, pp_size: int, num_replicas: int, num_microbatches: int, num_blocks: int
) -> Iterator[dict[str, Any]]:
    for schedule in space.schedules if pp_size > 1 else (None,):
        entry = None if schedule is None else SCHEDULES[schedule]
        chunks = 1 if entry is None else entry.num_chunks
        if pp_size * chunks > num_blocks or (schedule == "interleaved" and num_microbatches % pp_size):
            continue
        for zero_stage in space.zero_stages:
            # One replica divides nothing; stages 2 and 3 reduce and gather for each micro-batch.
            if zero_stage and num_replicas == 1:
                continue
            for recomputes in space.recomputes:
                settings: dict[str, Any] = {}
                if schedule is not None:
                    settings["schedule"] = schedule
                if zero_stage:
                    settings["zero_stage"] = zero_stage
                if recomputes:
                    settings["gradient_checkpoint_config"] = {}
                yield settings


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _no_candidate(estimator: LayoutEstimator, space: SearchSpace) -> str:
    """Why there is no layout to estimate: which of the sizes that are allowed leaves none."""
    devices, batch = space.num_devices, space.global_batch
    # With a batch that all replicas divide.
    any_batch = replace(space, global_batch=devices, microbatch_sizes=None, pp_sizes=None)
    for name, allowed, others in (
        ("tp_sizes", space.tp_sizes, replace(any_batch, tp_sizes=None)),
        ("pp_sizes", space.pp_sizes, any_batch),
    ):
        possible = {one.settings[f"{name[:2]}_size"] for one in _candidates(estimator, others)}
        if allowed is not None and not possible & set(allowed):
            return (
                f"no layout of {devices} devices has one of {name}={some_of(allowed)}: tensor-parallel ranks are a "
                "power of 2 in a host, stages are no more than blocks, and their product divides the number of "
                f"devices. {_use(sorted(possible))}"
            )
    possible = {one.sizes.microbatch_size for one in _candidates(estimator, replace(space, microbatch_sizes=None))}
    if possible and space.microbatch_sizes is not None:
        return (
            f"no share of a replica of {batch} samples is divided by one of "
            f"microbatch_sizes={some_of(space.microbatch_sizes)}. {_use(sorted(possible))}"
        )
    above = -(-batch // devices) * devices
    other_batch = f"a global batch of {above}, which any number of replicas divides, " if above != batch else ""
    return (
        f"no layout of {devices} devices divides a global batch of {batch} samples over its replicas within the sizes "
        f"that are allowed. Use {other_batch}another number of devices, or allow more sizes."
    )


def _use(numbers: Sequence[int]) -> str:
    if not numbers:
        return "Allow more sizes."
    return f"Use {numbers[0]}." if len(numbers) == 1 else f"Use {', '.join(map(str, numbers[:-1]))} or {numbers[-1]}."


def _nothing_fits(space: SearchSpace, least: LayoutEstimate | None, reasons: Mapping[str, int]) -> str:
    limit = _size(space.memory_bytes)
    if least is None:
        why = max(reasons, key=lambda reason: reasons[reason], default="")
        return f"no layout of {space.num_devices} devices is possible: {why}"
    needed = least.worst.total
    layout = ", ".join(f"{name}={value!r}" for name, value in least.settings.items())
    return (
        f"no layout of {space.num_devices} devices fits in {limit}: the nearest is {layout}, "
        f"microbatch_size={least.sizes.microbatch_size}, of which a rank needs {_size(needed)}, "
        f"{_size(needed - space.memory_bytes)} more. Use more devices, devices of more memory, a shorter "
        "sequence, or offload_optimizer."
    )


def _size(num_bytes: int) -> str:
    for unit, power in (("GiB", 3), ("MiB", 2)):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.2f} {unit}".replace(".00 ", " ")
    return f"{num_bytes / 1024:.1f} KiB".replace(".0 ", " ")
