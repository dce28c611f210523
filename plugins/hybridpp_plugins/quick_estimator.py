"""Estimates that cost milliseconds, for a search among thousands of layouts.

Micro-batches of more than two samples (or four) are not run but extrapolated (``scaled_run``), buckets have no padding,
messages are counted at their most, and of many micro-batches the last ones are continued by a line.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from hybridpp.config import PipelineConfig, Precision, ZeroConfig
from hybridpp.errors import ConfigError, HybridppError, PartitionError
from hybridpp.estimate import (
    BASES,
    LARGER_BASES,
    EstimateInput,
    Grid,
    JobSizes,
    LayoutEstimate,
    ModelRun,
    ProgramPeak,
    RankEstimate,
    RankState,
    ScaledRuns,
    StageMemory,
    StageWork,
    StepPeak,
    StepTime,
    UnitTimes,
    rank_ends,
    roofline,
    stage_costs,
    stage_memory,
    step_time,
    update_ms,
    with_sums,
)
from hybridpp.optim import AdamKernels, adam_kernels, adam_update_bytes
from hybridpp.simulate import Costs, PreparedPrograms, PreparedStep, StepEnds
from hybridpp_plugins.cut_model import CutModel, cut_model
from hybridpp_plugins.estimate_runs import EstimateRuns, RunKind
from hybridpp_plugins.schedule_planner import SchedulePlanner
from hybridpp_plugins.settings import PluginSettings

_FP32 = 4
# States per weight.
_ADAMS = 2
# Messages of each kind that are received ahead, and sent and not freed yet.
_MESSAGES = 2
# Buckets of gradients that are open, and stages or units whose weights are gathered, at a time.
_OPEN_BUCKETS = 3


# Passes that are split run somewhat other operators than those that the bound is made of.
_BOUND_SHARE = 0.95


class _Sums(NamedTuple):
    """Of a stage's parameters: elements that are trained, bytes of these and of the others; fp32 bytes of each."""

    elements: int
    trained_bytes: int
    frozen_bytes: int
    updated: tuple[int, ...]

    def with_stage(self, other: "_Sums") -> "_Sums":
        """Of two stages."""
        return _Sums(
            self.elements + other.elements,
            self.trained_bytes + other.trained_bytes,
            self.frozen_bytes + other.frozen_bytes,
            self.updated + other.updated,
        )


@dataclass(frozen=True)
class _Key:
    """What several layouts have in common."""

    tp_size: int
    pp_size: int
    schedule: str | None
    recomputes: bool
    microbatch_size: int


