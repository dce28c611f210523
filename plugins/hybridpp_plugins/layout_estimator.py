"""What one layout of a model would take: the parts of the plugin that would run it, asked without running it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hybridpp.config import Precision
from hybridpp.errors import ConfigError
from hybridpp.estimate import (
    EstimateInput,
    Grid,
    JobSizes,
    LayoutEstimate,
    ModelRun,
    RankEstimate,
    RankState,
    ScheduleCosts,
    StageMemory,
    StageWork,
    StepTime,
    UnitTimes,
    roofline,
    stage_costs,
    stage_memory,
    step_peak,
    step_time,
    update_ms,
    with_sums,
)
from hybridpp.partition import recomputed_blocks
from hybridpp.simulate import PreparedPrograms, PreparedStep
from hybridpp_plugins.cut_model import CutModel, cut_model
from hybridpp_plugins.estimate_batch import BatchSource
from hybridpp_plugins.estimate_runs import EstimateRuns, RunKind
from hybridpp_plugins.quick_estimator import QuickEstimator, kernels_of
from hybridpp_plugins.rank_state import StateRules, rank_state
from hybridpp_plugins.schedule_costs import schedule_costs
from hybridpp_plugins.schedule_planner import SchedulePlanner
from hybridpp_plugins.settings import PluginSettings, parse_settings
from hybridpp_plugins.trained_weights import gathering_units, units_of

Parse = Callable[[Mapping[str, Any]], PluginSettings]


class PluginLayoutEstimator:
    """Estimates layouts of one model.

    Args:
        model: on any device; it is not changed.
        given: what is estimated.
        parse: makes the plugin's settings of its keywords.
    """

    def __init__(self, model: nn.Module, given: EstimateInput, parse: Parse):
        self.given = given
        self._parse = parse
        settings = parse(given.settings)
        self._runs = EstimateRuns(
            model,
            parallel=settings.parallel,
            precision=given.precision,
            batches=BatchSource(
                sequence_length=given.sequence_length,
                images=given.images,
                dims=settings.pipeline.batch_dims or 0,
                sample=given.sample,
                criterion=given.criterion,
            ),
            device="cpu" if given.device.is_cpu else "cuda",
        )
        self._quick = QuickEstimator(self._runs, given, settings)

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return self._quick.num_blocks

    @property
    def notes(self) -> tuple[str, ...]:
        """See :class:`~hybridpp.estimate.LayoutEstimator`."""
        return self._runs.notes

    def estimate(self, sizes: JobSizes, settings: Mapping[str, Any]) -> LayoutEstimate:
        """See :class:`~hybridpp.estimate.LayoutEstimator`."""
        parsed = self._settings(settings, sizes)
        parallel, num_replicas = parsed.parallel, parsed.parallel.dp_size(sizes.world_size)
        zero = parsed.zero.among(num_replicas)
        planner = SchedulePlanner(parsed.pipeline, parallel.pp_size, zero)
        cut = cut_model(self._runs, parsed, sizes.microbatch_size, len(planner.placement))
        kind = self._kind(parsed, cut, sizes.microbatch_size, planner.splits_backward)
        run = self._runs.run(kind, cut.traced.found.units)
        _check_order(run, cut)
        memories = self._memories(run, cut, planner.splits_backward)
        states = [
            _state(cut, planner.placement, position, self._rules(parsed, num_replicas))
            for position in range(parallel.pp_size)
        ]
        times, is_measured = self._times(kind, run)
        grid = Grid(tp_size=parallel.tp_size, pp_size=parallel.pp_size, num_replicas=num_replicas, zero=zero)
        return LayoutEstimate(
            sizes=sizes,
            settings={**self.given.settings, **settings},
            num_replicas=num_replicas,
            ranks=_ranks(planner, memories, states, sizes.num_microbatches),
            time=self._time(planner, times, _works(cut, memories), states, grid, sizes.num_microbatches),
            is_measured=is_measured,
        )

    def schedule_costs(self, sizes: JobSizes, settings: Mapping[str, Any], memory_bytes: int) -> ScheduleCosts:
        """See :class:`~hybridpp.estimate.LayoutEstimator`."""
        given = {name: value for name, value in settings.items() if name != "gradient_checkpoint_config"}
        parsed = self._settings(given, sizes)
        parallel, num_replicas = parsed.parallel, parsed.parallel.dp_size(sizes.world_size)
        zero, device = parsed.zero.among(num_replicas), self.given.device
        placed = SchedulePlanner(parsed.pipeline, parallel.pp_size, zero).placement
        cut = cut_model(self._runs, parsed, sizes.microbatch_size, len(placed))
        grid = Grid(tp_size=parallel.tp_size, pp_size=parallel.pp_size, num_replicas=num_replicas, zero=zero)
        plain, split = (self._kind(parsed, cut, sizes.microbatch_size, splits) for splits in (False, True))
        all_blocks = replace(plain, recomputed=frozenset(name for names in cut.blocks for name in names))
        costs, memories = [], []
        for kind in (plain, split, all_blocks):
            run = self._runs.run(kind, cut.traced.found.units)
            _check_order(run, cut)
            held = self._memories(run, cut, kind.splits)
            times, _ = self._times(kind, run)
            costs.append(stage_costs(times, _works(cut, held), placed, device, grid))
            memories.append(held)
        rules = self._rules(parsed, num_replicas)
        states = [_state(cut, placed, position, rules) for position in range(parallel.pp_size)]
        left = [memory_bytes - state.total for state in states]
        return schedule_costs(costs, memories, placed, left, [len(names) for names in cut.blocks])

    def measure_times(self, sizes: JobSizes, settings: Mapping[str, Any], where: torch.device) -> UnitTimes:
        """See :class:`~hybridpp.estimate.LayoutEstimator`."""
        parsed = self._settings(settings, sizes)
        planner = SchedulePlanner(parsed.pipeline, parsed.parallel.pp_size)
        cut = cut_model(self._runs, parsed, sizes.microbatch_size, len(planner.placement))
        kind = self._kind(parsed, cut, sizes.microbatch_size, planner.splits_backward)
        return self._runs.timed(kind, cut.traced.found.units, where)

    def bound_ms(self, sizes: JobSizes, settings: Mapping[str, Any]) -> float:
        """See :class:`~hybridpp.estimate.LayoutEstimator`."""
        return self._quick.bound_ms(sizes, settings)

    def least_bytes(self, sizes: JobSizes, settings: Mapping[str, Any]) -> int:
        """See :class:`~hybridpp.estimate.LayoutEstimator`."""
        return self._quick.least_bytes(sizes, settings)

    def quick_estimate(self, sizes: JobSizes, settings: Mapping[str, Any], memory_bytes: int) -> LayoutEstimate:
        """See :class:`~hybridpp.estimate.LayoutEstimator`."""
        return self._quick.estimate(sizes, settings, memory_bytes)

    def _settings(self, settings: Mapping[str, Any], sizes: JobSizes) -> PluginSettings:
        keywords = {**self.given.settings, **settings, "num_microbatches": sizes.num_microbatches}
        keywords.pop("microbatch_size", None)
        return self._parse({**keywords, "precision": str(self.given.precision)})

    def _rules(self, parsed: PluginSettings, num_replicas: int) -> StateRules:
        return StateRules(
            has_masters=self.given.precision is not Precision.FP32,
            num_moments=self.given.num_moments,
            zero=parsed.zero.among(num_replicas),
            num_replicas=num_replicas,
            bucket_mib=parsed.optimizer.ddp_bucket_cap_mb,
            kernels=kernels_of(self.given, parsed),
        )

    def _kind(self, parsed: PluginSettings, cut: CutModel, microbatch_size: int, splits: bool) -> RunKind:
        recomputation = parsed.pipeline.recomputation
        if recomputation and recomputation.max_stored_microbatches:
            raise ConfigError(
                "an estimate counts every micro-batch as recomputed: got max_stored_microbatches="
                f"{recomputation.max_stored_microbatches}. Leave it out."
            )
        return RunKind(
            parsed.parallel.tp_size,
            parsed.parallel.enable_sequence_parallelism,
            microbatch_size,
            frozenset(name for names in recomputed_blocks(recomputation, cut.blocks) for name in names),
            splits,
        )

    def _memories(self, run: ModelRun, cut: CutModel, splits: bool) -> tuple[StageMemory, ...]:
        blocks = set(cut.traced.found.blocks)
        last_block = max((index for index, call in enumerate(run.calls) if call.name in blocks), default=0)
        return tuple(stage_memory(run, plan, last_block, splits) for plan in cut.plans)

    def _measured(self, kind: RunKind) -> UnitTimes | None:
        key = self._runs.key_of(kind)
        return next((times for times in self.given.device.measured if times.key == key), None)

    def _times(self, kind: RunKind, run: ModelRun) -> tuple[UnitTimes, bool]:
        """Times of the run's units, and whether they were measured."""
        device, measured = self.given.device, self._measured(kind)
        if measured is None:
            return roofline(run, device, kind.tp_size), False
        return with_sums(measured, run, device, kind.tp_size), True

    def _time(
        self,
        planner: SchedulePlanner,
        times: UnitTimes,
        works: tuple[StageWork, ...],
        states: list[RankState],
        grid: Grid,
        num_microbatches: int,
    ) -> StepTime:
        device, placed = self.given.device, planner.placement
        updates = [
            update_ms(
                state.gradients // grid.zero.num_shards(grid.num_replicas) + state.masters + state.moments,
                [work for work, at in zip(works, placed, strict=True) if at == position],
                device,
                grid,
            )
            for position, state in enumerate(states)
        ]
        costs = stage_costs(times, works, placed, device, grid)
        step = PreparedStep(
            lambda number: PreparedPrograms(planner.compute_programs(number)),
            grid.pp_size,
            num_microbatches,
            repeats=planner.is_known,
        )
        return step_time(step, costs, max(updates), device, grid)


