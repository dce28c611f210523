"""Run a model's own forward once on fakes and write down every unit call."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from hybridpp.errors import PartitionError
from hybridpp.partition.attributes import Attributes, Key, Slot, put_back
from hybridpp.partition.belongings import Belongings, Elsewhere, holds_tensors, may_hide_tensors
from hybridpp.partition.calls import Same, TensorSpec, Trace, UnitCall
from hybridpp.partition.fakes import Fakes, quiet
from hybridpp.partition.flops import flop_counter
from hybridpp.partition.intercept import Forward, Interceptor
from hybridpp.partition.memo import Memo
from hybridpp.partition.rehearse import rehearse
from hybridpp.partition.structure import Given, Known, flatten, tensors_in
from hybridpp.partition.taint import Source, TaintMode, Value
from hybridpp.partition.untouched import untouched

Watch: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any]], None]

_CHECKPOINT = inspect.unwrap(checkpoint).__code__
_REENTRANT = CheckpointFunction.forward.__code__
_OPERATION = TaintMode.__torch_function__.__code__
_CANNOT_RUN_ON_FAKES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class Tracer:
    """Traces one model for any inputs.

    Args:
        model: whole; it may be stripped after this.
        interceptor: of its units.
        finest: of the finest units it has.
        device: where the trace pretends to run.
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
        self._memo = Memo(model, interceptor.units)
        self._unit_parameters: dict[str, tuple[str, ...]] = {}
        # What attributes that units set were before they first ran: a rank's own units have set them since, those of
        # other ranks have not, and all ranks must see the same trace.
        self._initial: dict[tuple[int, str], Slot] = {}
        with self._fakes.in_place():
            for unit in interceptor.units:
                parameters = model.get_submodule(unit).parameters()
                self._unit_parameters[unit] = tuple(self._fakes.names[id(parameter)] for parameter in parameters)

    def trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, count_flops: bool = False, watch: Watch | None = None
    ) -> Trace:
        """The trace of ``model(*args, **kwargs)``; the arguments are real tensors, which are only read.

        Args:
            args: of the forward.
            kwargs: of the forward.
            count_flops: whether the trace says how many each call takes.
            watch: is shown each unit's name and arguments before it runs.

        Raises:
            PartitionError: the forward branches on a value that a unit computes.
        """
        recorder = _Recorder(self._model, self._fakes, self._unit_parameters, self._memo, count_flops, watch)
        with (
            untouched(self._model),
            self._fakes.in_place(),
            self._interceptor.hooks_inside(),
            self._interceptor.active(recorder),
            self._finest.active(recorder.note_inner),
            _restored_generators(),
            quiet(),
            torch.inference_mode(False),
            torch.enable_grad(),
            recorder.taints,
        ):
            put_back(self._initial.values())
            try:
                # A context of its own, as for a stage's run.
                result = copy_context().run(self._model, *args, **kwargs)
            except _CANNOT_RUN_ON_FAKES as error:
                if recorder.calls and not self._uncalled(recorder):
                    # Only glue follows (a loss that looks at values, say): it runs for real, on the last stage, and
                    # can use what local variables hold.
                    return recorder.finish(_locals(error))
                last = recorder.calls[-1].name if recorder.calls else "none yet"
                raise PartitionError(
                    f"the forward of {type(self._model).__name__} branches on a computed value "
                    f"after unit {last!r} ({error}). Move that branch into a block, or use pp_size=1."
                ) from error
            recorder.taints.refuse_strays(result)
        for slot in recorder.attributes_before:
            self._initial.setdefault((id(slot[0]), slot[1]), slot)
        return recorder.finish(result)

    def _uncalled(self, recorder: "_Recorder") -> set[str]:
        """Members of lists that have parameters and did not run; of other modules, glue may use the weights alone."""
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
    """The local variables of every function that an exception left, but the one that caught it.

    Inside an operation, its arguments are the last: what torch does with them there also holds all that it ever cached.
    """
    frames = []
    step = error.__traceback__
    while step is not None:
        frames.append(dict(step.tb_frame.f_locals))
        step = step.tb_next if step.tb_frame.f_code is not _OPERATION else None
    return frames[1:]


def in_checkpoint() -> bool:
    """Whether this runs inside activation checkpointing, so that it will be run again in the backward pass."""
    return _runs_inside(_CHECKPOINT)


def _runs_inside(*functions: CodeType) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in functions:
            return True
        frame = frame.f_back
    return False


@contextmanager
def _restored_generators() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield


