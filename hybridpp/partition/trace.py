"""Trace a model: run its own forward once on fake tensors and record every unit call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hybridpp.errors import HybridppError, PartitionError
from hybridpp.module_adapter import Forward
from hybridpp.nn.checkpointing import in_checkpoint, in_reentrant_checkpoint
from hybridpp.nn.snapshot import Snapshot, put_entry
from hybridpp.nn.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    pytree,
    version_of,
)
from hybridpp.partition.calls import Same, TensorSpec, Trace, UnitCall
from hybridpp.partition.concrete_fallback import UntraceableUnitError, run_on_concrete_values
from hybridpp.partition.containers import ContainerRef, ContainerSnapshot, flatten, tensors_in
from hybridpp.partition.fakes import Fakes, bound_cache, quiet
from hybridpp.partition.flops import flop_counter
from hybridpp.partition.intercept import Interceptor
from hybridpp.partition.module_outputs import AttributeKey, AttributeSlot, AttributeSnapshot
from hybridpp.partition.object_state import RemoteObject, holds_tensors, may_hide_tensors
from hybridpp.partition.resets import AttributeReset, ResetSearch, UnitCallKey
from hybridpp.partition.taint import Source, TaintMode, Value
from hybridpp.partition.trace_cache import TraceCache

UnitObserver: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any]], None]

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
    """

    def __init__(
        self,
        model: nn.Module,
        interceptor: Interceptor,
        finest: Interceptor,
        device: torch.device,
        dtypes: Mapping[int, torch.dtype] | None = None,
    ):
        self._model = model
        self._interceptor = interceptor
        self._finest = finest
        self._fakes = Fakes(model, device, dtypes or {})
        self._cache = TraceCache(model, interceptor.units)
        self._unit_parameters: dict[str, tuple[str, ...]] = {}
        # Initial values of the attributes that units set. A rank's own units have set them since, other ranks' units
        # have not, and the trace must be the same on all ranks.
        self._initial: dict[tuple[int, str], AttributeSlot] = {}
        with self._fakes.in_place():
            for unit in interceptor.units:
                parameters = model.get_submodule(unit).parameters()
                self._unit_parameters[unit] = tuple(self._fakes.names[id(parameter)] for parameter in parameters)

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
            PartitionError: the forward branches on a value that a unit computes, or container code replaces after a cut
                what units keep before it.
        """
        bound_cache()
        self._fakes.renew()
        recorder = _Recorder(self._model, self._fakes, self._unit_parameters, self._cache, count_flops, watch)
        with (
            self._fakes.in_place(),
            # Compiled code cannot run on fakes, and a failed attempt would disable its compilation.
            torch.compiler.set_stance("force_eager"),
            self._interceptor.hooks.disabled_for_trace(),
            self._interceptor.active(recorder),
            self._finest.active(recorder.note_inner),
            _restored_generators(),
            quiet(),
            torch.inference_mode(False),
            torch.enable_grad(),
            recorder.taints,
        ):
            for slot in self._initial.values():
                put_entry(*slot)
            recorder.search_resets(cuts)
            try:
                # A new context, as for a stage's run.
                result = copy_context().run(self._model, *args, **kwargs)
            except (*_CANNOT_RUN_ON_FAKES, UntraceableUnitError) as error:
                inner = error.fake if isinstance(error, UntraceableUnitError) else error
                if isinstance(inner, _CANNOT_RUN_ON_FAKES) and recorder.calls and not self._uncalled(recorder):
                    # Only container code follows (such as a loss that reads values): the last stage runs it with real
                    # values, and it may use what local variables hold.
                    return recorder.finish(_locals(error), recorder.resets.found())
                if isinstance(error, UntraceableUnitError):
                    raise
                last = recorder.calls[-1].name if recorder.calls else "none yet"
                raise PartitionError(
                    f"the forward of {type(self._model).__name__} branches on a computed value "
                    f"after unit {last!r} ({error}). Move that branch into a block, or use pp_size=1."
                ) from error
            recorder.taints.refuse_strays(result)
            resets = recorder.resets.found()
        for slot in recorder.attributes_before:
            self._initial.setdefault((id(slot[0]), slot[1]), slot)
        return recorder.finish(result, resets)

    def _uncalled(self, recorder: "_Recorder") -> set[str]:
        """Members of module lists with parameters that were not called; for other modules container code may use only
        the weights."""
        lists = {
            name for name, module in self._model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)
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


class _Recorder:
    """The unit handler of a trace; records the calls."""

    def __init__(
        self,
        model: nn.Module,
        fakes: Fakes,
        unit_parameters: dict[str, tuple[str, ...]],
        memo: TraceCache,
        count_flops: bool,
        watch: UnitObserver | None,
    ):
        self._model = model
        self._cache = memo
        self._originals = fakes.originals
        self.calls: list[UnitCall] = []
        self.taints = TaintMode()
        self._unit_parameters = unit_parameters
        self._count_flops = count_flops
        self._watch = watch
        self.attributes_before: list[AttributeSlot] = []
        self.resets = ResetSearch(model, (), ())
        self._depth = 0
        self._occurrences: dict[str, int] = {}
        self._outputs: list[tuple[UnitCall, int, Tensor, int]] = []
        for parameter in fakes.parameters:
            self.taints.mark(parameter, [fakes.names[id(parameter)]])
        for buffer in fakes.buffers:
            self.taints.mark(buffer, [])

    def search_resets(self, cuts: Sequence[UnitCallKey]) -> None:
        """Also search for attributes that are reset after these calls; call it before the forward."""
        self.resets = ResetSearch(self._model, self._unit_parameters, cuts)
        for tensor in self.resets.tensors():
            self.taints.mark(tensor, [])

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._depth:
            # A unit that calls another one also holds that unit's parameters and buffers.
            self.calls[-1].parameters += self._unit_parameters[name]
            self.calls[-1].others += (name,)
            return forward(*args, **kwargs)
        if in_reentrant_checkpoint():
            raise PartitionError(
                f"unit {name!r} runs inside reentrant activation checkpointing, which hides its gradient from a cut. "
                "Checkpoint with use_reentrant=False, or inside the block."
            )
        call = UnitCall(
            name=name,
            occurrence=self._occurrences.get(name, 0),
            sources=self.taints.sources((args, kwargs)),
            parameters=self._unit_parameters[name],
            checkpointed=in_checkpoint(),
            tree=pytree.tree_structure(None),
        )
        self._occurrences[name] = call.occurrence + 1
        self.calls.append(call)
        arguments = tensors_in((args, kwargs))
        self.taints.refuse_strays(arguments)
        if self._watch is not None:
            with self.taints.paused(name):
                self._watch(name, args, kwargs)
        versions = [version_of(argument) for argument in arguments]
        given = ContainerSnapshot((args, kwargs))
        output, assigned, appended = self._cached_or_run(call, forward, args, kwargs, given)
        call.changed, call.assigned, call.appended = given.changed(), tuple(assigned), tuple(appended)
        leaves, call.tree = flatten((given.to_refs(output), given.changes(call.changed), assigned, appended))
        call.uses_refs = any(isinstance(leaf, ContainerRef) for leaf in leaves)
        places = {id(argument): place for place, argument in enumerate(arguments)}
        call.arguments = {number: places[id(leaf)] for number, leaf in enumerate(leaves) if id(leaf) in places}
        for place in places.values():
            if version_of(arguments[place]) != versions[place] and place not in call.arguments.values():
                call.arguments[len(leaves)] = place
                leaves.append(arguments[place])
        changed = {n for n, place in call.arguments.items() if version_of(arguments[place]) != versions[place]}
        first: dict[int, int] = {}
        call.leaves = tuple(
            Same(first[id(leaf)])
            if isinstance(leaf, Tensor) and first.setdefault(id(leaf), number) != number
            else self._record(call, number, leaf, number in changed)
            for number, leaf in enumerate(leaves)
        )
        self.resets.note_call((name, call.occurrence), assigned)
        return output

    def note_inner(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handler of the finest units: records which of them a unit calls."""
        if self.calls and self._depth == 1:
            self.calls[-1].inner += (name,)
            self._depth += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._depth -= 1
        return forward(*args, **kwargs)

    def _cached_or_run(
        self, call: UnitCall, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], given: ContainerSnapshot
    ) -> tuple[Any, Mapping[AttributeKey, Any], Mapping[AttributeKey, Any]]:
        """The unit's result, from the cache if an equal unit was run on arguments of the same kind.

        Also returns the attributes of its modules that it assigned or appended to.
        """
        leaves, _ = flatten((args, kwargs))
        arguments = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        hides = any(map(may_hide_tensors, leaves))
        key = self._cache.key(call.name, args, kwargs)
        known = None if hides else self._cache.lookup(key, call.name, arguments)
        if known is not None:
            output, call.flops, call.inner = known
            return output, {}, {}
        attributes = AttributeSnapshot(self._model.get_submodule(call.name))
        versions = [version_of(argument) for argument in arguments]
        output, used = self._run(call, forward, args, kwargs, given)
        self.resets.note_read(used)
        shown = {id(argument) for argument in arguments}
        hidden = {s for at, sources in used.items() if at not in shown for s in sources if s not in call.parameters}
        call.sources |= hidden
        assigned, appended = attributes.assigned(), attributes.appended()
        self.attributes_before += attributes.before(assigned)
        alone = not (call.others or hidden or hides or appended or attributes.has_changed())
        if alone and not given.changed() and versions == [version_of(argument) for argument in arguments]:
            self._cache.store(key, call.name, output, leaves, call.flops, call.inner)
        return output, assigned, appended

    def _run(
        self, call: UnitCall, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], given: ContainerSnapshot
    ) -> tuple[Any, Mapping[int, frozenset[Source]]]:
        """The unit's result, and the sources of the tensors that it used, by ``id``."""
        self._depth += 1
        objects = Snapshot.reachable_from((args, kwargs))
        counter = flop_counter() if self._count_flops else None
        try:
            with self.taints.paused(call.name) as used, counter or nullcontext():
                try:
                    output = forward(*args, **kwargs)
                except (
                    RuntimeError
                ) as error:  # operations that fakes do not support, and kernels without a fake implementation
                    call.inner = ()
                    objects.restore()
                    given.restore()
                    module = self._model.get_submodule(call.name)
                    try:
                        output = run_on_concrete_values(module, (forward, args, kwargs), self._originals)
                    except (HybridppError, MemoryError, torch.OutOfMemoryError):
                        raise
                    except Exception as real:
                        if (type(real), str(real)) == (type(error), str(error)):
                            raise error from None
                        unit = f"unit {call.name!r} ({type(module).__name__}) of {type(self._model).__name__}"
                        raise UntraceableUnitError(unit, real, error) from real
            if counter is not None:
                call.flops = counter.get_total_flops()
            return output, used
        finally:
            self._depth -= 1

    def _record(self, call: UnitCall, number: int, leaf: Any, changed: bool) -> Any:
        if not isinstance(leaf, Tensor):
            if not holds_tensors(leaf):
                return leaf
            self.taints.excuse(call.name)
            return RemoteObject(call.name, leaf)
        value = Value(len(self.calls) - 1, number)
        if changed:
            self.taints.written(leaf, [value])
        if changed or number not in call.arguments:
            self.taints.mark(leaf, [value])
        self._outputs.append((call, number, leaf, version_of(leaf)))
        return TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)

    def finish(self, result: Any, resets: tuple[tuple[AttributeReset, ...], ...]) -> Trace:
        for call, place, leaf, version in self._outputs:
            if version_of(leaf) != version:
                call.written |= {place}
        return Trace(tuple(self.calls), self.taints.sources(result), resets)