def _check_order(run: ModelRun, cut: CutModel) -> None:
    traced = [call.name for call in cut.traced.found.trace.calls]
    if len(cut.plans) > 1 and [call.name for call in run.calls] != traced:
        raise ConfigError(
            "the model calls its units in another order when it is traced than when it runs, so its stages cannot be "
            "estimated. Use pp_size=1."
        )


def _ranks(
    planner: SchedulePlanner, memories: tuple[StageMemory, ...], states: list[RankState], num_microbatches: int
) -> tuple[RankEstimate, ...]:
    programs = planner.programs(num_microbatches, True, num_microbatches)
    estimates = []
    for position, (program, state) in enumerate(zip(programs, states, strict=True)):
        own = tuple(stage for stage, at in enumerate(planner.placement) if at == position)
        peak = step_peak(program.actions, program.completed_sends, {stage: memories[stage] for stage in own})
        estimates.append(RankEstimate(position, own, state, peak))
    return tuple(estimates)


def _works(cut: CutModel, memories: tuple[StageMemory, ...]) -> tuple[StageWork, ...]:
    works = []
    for stage, (window, memory) in enumerate(zip(cut.windows, memories, strict=True)):
        held = [one for name, one in cut.traced.parameters.items() if stage in cut.owners[name] and one.is_trained]
        gradients = sum(one.meta.numel() * max(one.meta.dtype.itemsize, 4) for one in held)
        weights = sum(one.meta.nbytes for one in held)
        works.append(
            StageWork(first=window[0], last=window[1], sent=memory.outgoing, gradients=gradients, weights=weights)
        )
    return tuple(works)