class _Recorder:
    """The unit handler of a trace."""

    def __init__(
        self,
        model: nn.Module,
        fakes: Fakes,
        unit_parameters: dict[str, tuple[str, ...]],
        memo: Memo,
        count_flops: bool,
        watch: Watch | None,
    ):
        self._model = model
        self._memo = memo
        self._originals = fakes.originals
        self.calls: list[UnitCall] = []
        self.taints = TaintMode()
        self._unit_parameters = unit_parameters
        self._count_flops = count_flops
        self._watch = watch
        self.attributes_before: list[Slot] = []
        self._depth = 0
        self._occurrences: dict[str, int] = {}
        self._outputs: list[tuple[UnitCall, int, Tensor, int]] = []
        for parameter in fakes.parameters:
            self.taints.mark(parameter, [fakes.names[id(parameter)]])
        for buffer in fakes.buffers:
            self.taints.mark(buffer, [])

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._depth:
            # A unit that calls another one holds that one's parameters too.
            self.calls[-1].parameters += self._unit_parameters[name]
            return forward(*args, **kwargs)
        if not torch.is_grad_enabled() and _runs_inside(_REENTRANT):
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
        versions = [argument._version for argument in arguments]
        given = Given((args, kwargs))
        output, left, added = self._recall(call, forward, args, kwargs, given)
        call.changed, call.left, call.added = given.changed(), tuple(left), tuple(added)
        leaves, call.tree = flatten((given.refer(output), given.changes(call.changed), left, added))
        call.refers = any(isinstance(leaf, Known) for leaf in leaves)
        places = {id(argument): place for place, argument in enumerate(arguments)}
        call.arguments = {number: places[id(leaf)] for number, leaf in enumerate(leaves) if id(leaf) in places}
        for place in places.values():
            if arguments[place]._version != versions[place] and place not in call.arguments.values():
                call.arguments[len(leaves)] = place
                leaves.append(arguments[place])
        changed = {n for n, place in call.arguments.items() if arguments[place]._version != versions[place]}
        first: dict[int, int] = {}
        call.leaves = tuple(
            Same(first[id(leaf)])
            if isinstance(leaf, Tensor) and first.setdefault(id(leaf), number) != number
            else self._record(call, number, leaf, number in changed)
            for number, leaf in enumerate(leaves)
        )
        return output

    def note_inner(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The handler of the finest units: writes down which of them a unit calls."""
        if self.calls and self._depth == 1:
            self.calls[-1].inner += (name,)
            self._depth += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._depth -= 1
        return forward(*args, **kwargs)

    def _recall(
        self, call: UnitCall, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], given: Given
    ) -> tuple[Any, Mapping[Key, Any], Mapping[Key, Any]]:
        """What the unit returns; from memory, where an equal one was run on arguments of the same kind.

        And the attributes of its modules that it set or added to.
        """
        leaves, _ = flatten((args, kwargs))
        arguments = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        hides = any(map(may_hide_tensors, leaves))
        key = self._memo.key(call.name, args, kwargs)
        known = None if hides else self._memo.recall(key, call.name, arguments)
        if known is not None:
            output, call.flops, call.inner = known
            return output, {}, {}
        attributes = Attributes(self._model.get_submodule(call.name))
        versions = [argument._version for argument in arguments]
        output, used = self._run(call, forward, args, kwargs, given)
        shown = {id(argument) for argument in arguments}
        hidden = {s for at, sources in used.items() if at not in shown for s in sources if s not in call.parameters}
        call.sources |= hidden
        left, added = attributes.set_since(), attributes.added_to()
        self.attributes_before += attributes.before(left)
        own = call.parameters == self._unit_parameters[call.name] and not (hidden or hides or left or added)
        if own and not given.changed() and versions == [argument._version for argument in arguments]:
            self._memo.remember(key, call.name, output, leaves, call.flops, call.inner)
        return output, left, added

    def _run(
        self, call: UnitCall, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], given: Given
    ) -> tuple[Any, Mapping[int, frozenset[Source]]]:
        """What the unit returns, and the sources of the tensors that it used, by ``id``."""
        self._depth += 1
        objects = Belongings((args, kwargs))
        counter = flop_counter() if self._count_flops else None
        try:
            with self.taints.paused(call.name) as used, counter or nullcontext():
                try:
                    output = forward(*args, **kwargs)
                except RuntimeError as error:  # what fakes cannot do, and kernels without a fake version
                    call.inner = ()
                    objects.restore()
                    given.restore()
                    try:
                        module = self._model.get_submodule(call.name)
                        output = rehearse(module, (forward, args, kwargs), self._originals)
                    except Exception:
                        raise error from None
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
            return Elsewhere(call.name, leaf)
        value = Value(len(self.calls) - 1, number)
        if changed:
            self.taints.written(leaf, [value])
        if changed or number not in call.arguments:
            self.taints.mark(leaf, [value])
        self._outputs.append((call, number, leaf, leaf._version))
        return TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)

    def finish(self, result: Any) -> Trace:
        for call, place, leaf, version in self._outputs:
            if leaf._version != version:
                call.written |= {place}
        return Trace(tuple(self.calls), self.taints.sources(result))
