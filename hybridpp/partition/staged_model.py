"""A model of which this rank runs a stage, or several."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.errors import PartitionError
from hybridpp.partition.attributes import Leavings
from hybridpp.partition.blocks import dissect, finest_units
from hybridpp.partition.calls import Trace
from hybridpp.partition.cut import CutPoint, assign_stages, check_uncut, choose_cut, named_blocks
from hybridpp.partition.dice import Dice, Recompute, Seen, inner_layers
from hybridpp.partition.intercept import Announcer, Forward, Interceptor
from hybridpp.partition.known_plans import KnownPlans, Plans
from hybridpp.partition.measure import measure_seconds, unit_costs
from hybridpp.partition.plan import StagePlan, owners, stage_plan, uses
from hybridpp.partition.recompute import Recomputable, blocks_by_stage, recomputed_blocks
from hybridpp.partition.replay import Replay
from hybridpp.partition.stage_run import Placeholders, StageDone, StageRun, Watcher
from hybridpp.partition.staging import Staging
from hybridpp.partition.strip import Slot, parameter_names, shown, strip
from hybridpp.partition.survey import Sample, survey_samples
from hybridpp.partition.trace import Tracer

CallRunner = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class StagedModel:
    """The user's own model, of which this rank owns and runs some stages.

    The model keeps its class, its module names and its forward. After construction, what other ranks' stages own is
    gone from ``named_parameters()`` and ``state_dict()``. With one stage nothing is cut and no sample is needed.

    Every rank of the pipeline must construct it from the same model and a sample of the same shapes: the cut is
    derived from them on each rank alike, and nothing is exchanged.

    Args:
        model: on ``device`` or on the meta device; it is changed in place.
        num_stages: stages of the pipeline.
        stages: this rank's: one, or several chunks.
        device: where it computes.
        samples: positional and keyword arguments of micro-batches; the model is cut by the first one that its forward
            runs on. With one stage they are not needed.
        staging: how it is cut, and what its stages run in.

    Attributes:
        model: the model.
        owners: the stages that hold each parameter, by its name; the same on every rank.
        around_call: runs calls of the whole model that the script makes itself; None: nothing is done about them.

    Raises:
        PartitionError: the model cannot be cut into ``num_stages``.
    """

    def __init__(
        self,
        model: nn.Module,
        num_stages: int,
        stages: Sequence[int],
        *,
        device: torch.device,
        samples: Sequence[Sample],
        staging: Staging | None = None,
    ):
        self.model = model
        self._staging = staging = staging or Staging()
        self.stages = tuple(stages)
        self.num_stages = num_stages
        self._device = device
        self._plans = KnownPlans()
        self._placeholders = Placeholders(device)
        self._tracer: Tracer | None = None
        self._cut: tuple[CutPoint, ...] = ()
        self._blocks: tuple[str, ...] = ()
        self._running = False
        self._watch: Watcher | None = None
        self.around_call: CallRunner | None = None
        self._leavings: list[Leavings] = []
        self._hollows: list[Slot] = []
        self._seen: dict[tuple[int, int], Seen] = {}
        self._replays: dict[tuple[int, int], Replay] = {}
        # The finer one first, so that it is the inner one where a module is both.
        self._dice = Interceptor(model, finest_units(model))
        self._dice_inside = Announcer(model, inner_layers(model, self._dice.units))
        self.owners: dict[str, tuple[int, ...]] = dict.fromkeys(parameter_names(model), (0,))
        if num_stages > 1:
            trace = self._choose_cut(samples)
            at = assign_stages(trace, self._cut)
            blocks = blocks_by_stage(trace.calls, at, self._blocks, num_stages)
            self.owners = owners(trace, at, tuple(self.owners))
            foreign = self._foreign_units(trace, at)
            self._hollows = strip(model, self.owners, self.stages, foreign, device, staging.dtypes)
        else:
            check_uncut(staging.partition)
            anatomy = dissect(model, 1)
            self._interceptor, blocks = Interceptor(model, anatomy.units), [list(anatomy.blocks)]
        self._recomputable = [
            Recomputable({name: model.get_submodule(name) for name in names})
            for names in recomputed_blocks(staging.recomputation, blocks)
        ]
        model.forward = functools.partial(self._guarded, model.forward)

    def _choose_cut(self, samples: Sequence[Sample]) -> Trace:
        model, device = self.model, self._device
        config, dtypes = self._staging.partition, self._staging.dtypes
        sample, found = survey_samples(
            model,
            self.num_stages,
            samples,
            self._prepare,
            self._dice,
            named=named_blocks(model, config),
            device=device,
            dtypes=dtypes,
            count_flops=config.balance == "flops",
        )
        self._interceptor, self._tracer, self._blocks = found.interceptor, found.tracer, found.anatomy.blocks

        def seconds() -> list[float]:
            # One rank's clock decides, or the ranks would cut in different places.
            return self._staging.agree(measure_seconds(model, found.interceptor, sample, device, dtypes))

        costs = unit_costs(model, found.trace, config.balance, seconds)
        self._cut = choose_cut(model, found.trace, found.anatomy.blocks, self.num_stages, config, costs)
        return found.trace

    def _foreign_units(self, trace: Trace, stages: tuple[int, ...]) -> set[str]:
        """Units that no stage of this rank calls; one that is never called belongs to stage 0, like its parameters."""
        called_at: dict[str, set[int]] = {unit: set() for unit in self._interceptor.units}
        for call, at in zip(trace.calls, stages, strict=True):
            called_at[call.name].add(at)
        return {unit for unit, at in called_at.items() if not (at or {0}) & set(self.stages)}

    def _guarded(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self._running and self.num_stages > 1:
            raise PartitionError(
                f"this rank holds stage {', '.join(map(str, self.stages))} of {self.num_stages} only, so the model "
                "cannot be called by itself. Call booster.execute_pipeline."
            )
        if not self._running:
            args, kwargs = self._cast(args), self._cast(kwargs)
            if self._watch is not None:
                with self._interceptor.active(functools.partial(_watched, self._watch)):
                    return forward(*args, **kwargs)
            if self.around_call is not None:
                return self.around_call(forward, args, kwargs)
        return forward(*args, **kwargs)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Inside, the model may be called although it holds only a stage."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def _cast(self, tree: Any) -> Any:
        """Floating-point inputs in the format the model computes in; None leaves them alone."""
        dtype = self._staging.compute_dtype
        if dtype is None:
            return tree
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)

    def plans(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plans:
        """What each of this rank's stages does for such inputs; a new signature is traced, a known one looked up.

        Raises:
            PartitionError: the forward takes another way than the one the model was cut by.
        """
        if self._tracer is None:
            return _WHOLE
        self._restore_attributes()
        tracer = self._tracer

        def make() -> Plans:
            with self._entered():
                trace = tracer.trace(*self._prepare(args, kwargs))
            stages = assign_stages(trace, self._cut)
            self._check_ownership(trace, stages)
            return {mine: stage_plan(trace, stages, mine, self._staging.parts) for mine in self.stages}

        return self._plans.find(args, kwargs, self.model.training, make)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sample:
        def move(leaf: Tensor) -> Tensor:
            # A copy: glue that writes to the model's inputs must not do so twice, once for the trace.
            return leaf.to(self._device, copy=True)

        with torch.inference_mode(False):
            moved = pytree.tree_map_only(Tensor, move, (args, kwargs))
            return self._cast(moved[0]), self._cast(moved[1])

    def _check_ownership(self, trace: Trace, stages: tuple[int, ...]) -> None:
        for name, needed in uses(trace, stages).items():
            missing = needed - set(self.owners[name])
            if missing:
                raise PartitionError(
                    f"for this input, stage {min(missing)} needs parameter {name!r}, which was given to stage "
                    f"{self.owners[name][0]} at boost. Boost with a sample that uses it there."
                )

    def _restore_attributes(self) -> None:
        """Forget what units of other stages left: it stays until here for a criterion that looks for it."""
        while self._leavings:
            self._leavings.pop().restore()

    def _stage_run(
        self, plan: StagePlan, received: Sequence[Tensor], dice: Dice, recomputable: Recomputable
    ) -> StageRun:
        modules = self._interceptor.modules
        run = StageRun(plan, received, self._placeholders, dice, recomputable, modules, self._staging.parts)
        run.watch = self._watch
        return run

    def forward(
        self,
        plan: StagePlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Sequence[Tensor],
        key: int,
        recompute: bool,
    ) -> tuple[list[Tensor], Any]:
        """Run the plan's stage on one micro-batch.

        Args:
            plan: one of :meth:`plans`, for these arguments.
            args: positional arguments of the model.
            kwargs: keyword arguments of the model.
            received: the values of ``plan.incoming``.
            key: of the micro-batch, for the random numbers.
            recompute: whether the blocks chosen for it keep their inputs only, and are run again in the backward pass.

        Returns:
            The values of ``plan.outgoing``, and on the last stage what the model returned (else None).
        """
        dice = Dice(key, self._device)
        recomputable = self._recomputable[plan.stage] if recompute else _NOTHING
        self._restore_attributes()
        run = self._stage_run(plan, received, dice, recomputable)
        # Of the run this alone: it holds activations.
        self._leavings = run.leavings
        try:
            with (
                self._entered(),
                shown(self._hollows),
                self._interceptor.hooks_inside(),
                self._interceptor.active(run),
                self._dice.active(dice),
                self._dice_inside.active(dice.before_layer),
            ):
                args, kwargs = self._cast(args), self._cast(kwargs)
                # A context of its own: leaving by an exception must not leave context variables set behind.
                result = copy_context().run(self.model, *args, **kwargs)
        except StageDone:
            return run.outgoing(), None
        finally:
            if torch.is_grad_enabled():
                self._seen[plan.stage, key] = dice.seen
                if run.again:
                    anew = self._stage_run(plan, received, dice, _NOTHING)
                    self._replays[plan.stage, key] = Replay(run.again, anew, self._device)
        if plan.last_local is not None:
            raise PartitionError(
                f"the forward ended before unit {plan.calls[plan.last_local].name!r}, the last of stage {plan.stage}: "
                "something on the way caught the exception that leaves it. Do not catch BaseException in the model."
            )
        return [], result

    @property
    def units(self) -> tuple[str, ...]:
        """What runs as a whole, by module name; here or on other stages."""
        return self._interceptor.units

    @contextmanager
    def watched(self, watch: Watcher) -> Iterator[None]:
        """Inside, this rank's own units are run through ``watch(name, forward, *args, **kwargs)``."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    @contextmanager
    def recomputing(self, stage: int, key: int) -> Iterator[None]:
        """Wrap a stage's backward pass: what activation checkpointing recomputes sees the forward's random numbers.

        And what units of other stages returned.
        """
        self._restore_attributes()
        replay = self._replays.pop((stage, key), None)
        recompute = Recompute(self._seen.pop((stage, key), None), key, self._device)
        with (
            self._staging.again(),
            self._dice.active(recompute),
            self._dice_inside.active(recompute.before_layer),
            self._interceptor.active(replay) if replay else nullcontext(),
        ):
            yield
        self._leavings = replay.leavings if replay else []
        self._restore_attributes()


def _watched(watch: Watcher, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return watch(name, forward, *args, **kwargs)


_WHOLE = {0: StagePlan()}
_NOTHING = Recomputable({})