def _state(cut: CutModel, placement: tuple[int, ...], position: int, rules: StateRules) -> RankState:
    own = {stage for stage, at in enumerate(placement) if at == position}
    at = {name: tuple(stage for stage in stages if stage in own) for name, stages in cut.owners.items()}
    held = {name: cut.traced.parameters[name] for name, stages in at.items() if stages}
    shared = {
        name for name in held if held[name].is_summed or len({placement[stage] for stage in cut.owners[name]}) > 1
    }
    units = None
    if rules.zero.zero_stage == 3 and len(placement) == 1:
        units = units_of(cut.traced.model, gathering_units(cut.traced.model))
    state = rank_state(held, {name: at[name] for name in held}, shared, rules, units)
    return replace(state, buffers=state.buffers + cut.traced.buffer_bytes)


def settings_parser(constructor: Callable[..., Any]) -> Parse:
    """What makes settings of a plugin's keywords, without a job.

    Args:
        constructor: of the plugin.
    """
    parameters = inspect.signature(constructor).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}

    def parse(keywords: Mapping[str, Any]) -> PluginSettings:
        own = {name: value for name, value in keywords.items() if name in defaults}
        others = {name: value for name, value in keywords.items() if name not in defaults}
        return parse_settings({**defaults, **own}, others)

    return parse
