"""A model of which this rank runs a stage, or several."""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.errors import PartitionError
from hybridpp.module_adapter import AdapterLayer, Forward, ModuleAdapter
from hybridpp.nn.force_eager import EAGER, force_eager
from hybridpp.nn.part_reads import PartReadCheck
from hybridpp.nn.torch_private import buffers_of, forward_hooks_of, forward_pre_hooks_of, pytree
from hybridpp.partition.absent import ParameterVisibility, plain_again, refuse_absent
from hybridpp.partition.blocks import finest_units
from hybridpp.partition.call_options import CallOptions, GrowingPlans
from hybridpp.partition.calls import CallArguments
from hybridpp.partition.compiled import forbid_compile, refuse_compiled
from hybridpp.partition.containers import flatten, tensors_in
from hybridpp.partition.drawing_code import ConditionalDraws
from hybridpp.partition.drawing_parts import DrawingParts
from hybridpp.partition.hooks import run_once
from hybridpp.partition.intercept import ForwardListener, Interceptor
from hybridpp.partition.model_inputs import ModelInputs
from hybridpp.partition.module_outputs import AttributeDelta
from hybridpp.partition.placeholders import Placeholders
from hybridpp.partition.plan import StagePlan
from hybridpp.partition.plan_cache import PlanCache, Plans
from hybridpp.partition.recompute import Recomputable, recomputed_blocks, warn_of_cache
from hybridpp.partition.replay import Replay
from hybridpp.partition.resets import AttributeResetter
from hybridpp.partition.rng import RecomputeRng, RngTrace, UnitRng, inner_linear_layers
from hybridpp.partition.stage_assignment import cut_into_stages, one_stage
from hybridpp.partition.stage_run import StageDone, StageRun, Watcher
from hybridpp.partition.stage_states import StageStates
from hybridpp.partition.staging_options import StagingOptions
from hybridpp.partition.unit_gather import UnitGather

CallRunner = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class StageContext(NamedTuple):
    """What the backward pass of a stage needs of its forward, for one micro-batch.

    Attributes:
        key: of the micro-batch.
        rng_trace: which random numbers its units drew.
        replay: what units of other stages returned inside of activation checkpoints; None: there were none.
        was_eager: whether compiled code ran as it was written, as what is recomputed of it must, too.
    """

    key: int
    rng_trace: RngTrace
    replay: Replay | None
    was_eager: bool