class QuickEstimator:
    """Quick estimates of one model.

    Args:
        runs: of the model.
        given: what is estimated.
        settings: of the plugin, without those that differ between layouts.
    """

    def __init__(self, runs: EstimateRuns, given: EstimateInput, settings: PluginSettings):
        self._runs, self._given, self._settings = runs, given, settings
        self._planner = cache(self._make_planner)
        self._programs = cache(self._make_programs)
        self._step = cache(self._make_step)
        self._ends = cache(self._make_ends)
        self._cut = cache(self._make_cut)
        self._sums = cache(self._make_sums)
        self._position_sums = cache(self._make_position_sums)
        self._updates = cache(self._make_updates)
        self._run = cache(self._make_run)
        self._scaled = cache(self._make_scaled)
        self._times = cache(self._make_times)
        self._memories = cache(self._make_memories)
        self._works = cache(self._make_works)
        self._program_peaks = cache(self._make_program_peaks)
        self._peaks = cache(self._make_peaks)

    def bound_ms(self, sizes: JobSizes, settings: Mapping[str, Any]) -> float:
        """What the busiest rank computes: no step is shorter.

        Blocks run again up to the last tensor that the backward pass needs, so half of their forward is counted.
        """
        key = _key(sizes, settings)
        times = self._simple_times(replace(key, recomputes=False))
        blocks = set(self._cut(key.tp_size, 1).blocks[0]) if key.recomputes else set()
        placement = self._planner(key.schedule, key.pp_size).placement
        busy = [0.0] * key.pp_size
        for (first, last), rank in zip(self._cut(key.tp_size, len(placement)).windows, placement, strict=True):
            busy[rank] += times.forward(first, last) + times.backward(first, last)
            if blocks:
                busy[rank] += times.within(first, last, blocks) / 2
        bound = _BOUND_SHARE * 1e3 * sizes.num_microbatches * max(busy)
        if self._given.device.cores is not None:
            in_all = sum(busy) * sizes.world_size / key.pp_size
            bound = max(bound, _BOUND_SHARE * 1e3 * sizes.num_microbatches * in_all / self._given.device.cores)
        return bound

    def least_bytes(self, sizes: JobSizes, settings: Mapping[str, Any]) -> int:
        """What the worst rank holds all through training."""
        key = _key(sizes, settings)
        grid = _grid(sizes, settings)
        return max(self._state(key, position, grid).total for position in range(key.pp_size))

    def estimate(self, sizes: JobSizes, settings: Mapping[str, Any], memory_bytes: int) -> LayoutEstimate:
        """See :class:`~hybridpp.estimate.LayoutEstimator`."""
        key = _key(sizes, settings)
        grid = _grid(sizes, settings)
        planner = self._planner(key.schedule, key.pp_size)
        peaks = self._peaks(key, sizes.num_microbatches)
        states = [self._state(key, position, grid) for position in range(key.pp_size)]
        ranks = tuple(
            RankEstimate(position, tuple(s for s, at in enumerate(planner.placement) if at == position), state, peak)
            for position, (state, peak) in enumerate(zip(states, peaks, strict=True))
        )
        fits = max(rank.total for rank in ranks) <= memory_bytes
        return LayoutEstimate(
            sizes=sizes,
            settings={**self._given.settings, **settings},
            num_replicas=grid.num_replicas,
            ranks=ranks,
            time=self._time(key, sizes, states, grid) if fits else _NO_TIME,
            is_measured=self._measured(self._kind(key, planner.splits_backward)) is not None,
        )

    def _time(self, key: _Key, sizes: JobSizes, states: list[RankState], grid: Grid) -> StepTime:
        device, planner = self._given.device, self._planner(key.schedule, key.pp_size)
        works = self._works(key)
        shards = grid.zero.num_shards(grid.num_replicas)
        # Of replicas that divide nothing, each updates all.
        updates = [
            update_ms(
                state.gradients // (shards if grid.zero.zero_stage == 1 else 1) + state.masters + state.moments,
                [work for work, at in zip(works, planner.placement, strict=True) if at == position],
                device,
                grid,
            )
            for position, state in enumerate(states)
        ]
        times = self._times(self._kind(key, planner.splits_backward))
        costs = stage_costs(times, works, planner.placement, device, grid)
        step = self._step(key.schedule, key.pp_size, sizes.num_microbatches)
        # What replicas divide among themselves changes only the reductions: ranks are simulated once for all.
        ends = self._ends(step, replace(costs, reduce_ms=0.0), replace(grid, zero=ZeroConfig()))
        return step_time(step, costs, max(updates), device, grid, ends)

    def _make_ends(self, step: PreparedStep, costs: Costs, grid: Grid) -> StepEnds:
        return rank_ends(step, costs, self._given.device, grid)

    def _make_planner(self, schedule: str | None, pp_size: int) -> SchedulePlanner:
        return SchedulePlanner(PipelineConfig(schedule=schedule, num_microbatches=2 * pp_size), pp_size)

    def _make_programs(self, schedule: str | None, pp_size: int, num_microbatches: int) -> PreparedPrograms:
        return PreparedPrograms(self._planner(schedule, pp_size).compute_programs(num_microbatches))

    def _make_step(self, schedule: str | None, pp_size: int, num_microbatches: int) -> PreparedStep:
        return PreparedStep(lambda number: self._programs(schedule, pp_size, number), pp_size, num_microbatches)

    def _parallel(self, tp_size: int, pp_size: int = 1) -> PluginSettings:
        parallel = self._settings.parallel
        shards = parallel.enable_sequence_parallelism and tp_size > 1
        changed = replace(
            parallel,
            tp_size=tp_size,
            pp_size=pp_size,
            enable_sequence_parallelism=shards,
            sequence_parallelism_mode=None,
        )
        return self._settings._replace(parallel=changed)

    def _make_cut(self, tp_size: int, num_stages: int) -> CutModel:
        # All numbers of stages up to that of the blocks have the same units.
        samples, stages = self._traced_as
        return cut_model(self._runs, self._parallel(tp_size), samples, num_stages, traced_for=stages)

    def _make_sums(self, tp_size: int, num_stages: int) -> tuple[_Sums, ...]:
        cut = self._cut(tp_size, num_stages)
        sums = [[0, 0, 0] for _ in range(num_stages)]
        updated: list[list[int]] = [[] for _ in range(num_stages)]
        for name, one in cut.traced.parameters.items():
            for stage in cut.owners[name]:
                if one.is_trained:
                    sums[stage][0] += one.meta.numel()
                    sums[stage][1] += one.meta.nbytes
                    updated[stage].append(_FP32 * one.meta.numel())
                else:
                    sums[stage][2] += one.meta.nbytes
        return tuple(
            _Sums(elements, trained, frozen, tuple(sizes))
            for (elements, trained, frozen), sizes in zip(sums, updated, strict=True)
        )

    def _make_position_sums(self, tp_size: int, pp_size: int, schedule: str | None) -> tuple[_Sums, ...]:
        """Of all stages at each place of the pipeline."""
        placement = self._planner(schedule, pp_size).placement
        found = [_Sums(0, 0, 0, ()) for _ in range(pp_size)]
        for one, position in zip(self._sums(tp_size, len(placement)), placement, strict=True):
            found[position] = found[position].with_stage(one)
        return tuple(found)

    def _make_updates(self, tp_size: int, pp_size: int, schedule: str | None, shards: int) -> tuple[int, ...]:
        """Temporary bytes of the update at each place of the pipeline, at most."""
        kernels = kernels_of(self._given, self._settings)
        found = []
        for one in self._position_sums(tp_size, pp_size, schedule):
            # Of a bucket, a replica has one segment, in which the loop may meet a whole tensor.
            segment = min(self._bucket_bytes, sum(one.updated)) // shards if kernels == "loop" else 0
            pieces = [min(size, max(segment, size // shards)) for size in one.updated]
            found.append(adam_update_bytes(pieces, kernels))
        return tuple(found)

    @property
    def _bucket_bytes(self) -> int:
        return int(self._settings.optimizer.ddp_bucket_cap_mb * 2**20)

    def _kind(self, key: _Key, splits: bool) -> RunKind:
        parsed = self._parallel(key.tp_size)
        blocks = frozenset(self._cut(key.tp_size, 1).blocks[0])
        shards = parsed.parallel.enable_sequence_parallelism
        recomputed = blocks if key.recomputes else frozenset()
        return RunKind(key.tp_size, shards, key.microbatch_size, recomputed, splits, blocks)

    def _make_run(self, kind: RunKind) -> ModelRun | None:
        """The run; None: it is larger than those that are made, and does not follow from them."""
        size = kind.microbatch_size
        if size <= max(BASES):
            return self._made_run(kind)
        scaled = self._scaled_for(kind)
        return self._made_run(kind) if size in scaled.sizes or scaled.calls_differ else scaled.run(size)

    def _scaled_for(self, kind: RunKind) -> ScaledRuns:
        return self._scaled(replace(kind, microbatch_size=1))

    def _make_scaled(self, kind: RunKind) -> ScaledRuns:
        with suppress(ConfigError):  # of a model, or a loss, that takes no single sample
            few, more = map(self._made_run, _of_sizes(kind, BASES))
            scaled = ScaledRuns(few, more)
            if scaled.are_alike or scaled.has_loop:
                return scaled
        few, more = map(self._made_run, _of_sizes(kind, LARGER_BASES))
        return ScaledRuns(few, more, LARGER_BASES)

    def _made_run(self, kind: RunKind) -> ModelRun:
        units = self._runs.traced(kind.tp_size, kind.shards_sequences, *self._traced_as).found.units
        return self._runs.run(kind, units, settled=False)

    def _measured(self, kind: RunKind) -> UnitTimes | None:
        measured = self._given.device.measured
        key = self._runs.key_of(kind) if measured else ""
        return next((times for times in measured if times.key == key), None)

    def _make_times(self, kind: RunKind) -> UnitTimes:
        device, run = self._given.device, self._run(kind)
        if (measured := self._measured(kind)) is not None:
            return with_sums(measured, run or self._made_run(kind), device, kind.tp_size)
        if run is None:
            scaled = self._scaled_for(kind)
            few, more = map(self._times, _of_sizes(kind, scaled.sizes))
            return scaled.times(few, more, kind.microbatch_size)
        return roofline(run, device, kind.tp_size)

    def _simple_times(self, key: _Key) -> UnitTimes:
        """Times of passes that are not split, without sums where they were measured."""
        kind = self._kind(key, False)
        measured = self._measured(kind)
        return self._times(kind) if measured is None else measured

    def _make_memories(self, kind: RunKind, num_stages: int) -> tuple[StageMemory, ...]:
        cut, run = self._cut(kind.tp_size, num_stages), self._run(kind)
        if run is None:
            scaled = self._scaled_for(kind)
            few, more = (self._memories(base, num_stages) for base in _of_sizes(kind, scaled.sizes))
            return scaled.memories(few, more, kind.microbatch_size)
        blocks = set(cut.traced.found.blocks)
        last_block = max((index for index, call in enumerate(run.calls) if call.name in blocks), default=0)
        size = kind.microbatch_size / self._traced_as[0]
        return tuple(stage_memory(run, plan, last_block, kind.splits, times_larger=size) for plan in cut.plans)

    def _make_works(self, key: _Key) -> tuple[StageWork, ...]:
        planner = self._planner(key.schedule, key.pp_size)
        num_stages = len(planner.placement)
        windows, sums = self._cut(key.tp_size, num_stages).windows, self._sums(key.tp_size, num_stages)
        memories = self._memories(self._kind(key, planner.splits_backward), num_stages)
        return tuple(
            StageWork(
                first=first,
                last=last,
                sent=memory.outgoing,
                gradients=_FP32 * of_stage.elements,
                weights=of_stage.trained_bytes,
            )
            for (first, last), memory, of_stage in zip(windows, memories, sums, strict=True)
        )

    def _make_peaks(self, key: _Key, num_microbatches: int) -> tuple[StepPeak, ...]:
        planner = self._planner(key.schedule, key.pp_size)
        memories = self._memories(self._kind(key, planner.splits_backward), len(planner.placement))
        peaks = []
        for position, program in enumerate(self._program_peaks(key.schedule, key.pp_size, num_microbatches)):
            own = [memories[stage] for stage, at in enumerate(planner.placement) if at == position]
            messages = _MESSAGES * sum(m.incoming + m.outgoing_gradients + m.incoming_gradients for m in own)
            peaks.append(replace(program.of(memories), messages=messages))
        return tuple(peaks)

    def _make_program_peaks(self, schedule: str | None, pp_size: int, num_microbatches: int) -> tuple[ProgramPeak, ...]:
        step = self._step(schedule, pp_size, num_microbatches)
        programs = step.programs
        if step.holds_more:
            programs = self._programs(schedule, pp_size, num_microbatches).programs
        return tuple(map(ProgramPeak, programs))

    def _state(self, key: _Key, position: int, grid: Grid) -> RankState:
        elements, weights, frozen, _ = self._position_sums(key.tp_size, key.pp_size, key.schedule)[position]
        zero, shards = grid.zero, grid.zero.num_shards(grid.num_replicas)
        update = self._updates(key.tp_size, key.pp_size, key.schedule, shards)[position]
        stage = zero.zero_stage if grid.num_replicas > 1 else 0
        bucket = self._bucket_bytes
        buffers = 0
        if stage >= 2:
            buffers += min(_OPEN_BUCKETS * bucket, _FP32 * elements)
        if stage == 3:
            # Of a pipeline all weights of a stage, else those of two units.
            buffers += weights if key.pp_size > 1 else min(weights, 2 * bucket + 2 * weights // max(1, self.num_blocks))
        return RankState(
            weights=(weights + frozen) // (shards if stage == 3 else 1),
            gradients=_FP32 * elements // (shards if stage >= 2 else 1),
            masters=0 if self._given.precision is Precision.FP32 else _FP32 * elements // shards,
            moments=_FP32 * self._given.num_moments * elements // shards,
            buffers=buffers + self._cut(key.tp_size, 1).traced.buffer_bytes,
            update=max(0, update - buffers),
        )

    @cached_property
    def _traced_as(self) -> tuple[int, int]:
        """Samples and stages of a trace whose units are those of all others.

        One sample, or two for a model that does not run on one (statistics over samples); one stage, if it cannot be
        cut.
        """
        first: HybridppError | None = None
        for samples in BASES:
            try:
                self._runs.traced(1, False, samples, 2)
            except HybridppError as error:
                first = first or error
            else:
                return samples, 2
        if not isinstance(first, PartitionError):
            assert first is not None, "a trace has failed"
            raise first
        return min(BASES), 1

    @property
    def num_blocks(self) -> int:
        """Blocks of the model; 1, if it cannot be cut."""
        samples, stages = self._traced_as
        if stages == 1:
            return 1
        return max(1, len(self._runs.traced(1, False, samples, stages).found.blocks))


def kernels_of(given: EstimateInput, settings: PluginSettings) -> AdamKernels:
    """How the optimizer updates: SGD in place, as fused kernels do."""
    if given.num_moments < _ADAMS:
        return "fused"
    return adam_kernels("cpu" if given.device.is_cpu else "cuda", settings.optimizer.fuses_on)


def _key(sizes: JobSizes, settings: Mapping[str, Any]) -> _Key:
    return _Key(
        settings["tp_size"],
        settings["pp_size"],
        settings.get("schedule"),
        "gradient_checkpoint_config" in settings,
        sizes.microbatch_size,
    )


def _of_sizes(kind: RunKind, sizes: tuple[int, ...]) -> tuple[RunKind, ...]:
    return tuple(replace(kind, microbatch_size=size) for size in sizes)


def _grid(sizes: JobSizes, settings: Mapping[str, Any]) -> Grid:
    tp_size, pp_size = settings["tp_size"], settings["pp_size"]
    num_replicas = sizes.world_size // (tp_size * pp_size)
    zero = ZeroConfig(zero_stage=settings.get("zero_stage", 0)).among(num_replicas)
    return Grid(tp_size=tp_size, pp_size=pp_size, num_replicas=num_replicas, zero=zero)


_NO_TIME = StepTime(step_ms=0.0, passes_ms=0.0, update_ms=0.0, busy_ms=0.0, idle_share=0.0)
