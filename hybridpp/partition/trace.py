"""Trace a model: run its own forward once on fake tensors and record every unit call."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch
from torch import nn

from hybridpp.errors import PartitionError
from hybridpp.nn import walk
from hybridpp.nn.force_eager import force_eager
from hybridpp.nn.snapshot import Snapshot, put_entry
from hybridpp.nn.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from hybridpp.partition.cache_entries import UncachedTraceNeededError
from hybridpp.partition.call_recorder import CallRecorder, UnitObserver
from hybridpp.partition.calls import Trace
from hybridpp.partition.common_traces import CommonTraces, TracedForward
from hybridpp.partition.concrete_fallback import UntraceableUnitError
from hybridpp.partition.fakes import Fakes, bound_cache, quiet
from hybridpp.partition.hooks import HookEffects
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.left_state import AttributesBefore, FilledContainers, LeftKey, LeftState, fill_again
from hybridpp.partition.module_outputs import AttributeSlot
from hybridpp.partition.resets import UnitCallKey
from hybridpp.partition.taint import TaintMode
from hybridpp.partition.trace_cache import TraceCache

_OPERATION = TaintMode.__torch_function__.__code__
_CANNOT_RUN_ON_FAKES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class Tracer:
    """Traces one model for given inputs.

    Args:
        model: the complete model; it may be pruned afterwards.
        interceptor: interceptor of its units.
        finest: interceptor of its finest units.
        device: device of the fake tensors.
        dtypes: of tensors that will be cast, by ``id``.
        common: traces of the in-process ranks that hold equal models; None: this rank traces for itself.
    """

    def __init__(
        self,
        model: nn.Module,
        interceptor: Interceptor,
        finest: Interceptor,
        device: torch.device,
        dtypes: Mapping[int, torch.dtype] | None = None,
        common: CommonTraces | None = None,
    ):
        self._model = model
        self._interceptor = interceptor
        self._finest = finest
        self._fakes = Fakes(model, device, dtypes or {})
        self._common = common
        # Set where units that get a key-value cache have no numbers of their own, as layers that share their attention.
        self._runs_with_caches = False
        self._cache = TraceCache(model, interceptor.units)
        self._unit_parameters: dict[str, tuple[str, ...]] = {}
        # Initial values of the attributes that units set. A rank's own units have set them since, other ranks' units
        # have not, and the trace must be the same on all ranks.
        self._initial: dict[tuple[int, str], AttributeSlot] = {}
        names = {id(parameter): name for name, parameter in walk.named_parameters(model)}
        for unit in interceptor.units:
            parameters = walk.parameters(walk.submodule(model, unit))
            self._unit_parameters[unit] = tuple(names[id(parameter)] for parameter in parameters)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a staged model (such as an average of its weights) does not run, so it has no tracer."""
        return

    def trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        count_flops: bool = False,
        watch: UnitObserver | None = None,
        cuts: Sequence[UnitCallKey] = (),
    ) -> Trace:
        """The trace of ``model(*args, **kwargs)``; the arguments are real tensors, which are only read.

        Args:
            args: of the forward.
            kwargs: of the forward.
            count_flops: whether the FLOPs of each call are counted.
            watch: called with each unit's name and arguments before it runs.
            cuts: the calls after which stages leave the forward, if known.

        Raises:
            PartitionError: the forward branches on a value that a unit computes, container code replaces after a cut
                what units keep before it, or a stage would read what the forward before has left on another one.
        """
        bound_cache()
        self._fakes.renew()
        hooks = self._interceptor.hooks.registered()

        def make() -> Trace:
            try:
                return made_once()
            except UncachedTraceNeededError:
                self._runs_with_caches = True
                return made_once()

        def made_once() -> Trace:
            filled: FilledContainers = {}
            made = self._trace(args, kwargs, count_flops, watch, cuts, filled=filled)
            if not (made.left and cuts):
                return made
            # Few forwards leave something: then it is seen in another one where that is set, and who reads it.
            return self._trace(args, kwargs, count_flops, watch, cuts, made.left, filled)

        # A watch sees the units run, and what they have set before is this rank's.
        if self._common is None or watch is not None or self._initial:
            trace = make()
        else:
            options = self._interceptor.units, count_flops, tuple(cuts)
            forward = TracedForward(self._model, self._fakes, (args, kwargs), options, self._cache)
            trace = self._common.get(forward, make)
        self._interceptor.hooks.learn(hooks, trace.hook_effects)
        return trace

    def _trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        count_flops: bool,
        watch: UnitObserver | None,
        cuts: Sequence[UnitCallKey],
        follow: Sequence[LeftKey] = (),
        filled: FilledContainers | None = None,
    ) -> Trace:
        filled = {} if filled is None else filled
        hooks = self._interceptor.hooks
        recorder = CallRecorder(
            *(self._model, self._fakes, self._unit_parameters, self._cache, hooks, count_flops, watch),
            self._runs_with_caches,
        )
        with self._leaving_alone(recorder, args, kwargs), self._recording(recorder) as hook_effects:
            for slot in self._initial.values():
                put_entry(*slot)
            recorder.search_resets(cuts)
            before = AttributesBefore(self._model)
            try:
                # A new context, as for a stage's run.
                with self._following(recorder, follow, cuts, filled):
                    result = copy_context().run(self._model, *args, **kwargs)
            except (*_CANNOT_RUN_ON_FAKES, UntraceableUnitError) as error:
                if self._only_container_code_follows(error, recorder):
                    # The last stage runs it with real values, and it may use what local variables hold.
                    return recorder.finish(_locals(error), recorder.resets.found(), hook_effects, before.left())
                if isinstance(error, UntraceableUnitError):
                    raise
                raise self._branches_on_a_value(error, recorder) from error
            recorder.taints.refuse_strays(result)
            if not follow:
                filled |= before.filled()
            return recorder.finish(result, recorder.resets.found(), hook_effects, before.left())

    @contextmanager
    def _leaving_alone(self, recorder: CallRecorder, args: Any, kwargs: Any) -> Iterator[None]:
        """Inside, a trace is made, which may be made again: its arguments are left as they were (a cache among them),
        and what attributes were is noted that its units have set."""
        given = Snapshot.reachable_from((args, kwargs))
        try:
            yield
        finally:
            given.restore()
            for slot in recorder.attributes_before:
                self._initial.setdefault((id(slot[0]), slot[1]), slot)

    @contextmanager
    def _following(
        self,
        recorder: CallRecorder,
        keys: Sequence[LeftKey],
        cuts: Sequence[UnitCallKey],
        filled: FilledContainers,
    ) -> Iterator[None]:
        """Inside, the recorder sees who sets and reads these attributes.

        Containers hold what the forward before has left in them, so that it is seen whether that is used.
        """
        if not keys:
            yield
            return
        for tensor in fill_again(self._model, filled):
            recorder.taints.mark(tensor, [])
        recorder.left = LeftState(self._model, keys, cuts)
        with recorder.left.watching(recorder.current_call):
            yield

    @contextmanager
    def _recording(self, recorder: CallRecorder) -> Iterator[HookEffects]:
        """Inside, the model's forward runs on fakes, and its unit calls are recorded; yields what hooks do there."""
        with (
            self._fakes.in_place(),
            # Compiled code cannot run on fakes, and a failed attempt would disable its compilation.
            force_eager(),
            self._interceptor.hooks.disabled_for_trace() as hook_effects,
            self._interceptor.active(recorder),
            self._finest.active(recorder.note_inner),
            _restored_generators(),
            quiet(),
            torch.inference_mode(False),
            torch.enable_grad(),
            recorder.taints,
        ):
            yield hook_effects

    def _only_container_code_follows(self, error: Exception, recorder: CallRecorder) -> bool:
        """Whether a forward that failed looks at values (as a loss does) after all units were called."""
        inner = error.fake if isinstance(error, UntraceableUnitError) else error
        return isinstance(inner, _CANNOT_RUN_ON_FAKES) and bool(recorder.calls) and not self._uncalled(recorder)

    def _branches_on_a_value(self, error: Exception, recorder: CallRecorder) -> PartitionError:
        last = recorder.calls[-1].name if recorder.calls else "none yet"
        return PartitionError(
            f"the forward of {type(self._model).__name__} branches on a computed value "
            f"after unit {last!r} ({error}). Move that branch into a block, or use pp_size=1."
        )

    def _uncalled(self, recorder: CallRecorder) -> set[str]:
        """Members of module lists with parameters that were not called; for other modules container code may use only
        the weights."""
        lists = {
            name
            for name, module in walk.named_modules(self._model)
            if isinstance(module, nn.ModuleList | nn.Sequential)
        }
        listed = {
            unit
            for unit, parameters in self._unit_parameters.items()
            if parameters and unit.rpartition(".")[0] in lists
        }
        return listed - {call.name for call in recorder.calls}


def _locals(error: BaseException) -> list[dict[str, Any]]:
    """The local variables of every function that an exception left, except the one that caught it.

    Frames end at an operation and its arguments: torch's frames inside also refer to all of its caches.
    """
    frames = []
    step = error.__traceback__
    while step is not None:
        frames.append(dict(step.tb_frame.f_locals))
        step = step.tb_next if step.tb_frame.f_code is not _OPERATION else None
    return frames[1:]


@contextmanager
def _restored_generators() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