class StagedModel:
    """The user's model, of which this rank owns and runs some stages.

    The model keeps its class, module names and forward. After construction, ``named_parameters()`` and ``state_dict()``
    do not contain what other ranks' stages own. With one stage nothing is cut and no sample is needed.

    Every rank of the pipeline must construct it from the same model and a sample of the same shapes: each rank derives
    the same cut from them, without communication.

    Args:
        adapter: of the model, which is on ``device`` or on the meta device; it is changed in place.
        num_stages: stages of the pipeline.
        stages: this rank's: one, or several chunks.
        device: where it computes.
        samples: positional and keyword arguments of micro-batches; the model is cut by the first one that its forward
            runs on. With one stage they are not needed.
        further: the same of other kinds, each with its alternatives; a stage holds what any kind uses there.
        staging: options of the cut and of the stages.

    Attributes:
        model: the model.
        owners: the stages that hold each parameter, by its name; the same on every rank.
        around_call: wraps the script's own calls of the complete model; None: they are not wrapped.
        around_stage: a context for the forward of a stage, of its number and arguments; None: not called.
        gather: gathers the weights of units; None: they are always there.
        part_reads: refuses code that reads parts of weights; None: this rank has none.
        options: of the model's calls, beside micro-batches; None: there are none.
        while_tracing: a context to trace in.

    Raises:
        PartitionError: the model cannot be cut into ``num_stages``.
    """

    def __init__(
        self,
        adapter: ModuleAdapter,
        num_stages: int,
        stages: Sequence[int],
        *,
        device: torch.device,
        samples: Sequence[CallArguments],
        further: Sequence[Sequence[CallArguments]] = (),
        staging: StagingOptions | None = None,
    ):
        self.model = model = adapter.model
        self._staging = staging = staging or StagingOptions()
        self.stages = tuple(stages)
        self.num_stages = num_stages
        self._device = device
        self._inputs = ModelInputs(device, staging.compute_dtype)
        self._plans = PlanCache()
        self._growing_plans = GrowingPlans()
        self.options: CallOptions | None = None
        self._placeholders = Placeholders(device)
        self._running = False
        self._watch: Watcher | None = None
        self.around_call: CallRunner | None = None
        self.around_stage: Callable[[int, Any], AbstractContextManager[None]] | None = None
        self._remote_deltas: list[AttributeDelta] = []
        self._states = StageStates(model, self.stages) if len(self.stages) > 1 else None
        self.gather: UnitGather | None = None
        self.part_reads: PartReadCheck | None = None
        self.while_tracing: Callable[[], AbstractContextManager[None]] = nullcontext
        self._visibility = ParameterVisibility()
        refuse_compiled(model, [model])
        self._finest = Interceptor(adapter, AdapterLayer.UNIT_RNG, finest_units(model))
        self._layer_listener = ForwardListener(adapter, inner_linear_layers(model, self._finest.units))
        self._drawing_parts = DrawingParts(model)
        self._conditional_draws = ConditionalDraws.of(model, self._finest.units)
        if staging.recomputation is not None:
            warn_of_cache(model)
        if num_stages > 1:
            self._assignment = cut_into_stages(
                adapter,
                num_stages,
                samples,
                self._finest,
                prepare=self._inputs.prepare,
                device=device,
                staging=staging,
                further=further,
            )
        else:
            self._assignment = one_stage(adapter, staging)
        # Refused before parameters are freed, so that boost can be called again.
        recomputed = recomputed_blocks(staging.recomputation, self._assignment.blocks, staging.sequence_blocks)
        if staging.recomputed is not None:
            recomputed = (staging.recomputed,)
        if num_stages > 1:
            self._visibility = self._assignment.prune(adapter, self.stages, device, staging.dtypes)
        self.owners = self._assignment.owners
        self._interceptor = self._assignment.interceptor
        self._containers = self._interceptor.outside(model)
        refuse_compiled(model, self._containers)
        forbid_compile(adapter, (*self._containers, *self._interceptor.modules.values()))
        self._recomputable = Recomputable(adapter, {stage: recomputed[stage] for stage in self.stages})
        adapter.wrap(model, AdapterLayer.MODEL, self._run_or_refuse)

    def _run_or_refuse(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self._running and self.num_stages > 1:
            raise PartitionError(
                f"this rank holds stage {', '.join(map(str, self.stages))} of {self.num_stages} only, so the model "
                "cannot be called by itself. Call booster.execute_pipeline."
            )
        if not self._running:
            args, kwargs = self._inputs.cast(args), self._inputs.cast(kwargs)
            if self._watch is not None:
                with self._interceptor.active(functools.partial(_watched, self._watch)):
                    return self._gathering(forward)(*args, **kwargs)
            if self.gather is not None:
                self.gather.begin_call()
            forward = self._watched_call(forward)
            if self.around_call is not None:
                return self.around_call(self._gathering(forward), args, kwargs)
        return self._gathering(forward)(*args, **kwargs)

    def _kind(self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Equal for calls that probably take one way through the model's code."""
        types = (*map(type, args), *kwargs, *map(type, kwargs.values()))
        return stage, self.model.training, torch.is_grad_enabled(), types

    def _gathering(self, forward: Forward) -> Forward:
        """The model's forward with the weights that are gathered for it.

        Of a parameter that it returns (the log-variances of a loss's terms), the values are: it may be read where the
        weight itself may not.
        """
        if self.gather is None:
            return _returning_values(forward, Tensor.view_as) if self.num_stages > 1 else forward
        gather, forward = self.gather, _returning_values(forward, _copy)
        return lambda *args, **kwargs: gather.around_model(forward, args, kwargs)

    def _watched_call(self, forward: Forward) -> Forward:
        """The forward of a call by the script, in which reads of parts of weights are refused."""
        check = self.part_reads
        if check is None:
            return forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            with check.watching(self._kind(0, args, kwargs), is_running=True):
                return forward(*args, **kwargs)

        return watched

    def gather_units(self, gather: UnitGather) -> None:
        """Gather the weights of units where they run; with one stage only."""
        self.gather, self._finest.around = gather, gather.around_unit

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Allow calls of the model inside, although it holds only a stage."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def plans(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plans:
        """The plans of this rank's stages for such inputs; new signatures are traced, known ones are cached.

        Raises:
            PartitionError: the forward deviates from the one that the model was cut by.
        """
        if self.num_stages == 1:
            return _UNCUT
        self._restore_attributes()
        options = self.options

        def make() -> Plans:
            with self.while_tracing(), self._entered():
                positional, named = self._inputs.prepare(args, kwargs)
                if options is not None:
                    named = {**named, **options.keywords(is_trace=True)}
                return self._assignment.plans(self.stages, (positional, named), self._staging.boundary_sharding)

        if options is not None:
            return self._growing_plans.get(options, kwargs, make)
        return self._plans.get(args, kwargs, self.model.training, make)

    def _restore_attributes(self) -> None:
        """Restore attributes that were set for other stages' units; until here a criterion may read them."""
        while self._remote_deltas:
            self._remote_deltas.pop().restore()

    def _stage_run(self, plan: StagePlan, received: Sequence[Tensor], rng: UnitRng) -> StageRun:
        modules = self._interceptor.modules
        sharding, reached = self._staging.boundary_sharding, self._interceptor.hooks.reached_from
        run = StageRun(plan, received, self._placeholders, rng, modules, sharding, reached)
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
    ) -> tuple[list[Tensor], Any, StageContext | None]:
        """Run the plan's stage on one micro-batch.

        Args:
            plan: one of :meth:`plans`, for these arguments.
            args: positional arguments of the model.
            kwargs: keyword arguments of the model.
            received: the values of ``plan.incoming``.
            key: the micro-batch's key for random numbers.
            recompute: whether the chosen blocks store only their inputs, and are recomputed in the backward pass.

        Returns:
            The values of ``plan.outgoing``; on the last stage the model's result (else None); and what
            :meth:`recomputing` takes, where gradients are enabled (else None).
        """
        with self._states.of_stage(plan.stage, plan.own_state) if self._states else nullcontext():
            if self.around_stage is None:
                return self._forward(plan, args, kwargs, received, key, recompute)
            self._restore_attributes()
            with self.around_stage(plan.stage, (args, kwargs)):
                return self._forward(plan, args, kwargs, received, key, recompute)

    def _forward(
        self,
        plan: StagePlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Sequence[Tensor],
        key: int,
        recompute: bool,
    ) -> tuple[list[Tensor], Any, StageContext | None]:
        parts = None if plan.is_seeded_everywhere else self._drawing_parts.now(plan.stage, torch.is_grad_enabled())
        rng = UnitRng(key, self._device, parts, self._staging.draws, self._conditional_draws)
        self._restore_attributes()
        run = self._stage_run(plan, received, rng)
        # Not the run itself, which holds activations.
        self._remote_deltas = run.deltas
        rest = AttributeResetter(self.model, plan.resets)
        # An eager run may begin inside of the model's call.
        num_entered = EAGER.num_entered - bool(EAGER.num_inside)
        try:
            with (
                self._entered(),
                self._visibility.showing_all(run.is_in_unit),
                self._interceptor.active(run),
                self._recomputable.active(plan.stage) if recompute else nullcontext(),
                self._hooks_once(run),
                self._finest.active(rng),
                self._layer_listener.active(rng.before_layer),
                self.part_reads.watching(self._kind(plan.stage, args, kwargs)) if self.part_reads else nullcontext(),
            ):
                args, kwargs = self._inputs.cast(args), self._inputs.cast(kwargs)
                if self.options is not None:
                    kwargs = {**kwargs, **self.options.keywords(is_trace=False)}
                # A new context, so that context variables are reset when an exception leaves the forward.
                result = copy_context().run(self.model, *args, **kwargs)
        except StageDone:
            rest.put()
            rng.finish(is_last=False)
            outgoing = run.outgoing()
            if self._visibility.has_computed:
                self._take_absent_out(outgoing)
            return (
                outgoing,
                None,
                self._context_of(plan, run, received, rng, key, EAGER.num_entered > num_entered),
            )
        if plan.last_local is not None:
            raise PartitionError(
                f"the forward ended before unit {plan.calls[plan.last_local].name!r}, the last of stage {plan.stage}: "
                "the model caught the exception that leaves the forward. Do not catch BaseException in the model."
            )
        rng.finish(is_last=True)
        if self._visibility.has_computed:
            refuse_absent(result)
        if self.options is not None:
            result = self.options.result(result)
        return (
            [],
            result,
            self._context_of(plan, run, received, rng, key, EAGER.num_entered > num_entered),
        )

    def _take_absent_out(self, outgoing: Sequence[Tensor]) -> None:
        """Refuse absent tensors among those that are sent, and make plain ones of those in buffers.

        The last stage's buffers are saved, and the others' may lack what the forward has made of other stages' weights.
        """
        refuse_absent(outgoing)
        for module in self._containers:
            plain_again(buffers_of(module).values())

    def _context_of(
        self, plan: StagePlan, run: StageRun, received: Sequence[Tensor], rng: UnitRng, key: int, was_eager: bool
    ) -> StageContext | None:
        if not torch.is_grad_enabled():
            return None
        replay = None
        if run.checkpointed_calls:
            replay = Replay(run.checkpointed_calls, self._stage_run(plan, received, rng), self._device)
        return StageContext(key, rng.trace, replay, was_eager)

    def _hooks_once(self, run: StageRun) -> AbstractContextManager[None]:
        hooked = [module for module in self._containers if forward_hooks_of(module) or forward_pre_hooks_of(module)]
        if self.num_stages == 1 or not hooked:
            return nullcontext()
        return run_once(hooked, self._interceptor.hooks.is_observer, run.next_is_own, run.latest_is_own)

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether blocks run on shards of the sequences."""
        return bool(self._staging.sequence_blocks)

    @property
    def unit_stages(self) -> dict[str, set[int]]:
        """The stages that call each unit, by its name."""
        return self._assignment.callers or {unit: {0} for unit in self._interceptor.units}

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, on this stage and on others."""
        return self._interceptor.units

    @contextmanager
    def with_options(self, options: CallOptions | None) -> Iterator[None]:
        """Inside, the model's calls get these options."""
        self.options = options
        try:
            yield
        finally:
            self.options = None

    @contextmanager
    def watched(self, watch: Watcher) -> Iterator[None]:
        """Inside, this rank's own units are called by ``watch(name, forward, *args, **kwargs)``."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    @contextmanager
    def recomputing(self, context: StageContext) -> Iterator[None]:
        """Wrap a stage's backward pass: recomputation draws the forward's random numbers and gets other stages'
        results.

        Args:
            context: of :meth:`forward`, for the same micro-batch.
        """
        self._restore_attributes()
        replay = context.replay
        recompute = RecomputeRng(context.rng_trace, context.key, self._device, self._staging.draws)
        with (
            self._staging.recompute_context(),
            # No container code but what checkpoints repeat.
            self._visibility.showing_all(replay.is_in_unit if replay else _always),
            self._finest.active(recompute),
            self._layer_listener.active(recompute.before_layer),
            self._interceptor.active(replay) if replay else nullcontext(),
            force_eager() if context.was_eager else nullcontext(),
            self.gather.backward_of_step() if self.gather else nullcontext(),
        ):
            yield
        self._remote_deltas = replay.deltas if replay else []
        self._restore_attributes()


def _returning_values(forward: Forward, values_of: Callable[[Tensor, Tensor], Tensor]) -> Forward:
    """A model's forward that returns the values of a parameter where it returns the parameter."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if not any(isinstance(one, nn.Parameter) for one in tensors_in(result)):
            return result
        leaves, tree = flatten(result)
        return pytree.tree_unflatten(
            [values_of(one, one) if isinstance(one, nn.Parameter) else one for one in leaves], tree
        )

    return run


def _copy(parameter: Tensor, _: Tensor) -> Tensor:
    """Of a weight that is there only in the forward."""
    return parameter.clone()


def _always() -> bool:
    return True


def _watched(watch: Watcher, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return watch(name, forward, *args, **kwargs)


_UNCUT = {0: StagePlan()}
