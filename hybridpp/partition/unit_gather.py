"""Gather the weights of each unit around its forward and its backward pass, and free them in between (ZeRO 3)."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridpp.errors import UnlikeCallsError
from hybridpp.module_adapter import Forward
from hybridpp.nn.deferred_tensor import MadeWhenRead
from hybridpp.nn.torch_private import DisableTorchFunctionSubclass, base_of, call_after_backward, current_graph_task_id
from hybridpp.partition.containers import tensors_in

# Stands, in the place of a unit, for the parameters that no unit has for itself.
REST = -1
# Of the numbers of nodes, in their metadata.
_KEY, _KEYS = "hybridpp.unit_gather", count()


class UnitWeights(Protocol):
    """Weights that are gathered by unit. Units are numbered; :data:`REST` is for what no unit has for itself."""

    def start_unit(self, unit: int, user: object) -> None:
        """Start to gather the weights of a unit for a user. Collective: all replicas."""

    def wait_unit(self, unit: int) -> None:
        """Wait until they are there."""

    def release_unit(self, unit: int, user: object) -> None:
        """End a use; the last one frees them."""

    def shares_memory(self, unit: int, tensor: Tensor) -> bool:
        """Whether a tensor lies in the buffers of a unit's weights."""

    def move_to_rest(self, parameter: nn.Parameter, user: object) -> Collection[str]:
        """If a parameter is not there, gather it for a user, and later with the rest. Collective: all replicas.

        Returns:
            The names of all parameters that moved with it.
        """

    def move_unit_to_rest(self, unit: int) -> Collection[str]:
        """Gather a unit's weights with the rest from now on; returns the names of its parameters."""


