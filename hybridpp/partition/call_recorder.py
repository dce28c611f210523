"""Record every unit call of one forward: its arguments, its results, and what each of them depends on."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hybridpp.errors import HybridppError, PartitionError
from hybridpp.module_adapter import Forward
from hybridpp.nn import walk
from hybridpp.nn.checkpointing import in_checkpoint, in_reentrant_checkpoint
from hybridpp.nn.snapshot import Snapshot
from hybridpp.nn.torch_private import buffers_of, is_functorch_active, pytree, version_of
from hybridpp.partition.cache_entries import CacheEntries, UncachedTraceNeededError
from hybridpp.partition.calls import BufferKind, CallArguments, Same, TensorSpec, Trace, UnitCall
from hybridpp.partition.concrete_fallback import UntraceableUnitError, run_on_concrete_values
from hybridpp.partition.containers import ContainerRef, ContainerSnapshot, flatten, is_cache
from hybridpp.partition.derivatives import Derivative
from hybridpp.partition.fakes import Fakes
from hybridpp.partition.flops import FlopCounter
from hybridpp.partition.hooks import HookEffects, ModelHooks
from hybridpp.partition.left_state import LeftByContainers, LeftKey, LeftState
from hybridpp.partition.module_outputs import AttributeKey, AttributeSlot, AttributeSnapshot
from hybridpp.partition.object_state import RemoteObject, holds_tensors, may_hide_tensors
from hybridpp.partition.resets import AttributeReset, ResetSearch, UnitCallKey
from hybridpp.partition.taint import SeenDerivative, Source, TaintMode, Value
from hybridpp.partition.trace_cache import TraceCache

UnitObserver: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any]], None]


class CallRecorder:
    """Records every unit call of one forward.

    Args:
        model: the complete model, with fake tensors as parameters.
        fakes: those fake tensors.
        unit_parameters: names of the parameters that each unit holds.
        cache: results of units from earlier calls and traces.
        hooks: of the model.
        count_flops: whether the FLOPs of each call are counted.
        watch: called with each unit's name and arguments before it runs.
        runs_with_caches: whether units that get a key-value cache are run, whatever earlier ones gave.

    Attributes:
        calls: the calls so far, in order.
        taints: what each tensor depends on; active during the forward.
        resets: finds the attributes that are reset after cuts.
        attributes_before: the attributes that units set, as they were before.
        left: follows what the forward leaves for the next one; None: nothing is left, or nobody asks.
    """

    def __init__(
        self,
        model: nn.Module,
        fakes: Fakes,
        unit_parameters: dict[str, tuple[str, ...]],
        cache: TraceCache,
        hooks: ModelHooks,
        count_flops: bool,
        watch: UnitObserver | None,
        runs_with_caches: bool,
    ):
        self._model = model
        self._cache, self._hooks = cache, hooks
        self._originals = {id(fake): original for fake, original in fakes.buffers}
        self.calls: list[UnitCall] = []
        self.taints = TaintMode(self._note_derivative)
        self._derivatives: list[Derivative] = []
        self._unit_parameters = unit_parameters
        self._count_flops = count_flops
        self._watch = watch
        self.attributes_before: list[AttributeSlot] = []
        self.resets = ResetSearch(model, (), ())
        self.left: LeftState | None = None
        self._runs_with_caches = runs_with_caches
        self._entries = CacheEntries()
        self._depth = 0
        self._occurrences: dict[str, int] = {}
        self._outputs: list[tuple[UnitCall, int, Tensor, int]] = []
        self._written_buffers: set[BufferKind] = set()
        for name, parameter in fakes.parameters:
            self.taints.mark(parameter, [name])
        for buffer, _ in fakes.buffers:
            self.taints.mark(buffer, [])

    def search_resets(self, cuts: Sequence[UnitCallKey]) -> None:
        """Also search for attributes that are reset after these calls; call it before the forward."""
        self.resets = ResetSearch(self._model, self._unit_parameters, cuts)
        for tensor in self.resets.tensors():
            self.taints.mark(tensor, [])

    def current_call(self) -> tuple[int, bool]:
        """The index of the call that runs, or else of the next one; and whether one runs."""
        return (len(self.calls) - 1, True) if self._depth else (len(self.calls), False)

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._depth:
            # A unit that calls another one also holds that unit's parameters and buffers.
            self.calls[-1].parameters += self._unit_parameters[name]
            self.calls[-1].others += (name,)
            return forward(*args, **kwargs)
        arguments, given_tree = flatten((args, kwargs))
        tensors = {index: leaf for index, leaf in enumerate(arguments) if isinstance(leaf, Tensor)}
        if self.left is not None:
            self.left.begin_call(tensors.values(), len(self.calls))
        call = self._begin(name, args, kwargs)
        self.taints.refuse_strays(list(tensors.values()))
        if self._watch is not None:
            with self.taints.paused(name):
                self._watch(name, args, kwargs)
        versions = {index: version_of(tensor) for index, tensor in tensors.items()}
        given = ContainerSnapshot((args, kwargs))
        reached = self._hooks.reached_from(self._model.get_submodule(name))
        if reached:
            given = ContainerSnapshot((args, kwargs), reached)
        output, assigned, appended = self._cached_or_run(call, forward, (args, kwargs), given, reached)
        call.changed, call.assigned, call.appended = given.changed(), tuple(assigned), tuple(appended)
        call.reaches = any(index >= given.num_given for index in call.changed)
        leaves, call.tree = flatten((given.to_refs(output), given.changes(call.changed), assigned, appended))
        call.uses_refs = any(isinstance(leaf, ContainerRef) for leaf in leaves)
        self._record_leaves(call, leaves, tensors, versions)
        call.given = given_tree if call.arguments else None
        self.resets.note_call((name, call.occurrence), assigned)
        if self.left is not None:
            self.left.end_call((name, call.occurrence), len(self.calls) - 1)
        return output

    def _begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnitCall:
        """The record of a call that begins."""
        if is_functorch_active():
            raise PartitionError(
                f"unit {name!r} is called inside a transform of torch.func (grad, vjp, vmap), whose tensors cannot be "
                "sent to another stage. Transform inside one block, or use torch.autograd.grad with pp_size=1."
            )
        if in_reentrant_checkpoint():
            raise PartitionError(
                f"unit {name!r} runs inside reentrant activation checkpointing, which hides its gradient from a cut. "
                "Checkpoint with use_reentrant=False, or inside the block."
            )
        call = UnitCall(
            name=name,
            occurrence=self._occurrences.get(name, 0),
            sources=self.taints.sources((args, kwargs)) | self.taints.decisions,
            parameters=self._unit_parameters[name],
            checkpointed=in_checkpoint(),
            tree=pytree.tree_structure(None),
        )
        self._occurrences[name] = call.occurrence + 1
        self.calls.append(call)
        return call

    def _record_leaves(
        self, call: UnitCall, leaves: list[Any], arguments: Mapping[int, Tensor], versions: Mapping[int, int]
    ) -> None:
        """Record the leaves of a call's result, then the arguments that it wrote to without returning them.

        ``arguments`` are tensors by their index among all leaves, ``versions`` theirs before the call.
        """
        indices = {id(argument): index for index, argument in arguments.items()}
        written = {index for index in indices.values() if version_of(arguments[index]) != versions[index]}
        call.arguments = {number: indices[id(leaf)] for number, leaf in enumerate(leaves) if id(leaf) in indices}
        for index in indices.values():
            if index in written and index not in call.arguments.values():
                call.arguments[len(leaves)] = index
                leaves.append(arguments[index])
        changed = {number for number, index in call.arguments.items() if index in written}
        first: dict[int, int] = {}
        call.leaves = tuple(
            Same(first[id(leaf)])
            if isinstance(leaf, Tensor) and first.setdefault(id(leaf), number) != number
            else self._record(call, number, leaf, number in changed)
            for number, leaf in enumerate(leaves)
        )

    def _note_derivative(self, seen: SeenDerivative) -> bool:
        """Record a derivative; whether it goes back through calls of units, which were perhaps not run."""
        call = len(self.calls) - 1 if seen.unit else None
        outputs = seen.outputs if call is None else self.calls[call].sources
        # With respect to what a call returned, it goes back to that call. What no call returned may be used by all.
        starts = [max((_calls_in(sources)), default=-1) for sources in seen.inputs]
        path = {one for one in self._all_before(_calls_in(outputs)) if one > min(starts, default=-1)}
        if call is not None:
            own = set(self._unit_parameters[seen.unit])
            is_own = all(sources and own.issuperset(sources) for sources in seen.inputs)
            path = {call} if is_own else path | {call}
        derivative = Derivative(len(self.calls), call, frozenset(path))
        self._derivatives.append(derivative)
        return bool(path - {call})

    def _all_before(self, calls: set[int]) -> set[int]:
        """These calls and all whose results they depend on."""
        found: set[int] = set()
        left = set(calls)
        while left:
            found.add(call := left.pop())
            left |= _calls_in(self.calls[call].sources) - found
        return found

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
        self,
        call: UnitCall,
        forward: Forward,
        inputs: CallArguments,
        given: ContainerSnapshot,
        reached: tuple[Any, ...],
    ) -> tuple[Any, Mapping[AttributeKey, Any], Mapping[AttributeKey, Any]]:
        """The unit's result, from the cache if an equal unit was run on arguments of the same kind.

        Also returns the attributes of its modules that it assigned or appended to.
        """
        leaves, _ = flatten(inputs)
        arguments = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        hides = any(map(may_hide_tensors, leaves))
        key = self._cache.key(call.name, *inputs, given.kinds())
        caches = [leaf for leaf in leaves if is_cache(leaf)]
        if caches and not self._runs_with_caches and not self._entries.are_new(self._cache.numbers(call.name)):
            raise UncachedTraceNeededError
        runs = hides or self.left is not None or (caches and self._runs_with_caches)
        # A unit that is not run reads and sets no state.
        known = None if runs else self._cache.lookup(key, call.name, arguments)
        if known is not None:
            output, call.flops, call.inner = known
            return output, {}, {}
        attributes = AttributeSnapshot(self._model.get_submodule(call.name))
        versions = [version_of(argument) for argument in arguments]

        def undo() -> None:
            given.restore()
            attributes.restore_lists()

        output, used = self._run(call, forward, inputs, reached, undo)
        self._entries.note(caches, len(self.calls) - 1)
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
        self,
        call: UnitCall,
        forward: Forward,
        inputs: CallArguments,
        reached: tuple[Any, ...],
        undo: Callable[[], None],
    ) -> tuple[Any, Mapping[int, frozenset[Source]]]:
        """The unit's result, and the sources of the tensors that it used, by ``id``; ``undo`` is for what it wrote."""
        self._depth += 1
        objects = Snapshot.reachable_from(inputs)
        counter = FlopCounter() if self._count_flops else None
        buffers = _buffer_versions(self._model.get_submodule(call.name))
        makers, read = self._entries.makers, set[int]()
        try:
            with self.taints.paused(call.name, makers, read) as used, counter or nullcontext():
                try:
                    output = forward(*inputs[0], **inputs[1])
                except RuntimeError as error:  # operations that fakes do not support, and kernels without a fake
                    call.inner = ()
                    objects.restore()
                    undo()
                    output = self._run_on_concrete_values(call.name, (forward, *inputs), reached, error)
            call.cache_entries_of = frozenset(makers[one] for one in read)
            if counter is not None:
                call.flops = counter.get_total_flops()
            self._written_buffers |= {kind for kind, buffer, version in buffers if version_of(buffer) != version}
            return output, used
        finally:
            self._depth -= 1

    def _run_on_concrete_values(
        self,
        name: str,
        call: tuple[Forward, tuple[Any, ...], dict[str, Any]],
        reached: tuple[Any, ...],
        error: RuntimeError,
    ) -> Any:
        """The result of a unit that fails with ``error`` on fakes."""
        module = self._model.get_submodule(name)
        try:
            return run_on_concrete_values(module, call, self._originals, reached)
        except (HybridppError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as real:
            if (type(real), str(real)) == (type(error), str(error)):
                raise error from None
            unit = f"unit {name!r} ({type(module).__name__}) of {type(self._model).__name__}"
            raise UntraceableUnitError(unit, real, error) from real

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

    def finish(
        self,
        result: Any,
        resets: tuple[tuple[AttributeReset, ...], ...],
        hook_effects: HookEffects,
        left: tuple[LeftKey, ...],
    ) -> Trace:
        """The trace of a forward that returned ``result``.

        Raises:
            PartitionError: a stage would read state that the forward before has left on another one.
        """
        kept = LeftByContainers()
        if self.left is not None:
            is_reset = [{(reset.module, reset.name) for reset in of_cut} for of_cut in resets]
            kept = self.left.check([call.name for call in self.calls], is_reset)
        for call, number, leaf, version in self._outputs:
            if version_of(leaf) != version:
                call.written |= {number}
        sources = self.taints.sources(result) | self.taints.sources(list(kept.tensors)) | self.taints.decisions
        derivatives = tuple(self._derivatives)
        state = left, kept.read, kept.replaced
        written = frozenset(self._written_buffers)
        return Trace(tuple(self.calls), sources, resets, hook_effects, derivatives, *state, written)


def _buffer_versions(module: nn.Module) -> list[tuple[BufferKind, Tensor, int]]:
    """The buffers of a module and those inside, and how often each was written to."""
    return [
        ((type(part), key), buffer, version_of(buffer))
        for part in walk.modules(module)
        for key, buffer in buffers_of(part).items()
        if buffer is not None
    ]


def _calls_in(sources: frozenset[Source]) -> set[int]:
    return {source.call for source in sources if isinstance(source, Value)}