class _PassOrder:
    """The order in which the passes of one kind use units.

    Attributes:
        events: of the running pass, so far: units, each with whether a call of it was begun (True), ended (False), or
            was the last one that ended (None).
        last: those of the last pass.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, bool | None]] = []
        self.last: list[tuple[int, bool | None]] = []
        self._next: dict[int, int] = {}

    def following(self, unit: int) -> int | None:
        """The unit that followed this one in the last pass."""
        return self._next.get(unit)

    def end(self) -> None:
        """End the pass."""
        begun = [unit for unit, is_begun in self.events if is_begun]
        self._next = dict(pairwise(begun))
        self.last, self.events = self.events, []


class _BackwardUse(NamedTuple):
    """What a backward pass uses.

    Attributes:
        unit: its number.
        model_call: that its forward ran in.
        left: keys of the nodes of its inputs that the pass has not reached.
        task: of autograd's engine.
    """

    unit: int
    model_call: "_ModelCall"
    left: set[int]
    task: int


class _ModelCall:
    """The calls of units in one call of the model. Only hooks of autograd's graph hold it, for as long as that lives.

    Attributes:
        num_left: how many calls of each unit the running backward pass has not left.
    """

    def __init__(self) -> None:
        self.num_left: dict[int, int] = {}
        self._num_calls: dict[int, int] = {}

    def add(self, unit: int) -> None:
        """Note a call, of which there will be a backward pass."""
        self._num_calls[unit] = self.num_left[unit] = self._num_calls.get(unit, 0) + 1

    def leave(self, unit: int) -> bool:
        """Note that a backward pass has left a call; returns whether it has left all. Then another pass may begin."""
        left = self.num_left.get(unit, 1) - 1
        self.num_left[unit] = left or self._num_calls.get(unit, 1)
        return not left


class UnitGather:
    """Gathers weights where units run.

    A unit's weights are gathered before its forward and freed after it; gathered again when the backward pass reaches
    one of its outputs, and freed when that has reached all of its inputs. Meanwhile those of the unit that followed in
    the last such pass are on their way. All replicas must call units in the same order.

    Args:
        weights: gathers them.
        units: the number of each unit that gathers, by name.
        learns: whether parameters of units that code outside of them reads are found in the first call, and gathered
            with the rest.

    Attributes:
        after_backward: called with the number of a unit when a backward pass is done with it: with all of its calls in
            one call of the model; None: nothing is.
        after_move: called with the names of parameters that are gathered with the rest from now on; None: nothing is.
    """

    def __init__(self, weights: UnitWeights, units: Mapping[str, int], *, learns: bool = True):
        self._weights = weights
        self._units = units
        self._forward, self._backward = _PassOrder(), _PassOrder()
        self._held: dict[object, _BackwardUse] = {}
        # The unit whose weights are on their way.
        self._ahead: int | None = None
        self._learns = learns
        # Calls that returned a part of a unit's weights.
        self._kept: list[object] = []
        self.after_backward: Callable[[int], None] | None = None
        self.after_move: Callable[[Collection[str]], None] | None = None
        # The running call of the model.
        self._model_call = _ModelCall()
        self._is_in_model = self._is_copy = False

    def __deepcopy__(self, memo: Any) -> "UnitGather":
        """For a copy of the model, which has all weights itself."""
        copied = UnitGather(self._weights, {})
        copied._is_copy = True
        return copied

    def around_unit(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Call a unit's forward with its weights."""
        unit = self._units.get(name)
        return forward(*args, **kwargs) if unit is None else self._run(unit, forward, args, kwargs)

    def around_model(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model's forward with the weights that no unit has for itself."""
        if self._is_copy or self._is_in_model or _is_in_backward():
            return forward(*args, **kwargs)
        self._drop_interrupted()
        if self._forward.events:  # an error ended the last call
            self._end(self._forward)
        self._is_in_model, self._model_call = True, _ModelCall()
        try:
            result = self._run(REST, forward, args, kwargs)
        finally:
            self._is_in_model, self._model_call = False, _ModelCall()
        self._end(self._forward)
        return result

    def _run(self, unit: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = object()
        # Recomputation runs units within a backward pass, which has gathered them already.
        self._start(unit, call, None if _is_in_backward() else self._forward)
        is_kept = False
        # Before the forward, which may write to its inputs in place.
        inputs = _nodes(tensors_in((args, kwargs)))
        try:
            with self._learning(call) if unit == REST and self._learns else nullcontext():
                result = forward(*args, **kwargs)
            outputs = [_held_here(output) for output in tensors_in(result)]
            is_kept = any(self._weights.shares_memory(unit, output) for output in outputs)
            if torch.is_grad_enabled():
                self._watch(unit, outputs, inputs)
        finally:
            if is_kept:
                # Whoever has that result may read it at any time.
                self._moved(self._weights.move_unit_to_rest(unit))
                self._kept.append(call)
            else:
                self._weights.release_unit(unit, call)
        return result

    def release_kept(self) -> None:
        """Free weights that lay in what units returned, or that an error in a backward pass left, after an update."""
        self._drop_interrupted()
        while self._kept:
            self._weights.release_unit(REST, self._kept.pop())

    def _moved(self, names: Collection[str]) -> None:
        if names and self.after_move is not None:
            self.after_move(names)

    @contextmanager
    def _learning(self, call: object) -> Iterator[None]:
        with _ReadsParameters(lambda parameter: self._moved(self._weights.move_to_rest(parameter, call))):
            yield
        self._learns = False

    def _start(self, unit: int, user: object, order: _PassOrder | None) -> None:
        self._weights.start_unit(unit, user)
        if order is not None:
            self._drop_ahead()
            order.events.append((unit, True))
            self._ahead = order.following(unit)
            if self._ahead is not None:
                self._weights.start_unit(self._ahead, self)
        self._weights.wait_unit(unit)

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._weights.release_unit(self._ahead, self)
            self._ahead = None

    def _end(self, order: _PassOrder) -> None:
        self._drop_ahead()
        order.end()

    def _drop_interrupted(self) -> None:
        """Free what backward passes used that an error has ended: it would be old after the next update."""
        if self._held and not _is_in_backward():
            self._drop_ahead()
            for call, use in self._held.items():
                self._weights.release_unit(use.unit, call)
            self._held.clear()
            self._backward.events.clear()

    def _watch(self, unit: int, outputs: list[Tensor], inputs: set[Any]) -> None:
        """Gather the weights again when a backward pass reaches an output, until it has reached all inputs.

        Args:
            unit: its number.
            outputs: of the call.
            inputs: the nodes that made its inputs.
        """
        entries = _nodes(outputs)
        exits = inputs - entries
        # Who writes to a view in place gives it another node, which leads to that of the tensor that it is a view of.
        entries |= _nodes([base for one in outputs if (base := base_of(one)) is not None]) - exits
        # Hooks know nodes by their keys only: a hook that referred to its node would keep the graph for ever.
        call, exit_keys, model_call = object(), frozenset(map(_key, exits)), self._model_call
        if entries and not _is_in_backward():
            model_call.add(unit)
        for node in entries:
            node.register_prehook(partial(self._on_entry, unit, model_call, call, exit_keys, _key(node)))
        for node in exits:
            node.register_prehook(partial(self._on_exit, _key(node)))

    def _on_entry(
        self, unit: int, model_call: _ModelCall, call: object, exit_keys: frozenset[int], node_key: int, _: Any
    ) -> None:
        # The output of one unit is the input of another, which makes room first.
        self._on_exit(node_key, None)
        if call not in self._held:
            task = current_graph_task_id()
            if all(use.task != task for use in self._held.values()):
                call_after_backward(partial(self._end_backward, task))
            self._held[call] = _BackwardUse(unit, model_call, set(exit_keys), task)
            self._start(unit, call, self._backward)

    def _on_exit(self, node_key: int, _: Any) -> None:
        for call, use in list(self._held.items()):
            if node_key in use.left:
                use.left.remove(node_key)
                if not use.left and use.unit != REST:
                    self._leave(call)

    def _leave(self, call: object) -> None:
        use = self._held.pop(call)
        self._weights.release_unit(use.unit, call)
        self._backward.events.append((use.unit, False))
        if use.model_call.leave(use.unit):
            self._backward.events.append((use.unit, None))
            self._ended(use.unit)

    def _ended(self, unit: int) -> None:
        """A backward pass is done with a unit."""
        if unit != REST and self.after_backward is not None:
            self.after_backward(unit)

    def _end_backward(self, task: int) -> None:
        for call in [call for call, use in self._held.items() if use.task == task]:
            self._leave(call)
        if not self._held:
            self._end(self._backward)

    def gather_as_others(self, *, backward: bool) -> None:
        """Take part in the gathers of a pass that only other replicas run, or that an error has ended here.

        Collective: all replicas.

        Raises:
            UnlikeCallsError: this rank has not run such a pass.
        """
        order = self._backward if backward else self._forward
        done = order.events
        if not order.last or order.last[: len(done)] != done:
            raise UnlikeCallsError(
                "an error ended the first pass of its kind on this rank, which so does not know what other replicas "
                "gather in it (zero_stage=3). Let the error end the process, and start again."
            )
        # The calls that use each unit: of the pass that was ended, then ours.
        users: dict[int, list[object]] = defaultdict(list)
        for call, use in self._held.items() if backward else ():
            users[use.unit].append(call)
        for unit, is_begun in order.last[len(done) :]:
            if is_begun:
                users[unit].append(object())
                self._start(unit, users[unit][-1], order)
            else:
                order.events.append((unit, is_begun))
            if is_begun is None:
                self._ended(unit)
            elif not (is_begun and backward):  # a forward uses no unit longer than its call
                self._weights.release_unit(unit, users[unit].pop())
        if backward:
            self._held.clear()
        self._end(order)

    def reset(self) -> None:
        """After an error in a step: forget what was used."""
        self._held.clear()
        self._kept.clear()
        self._ahead, self._is_in_model = None, False
        self._forward.events, self._backward.events = [], []


class _ReadsParameters(TorchFunctionMode):
    """Calls ``found`` with every parameter that a function of torch is called with."""

    def __init__(self, found: Callable[[nn.Parameter], None]):
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A shape, a dtype or an address needs no values, and the library sets ``.data``.
        if func is Tensor.data_ptr:
            return func(*args, **kwargs)
        if func.__name__ in ("__get__", "__set__") and not isinstance(result := func(*args, **kwargs), Tensor):
            return result
        for one in tensors_in((args, kwargs)):
            if isinstance(one, nn.Parameter):
                self._found(one)
        return func(*args, **kwargs)


def _held_here(tensor: Tensor) -> Tensor:
    """What a rank has of a tensor that is gathered from shards when it is read; else the tensor."""
    return getattr(tensor, "local", tensor) if isinstance(tensor, MadeWhenRead) else tensor


def _nodes(tensors: list[Tensor]) -> set[Any]:
    """The nodes of autograd's graph that made tensors."""
    with DisableTorchFunctionSubclass():
        return {node for one in map(_held_here, tensors) if (node := one.grad_fn) is not None}


def _key(node: Any) -> int:
    """A number of a node, which no other node has while the process lives.

    In torch 2.11, Python's object of a node goes when nobody holds it: a later one of the same node has another id,
    and one of another node may have this id. What is in ``metadata`` stays as long as the node.
    """
    key: int = node.metadata.setdefault(_KEY, next(_KEYS))
    return key


def _is_in_backward() -> bool:
    return current_graph_task_id() != -1
