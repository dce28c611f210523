"""Gather the weights of each unit around its forward and its backward pass, and free them in between (ZeRO 3)."""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, IntEnum, auto
from functools import partial
from itertools import count, islice, pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridpp.errors import UnlikeCallsError
from hybridpp.module_adapter import Forward
from hybridpp.nn.deferred_tensor import MadeWhenRead
from hybridpp.nn.force_eager import force_eager, may_hold_compiled_code
from hybridpp.nn.torch_private import (
    DisableTorchFunctionSubclass,
    base_of,
    call_after_backward,
    current_graph_task_id,
    pytree,
)
from hybridpp.nn.watcher import with_lost_weight
from hybridpp.partition.containers import tensors_in

# Stands, in the place of a unit, for the parameters that no unit has for itself.
REST = -1
# Of the numbers of nodes, in their metadata.
_KEY, _KEYS = "hybridpp.unit_gather", count()


class UnitWeights(Protocol):
    """Weights that are gathered by unit. Units are numbered; :data:`REST` is for what no unit has for itself."""

    def start_unit(self, unit: int, user: object, overdue: AbstractSet[object] = frozenset()) -> None:
        """Start to gather the weights of a unit for a user, again if only ``overdue`` users have them.

        Collective: all replicas, on which users that are not overdue correspond.
        """

    def is_there(self, unit: int) -> bool:
        """Whether the weights of a unit are there, so that nothing gathers them."""

    def wait_unit(self, unit: int) -> None:
        """Wait until they are there."""

    def release_unit(self, unit: int, user: object) -> None:
        """End a use; the last one frees them."""

    def shares_memory(self, unit: int, tensor: Tensor) -> bool:
        """Whether a tensor lies in the buffers of a unit's weights."""

    def absent_part(self, parameter: nn.Parameter) -> int | None:
        """The number of the part that a parameter is gathered with, the same on all replicas; None: it is there."""

    def move_to_rest(self, part: int, user: object) -> Collection[str]:
        """Gather a part for a user, and later with the rest, unless it is. Collective: all replicas.

        Returns:
            The names of all parameters that moved with it.
        """

    def move_unit_to_rest(self, unit: int) -> Collection[str]:
        """Gather a unit's weights with the rest from now on; returns the names of its parameters."""


class UnitGradients(Protocol):
    """The gradients of the parameters that units have for themselves."""

    @property
    def trained_units(self) -> AbstractSet[int]:
        """The units that have parameters which are trained."""

    def will_arrive(self, unit: int) -> bool:
        """Whether the backward pass that runs on this thread adds to gradients of a unit, before or after this."""

    def are_awaited(self, unit: int, *, from_any_pass: bool) -> bool:
        """Whether gradients of a unit are to come from the pass that runs; ``from_any_pass``: or from another."""


class _Kind(IntEnum):
    """What happens to a unit in a pass."""

    # It is called, in a backward pass to be recomputed: its weights are gathered, and freed right after the call.
    CALL = 0
    # A backward pass begins to use what a call beside the model used, which no other pass need go through.
    BEGIN_APART = 1
    # A backward pass begins to use it, ends to, and ends to where the graph that it made still reads the weights.
    BEGIN = 2
    END = 3
    KEEP = 4
    # A backward pass is done with all of its calls: its gradients can be reduced.
    DONE = 5
    # Code outside of units reads a parameter of a part, of which this has the number. It is gathered with the rest from
    # then on, so it is not expected again.
    READ = 6


class _Outcome(Enum):
    """What replicas did when they agreed on the next event: that of this one, another, or none, as all have ended."""

    OWN = auto()
    OTHER = auto()
    ENDED = auto()


_BEGINS = _Kind.BEGIN_APART, _Kind.BEGIN
_Event: TypeAlias = tuple[int, _Kind]
_NO_EVENT = -1.0
# Whether the script's next call of the model begins, or there is none before its backward pass.
_CALLS, _CALLS_NOT = -2.0, -3.0
# From here on downwards: what replicas call beside the model.
_APART = -4.0
Exchange: TypeAlias = Callable[[Sequence[float]], Sequence[Sequence[float]]]
"""Every replica's numbers, from this one's; collective."""


class _PassOrder:
    """What the passes of one kind do with units, in an order that all replicas have in common.

    Args:
        is_backward: whether these are backward passes.

    Attributes:
        events: of the running pass, so far.
        last: those of the last pass, which are expected again.
        needs_end: whether the end of a pass must be agreed on: a replica may call a unit that is not expected.
        is_begun: whether replicas have agreed on how the running pass begins.
        is_unlike: whether replicas came to unlike events in a pass: the end of each later one is agreed on.
    """

    def __init__(self, *, is_backward: bool) -> None:
        self._counted = _BEGINS if is_backward else (_Kind.CALL, *_BEGINS)
        self.events: list[_Event] = []
        self.last: list[_Event] = []
        self.needs_end = True
        self.is_begun = False
        self.is_unlike = False

    @property
    def expected(self) -> _Event | None:
        """What comes next; None: nothing that is known."""
        return self.last[len(self.events)] if len(self.events) < len(self.last) else None

    def expects(self, event: _Event) -> bool:
        """Whether an event is still to come."""
        return event in self.last[len(self.events) :]

    def following(self) -> int | None:
        """The unit that is expected to be gathered next."""
        rest = self.last[len(self.events) :]
        return next((unit for unit, kind in rest if kind <= _Kind.BEGIN), None)

    def gathered(self) -> set[int]:
        """The units of the last pass."""
        return {unit for unit, kind in self.last if kind <= _Kind.BEGIN}

    def end(self, units: Collection[int]) -> None:
        """End the pass; ``units`` are all that there are."""
        # What the script calls beside the model is not expected again: the pass may add to any unit's gradients then.
        self.last = [] if any(kind is _Kind.BEGIN_APART for _, kind in self.events) else self.events
        self.drop()
        used = [unit for unit, kind in self.last if kind in self._counted]
        is_each_once = len(used) == len(set(used)) and set(used).issuperset(units)
        self.needs_end = self.is_unlike or not is_each_once

    def forget(self) -> None:
        """Expect nothing."""
        self.last, self.needs_end = [], True

    def drop(self) -> None:
        """Forget the running pass."""
        self.events, self.is_begun = [], False


class _CallOrder:
    """The order in which replicas call units, as far as their forwards have shown it."""

    def __init__(self) -> None:
        self._later: defaultdict[int, set[int]] = defaultdict(set)

    def learn(self, calls: Sequence[Sequence[int]]) -> bool:
        """Take in what replicas have called in one forward; returns whether each unit has one place in it."""
        if any(len(set(own)) < len(own) for own in calls):
            return False
        for own in calls:
            for unit, following in pairwise(own):
                self._later[unit].add(following)
        return True

    def sorted(self, units: AbstractSet[int]) -> list[int]:
        """Units in the order of the calls; where none is known, by number."""
        left = set(self._later).union(*self._later.values(), units)
        found = []
        while left:
            last = set().union(*(self._later[unit] for unit in left))
            found.append(min(left - last or left))
            left.remove(found[-1])
        return [unit for unit in found if unit in units]


class _BackwardUse(NamedTuple):
    """What a backward pass uses.

    Attributes:
        unit: its number.
        model_call: that its forward ran in.
        left: keys of the nodes of its inputs that the pass has not reached.
        task: of autograd's engine.
        order: that the pass follows.
        is_read_later: whether the pass makes a graph of itself, which reads the weights again.
    """

    unit: int
    model_call: "_ModelCall"
    left: set[int]
    task: int
    order: "_PassOrder"
    is_read_later: bool


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
    the last such pass are on their way.

    Replicas may call other units than each other. All of them do what the last pass of the kind did, in its order: a
    replica that leaves out a unit takes part in its gather and its reduction all the same. What is not expected, at
    first everything, is agreed on: each replica says what comes next for it, and one such event happens on all of them.
    A pass ends on all replicas together, without a message where every unit was called once in the last one.

    Replicas with losses of other outputs go back through other units after alike forwards. Autograd comes to these in
    the reverse order of the forward, and so are they agreed on: of a pass through all, each other one is a part.

    Passes are of one kind that end units alike. A pass of a step is done with units, and reduces their gradients. One
    that the script runs itself (``torch.autograd.grad``, for a gradient penalty) brings no gradients, and is none of
    them: what it did is not expected of the next pass of a step.

    Args:
        weights: gathers them.
        units: the number of each unit that gathers, by name.
        learns: whether parameters of units that code outside of them reads are found, and gathered with the rest: in
            the first call, and, where units were left out in the last one, in the first on arguments of each structure.
        exchange: tells replicas' next events; None: there is one replica, or all do alike.

    Attributes:
        after_backward: called with the number of a unit when a backward pass is done with it: with all of its calls in
            one call of the model; None: nothing is.
        after_move: called with the names of parameters that are gathered with the rest from now on; None: nothing is.
        gradients: of the units' parameters; None: there is no optimizer.
    """

    def __init__(
        self,
        weights: UnitWeights,
        units: Mapping[str, int],
        *,
        learns: bool = True,
        exchange: Exchange | None = None,
    ):
        self._weights = weights
        self._units = units
        self._exchange = exchange
        self._call_order = _CallOrder()
        # The units that the running forward has called here; whether replicas have called unlike ones.
        self._own_calls: list[int] = []
        self._is_forward_unlike = False
        # Backward passes of one call of the model, and of several together.
        self._forward = _PassOrder(is_backward=False)
        self._backward, self._joint = _PassOrder(is_backward=True), _PassOrder(is_backward=True)
        # Those that bring no gradients of weights (for a penalty, for samples, of a loss that trains another model); of
        # them those that make a graph of themselves.
        self._through, self._differentiable = _PassOrder(is_backward=True), _PassOrder(is_backward=True)
        # Whether backward passes that begin now are a step's.
        self._is_in_step = False
        # Calls of the model that the script's own backward passes may reach; whether replicas tell each other of each.
        self._num_calls, self._tells_calls, self._are_calls_unlike = 0, True, False
        self._is_joint = self._is_ended = False
        # Units that a backward pass has gone through, and those that were called since the last update.
        self._with_backward: set[int] = set()
        self._called: set[int] = set()
        # Whether a forward since the last update was not as expected, so that its backward pass will not be either.
        self._is_unplanned = False
        self._held: dict[object, _BackwardUse] = {}
        # Tasks of autograd's engine that have reached units and run, the outermost first, with their orders.
        self._tasks: dict[int, _PassOrder] = {}
        # Uses of this replica's that have ended on the others; whether autograd has no more of the running pass to do.
        self._overdue: set[object] = set()
        self._is_pass_over = False
        # By unit, what stands for the uses of other replicas, in the running passes.
        self._served: dict[int, list[object]] = defaultdict(list)
        # The unit whose weights are on their way.
        self._ahead: int | None = None
        self._learns = learns
        # Structures of the arguments of calls in which it was looked for reads.
        self._learned: set[Hashable] = set()
        # Calls that returned a part of a unit's weights.
        self._kept: list[object] = []
        self.after_backward: Callable[[int], None] | None = None
        self.after_move: Callable[[Collection[str]], None] | None = None
        self.gradients: UnitGradients | None = None
        # Whether a call since the last update ran compiled code as it was written; what is recomputed of it must, too,
        # and so do the other calls, as one backward pass may reach all of them.
        self._ran_eagerly = False
        # The running call of the model.
        self._model_call = _ModelCall()
        self._is_in_model = self._is_copy = False

    def __deepcopy__(self, memo: Any) -> "UnitGather":
        """For a copy of the model, which has all weights itself."""
        copied = UnitGather(self._weights, {})
        copied._is_copy = True
        return copied

    @property
    def _backwards(self) -> tuple[_PassOrder, ...]:
        return self._backward, self._joint, self._through, self._differentiable

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
            self._drop_ahead()
            self._forward.drop()
        self._own_calls.clear()
        self._is_forward_unlike = False
        self._num_calls += torch.is_grad_enabled()
        self._is_in_model, self._model_call = True, _ModelCall()
        try:
            result = self._run(REST, forward, args, kwargs)
        finally:
            self._is_in_model, self._model_call = False, _ModelCall()
        self._end(self._forward)
        return result

    def begin_call(self) -> None:
        """Before a call of the model by the script. Collective: all replicas, as :meth:`finish_calls`."""
        if torch.is_grad_enabled() and not (self._is_copy or self._is_in_model or _is_in_backward()):
            self._tell(_CALLS)

    def finish_calls(self) -> None:
        """Before the script's own backward pass: take part in calls of the model that only other replicas make.

        Collective: all replicas, in the first pass, and until a pass has one call of each, if there were no others.
        """
        while self._tell(_CALLS_NOT):
            self._own_calls.clear()
            self._is_forward_unlike = False
            self._num_calls += 1
            self._end(self._forward)
        self._tells_calls &= self._num_calls != 1 or self._are_calls_unlike

    def _tell(self, own: float) -> bool:
        """Tell replicas whether a call of the model begins here; returns whether one does on any. Collective."""
        if self._exchange is None or not self._tells_calls:
            return False
        numbers = {number for (number,) in self._exchange([own])}
        self._are_calls_unlike |= len(numbers) > 1
        return _CALLS in numbers

    def _run(self, unit: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = object()
        if _is_in_backward() and not self._is_in_model and not self._is_used(unit):
            order = self._reached_order()
            self._reach((unit, _Kind.CALL), order)
            self._gather(unit, call, order)
        elif _is_in_backward() or not self._is_in_model:
            if not _is_in_backward():
                self._agree_apart(unit)
            self._weights.start_unit(unit, call)
            self._weights.wait_unit(unit)
        else:
            if unit != REST:
                self._own_calls.append(unit)
            self._reach((unit, _Kind.CALL), self._forward)
            self._gather(unit, call, self._forward)
        is_kept = False
        # Before the forward, which may write to its inputs in place.
        inputs = _nodes(tensors_in((args, kwargs)))
        try:
            is_new = unit == REST and self._is_new(args, kwargs)
            with self._learning(call) if is_new else self._as_before():
                result = forward(*args, **kwargs)
            outputs = [_held_here(output) for output in tensors_in(result)]
            is_kept = any(self._weights.shares_memory(unit, output) for output in outputs)
            if torch.is_grad_enabled():
                self._watch(unit, outputs, inputs)
        finally:
            # Whoever has that result may read it at any time.
            self._freed(unit, call, is_read_later=is_kept)
        return result

    def _agree_apart(self, unit: int) -> None:
        """Check that all replicas call the same unit beside the model, if its weights must be gathered. Collective."""
        if self._exchange is None or self._weights.is_there(unit):
            return
        # No number of an event.
        units = {int(_APART - number) for (number,) in self._exchange([_APART - unit])}
        if len(units) > 1:
            raise UnlikeCallsError(
                f"replicas call other modules at once, beside the model's forward: {self._name(unit)} on this rank, "
                "with zero_stage=3. Call the same on all replicas, on one of them inside of booster.unsharded(model), "
                "or use zero_stage=2."
            )

    def _is_used(self, unit: int) -> bool:
        """Whether the running passes use a unit's weights, on all replicas: what is recomputed need not gather them."""
        own = (call for call, use in self._held.items() if use.unit == unit)
        return bool(self._served[unit]) or any(call not in self._overdue for call in own)

    def release_kept(self) -> None:
        """Free weights that lay in what units returned, or that an error in a backward pass left, after an update."""
        self._drop_interrupted()
        self._is_unplanned = False
        self._called.clear()
        while self._kept:
            self._weights.release_unit(REST, self._kept.pop())

    def _moved(self, names: Collection[str]) -> None:
        if names and self.after_move is not None:
            self.after_move(names)

    def _is_new(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether code outside of units may read parameters that it has not read before.

        Where the last call left out no unit, other replicas expect this one to do as it did then.
        """
        if not self._learns or _is_in_backward() or (self._learned and not self._forward.needs_end):
            return False
        leaves, tree = pytree.tree_flatten((args, kwargs))
        switches = tuple(leaf if isinstance(leaf, bool | None) else type(leaf) for leaf in leaves)
        structure = tree, switches, torch.is_grad_enabled()
        is_new = structure not in self._learned
        self._learned.add(structure)
        return is_new

    @contextmanager
    def _learning(self, call: object) -> Iterator[None]:
        # A compiler would look into the function mode.
        is_eager = may_hold_compiled_code()
        self._ran_eagerly |= is_eager and torch.is_grad_enabled()
        with force_eager() if is_eager else nullcontext(), _ReadsParameters(partial(self._read, call)):
            yield

    def _read(self, call: object, parameter: nn.Parameter) -> None:
        """Gather what a parameter lies in that code outside of units reads. Collective: all replicas."""
        part = self._weights.absent_part(parameter)
        if part is not None:
            if self._exchange is not None:
                self._reach((part, _Kind.READ), self._forward)
            self._moved(self._weights.move_to_rest(part, call))

    def _as_before(self) -> AbstractContextManager[None]:
        """A context for a forward, which is recomputed as it was computed."""
        return force_eager() if self._ran_eagerly else nullcontext()

    def _reach(self, event: _Event, order: _PassOrder) -> bool:
        """Do what other replicas do before an event of this one; returns whether it happens. Collective: all replicas.

        All happen, but for reductions that not all replicas come to: these wait for the end of the pass.
        """
        is_reduction = event[1] is _Kind.DONE
        while True:
            expected = self._expected(order)
            is_known = expected is not None or not (order.needs_end or self._is_unplanned)
            if is_known and is_reduction and not order.expects(event):
                return False
            outcome = _Outcome.OWN if expected == event else _Outcome.OTHER
            if expected is None:
                outcome = self._agree(event, order)
            elif expected != event:
                self._serve(expected, order)
            if outcome is _Outcome.OWN:
                if event[1] is not _Kind.READ:
                    order.events.append(event)
                return True
            if expected is None and is_reduction:
                return False

    def _expected(self, order: _PassOrder) -> _Event | None:
        """What comes next; None: nothing that is known. After a forward that was not expected, no backward pass is."""
        return None if self._is_unplanned and order is not self._forward else order.expected

    def _agree(self, event: _Event | None, order: _PassOrder) -> _Outcome:
        """Let one of the replicas' next events happen; None: there is none here. Collective: all replicas."""
        if self._exchange is None:
            return _Outcome.ENDED if event is None else _Outcome.OWN
        own = _NO_EVENT if event is None else float((event[0] + 1) * len(_Kind) + event[1])
        numbers = {number for (number,) in self._exchange([own])}
        if numbers == {_NO_EVENT}:
            return _Outcome.ENDED
        order.is_unlike |= len(numbers) > 1
        self._is_forward_unlike |= order is self._forward and len(numbers) > 1
        self._is_unplanned |= order is self._forward
        if numbers == {own}:
            return _Outcome.OWN
        found = [(int(number) // len(_Kind) - 1, _Kind(int(number) % len(_Kind))) for number in numbers if number >= 0]
        # What frees weights, or is read outside of units, first; forwards from the first unit on, backwards from the
        # last call of the forward: the order in which autograd comes to them, whichever of them a pass goes through.
        ranks = self._ranks(order)
        chosen = min(found, key=lambda one: (one[1] <= _Kind.BEGIN, one[1] is _Kind.DONE, ranks(one[0]), one[1]))
        # A replica that is done with a unit alone tells what comes next for it before any begins another.
        if chosen[1] is _Kind.DONE:
            return _Outcome.OTHER
        if chosen == event:
            return _Outcome.OWN
        self._serve(chosen, order)
        return _Outcome.OTHER

    def _ranks(self, order: _PassOrder) -> Callable[[int], tuple[int, int]]:
        """What to sort units by where replicas do not come to the same next."""
        if order is self._forward:
            return lambda unit: (0, unit)
        # Where the model's outputs are not those of units, a pass comes to it at first.
        position = {unit: -index for index, (unit, _) in enumerate(self._forward.last)}
        return lambda unit: (-len(self._forward.last) if unit == REST else position.get(unit, 1), -unit)

    def _gather(self, unit: int, user: object, order: _PassOrder) -> None:
        self._weights.start_unit(unit, user, self._overdue)
        self._drop_ahead()
        self._ahead = None if self._expected(order) is None else order.following()
        if self._ahead is not None:
            self._weights.start_unit(self._ahead, self, self._overdue)
        self._weights.wait_unit(unit)

    def _serve(self, event: _Event, order: _PassOrder) -> None:
        """Take part in what other replicas do. Collective: all replicas."""
        unit, kind = event
        if kind is _Kind.READ:
            self._served[REST].append(user := object())
            self._moved(self._weights.move_to_rest(unit, user))
            return
        order.events.append(event)
        if kind <= _Kind.BEGIN:
            self._served[unit].append(user := object())
            self._gather(unit, user, order)
        if kind is _Kind.DONE:
            # For what no unit has, nothing is reduced here: how long it is used may change (an unfrozen embedding).
            if unit != REST and not self._is_pass_over and self._is_awaited(unit):
                raise UnlikeCallsError(
                    f"replicas call {self._name(unit)} unlike numbers of times in one step, or in unlike orders, which "
                    "zero_stage=3 cannot follow. Use zero_stage=2, or call it alike on all replicas."
                )
            self._ended(unit)
        elif kind not in _BEGINS and self._served[unit]:
            self._freed(unit, self._served[unit].pop(), is_read_later=kind is _Kind.KEEP)
        elif kind not in _BEGINS:
            # Others end here what lasts longer on this replica.
            own = (call for call, use in self._held.items() if use.unit == unit and call not in self._overdue)
            self._overdue.update(islice(own, 1))

    def _is_awaited(self, unit: int) -> bool:
        """Whether the running pass will still add to gradients of a unit here."""
        if self.gradients is None or not _is_in_backward():
            return False
        return self.gradients.are_awaited(unit, from_any_pass=False)

    def _freed(self, unit: int, user: object, *, is_read_later: bool) -> None:
        """End a use of a unit's weights, unless a graph reads them later."""
        if is_read_later:
            self._moved(self._weights.move_unit_to_rest(unit))
            self._kept.append(user)
        else:
            self._weights.release_unit(unit, user)

    def _name(self, unit: int) -> str:
        return next((name for name, number in self._units.items() if number == unit), "what no unit has for itself")

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._weights.release_unit(self._ahead, self)
            self._ahead = None

    def _begin(self, order: _PassOrder) -> None:
        """Begin a backward pass, which may go through units that none has gone through. Collective: all replicas.

        Where such units were called, one message tells whether it will, on any replica. Then it is not as expected,
        and what is expected must not happen: other gradients would be reduced before they are there.
        """
        if order.is_begun or order not in (self._backward, self._joint):
            return
        order.is_begun = True
        if self._exchange is None or self.gradients is None or self._is_unplanned or not order.last:
            return
        new = (self._called - self._with_backward) & self.gradients.trained_units
        if new:
            own = _is_in_backward() and any(map(self.gradients.will_arrive, new))
            self._is_unplanned = any(number for (number,) in self._exchange([float(own)]))

    def _end(self, order: _PassOrder) -> None:
        """End a pass. Collective: all replicas, where one may do what is not expected."""
        self._begin(order)
        is_unplanned = self._is_unplanned and order is not self._forward
        while (expected := self._expected(order)) is not None:
            self._serve(expected, order)
        if order.needs_end or is_unplanned:
            while self._agree(None, order) is not _Outcome.ENDED:
                pass
        self._drop_ahead()
        # Uses that replicas ended at once count as one.
        for unit, users in self._served.items():
            while users:
                self._weights.release_unit(unit, users.pop())
        if order is self._forward and self._is_forward_unlike:
            self._learn_order()
        order.end(self._units.values())
        gathered = order.gathered()
        if order is self._forward:
            self._called |= gathered
            # A unit of which there have been backward passes, and in the last one was none.
            backwards = [one.gathered() for one in (self._backward, self._joint) if one.last]
            self._is_unplanned |= any(not self._with_backward.intersection(gathered) <= one for one in backwards)
        elif order in (self._backward, self._joint):
            self._with_backward |= gathered

    def _learn_order(self) -> None:
        """After a forward with unlike calls: expect units in an order that fits to each replica's. Collective."""
        self._is_forward_unlike = False
        if self._exchange is None:
            return
        calls = self._exchange([float(unit) for unit in self._own_calls])
        is_simple = self._call_order.learn([[int(unit) for unit in own] for own in calls])
        if is_simple and all(kind is _Kind.CALL for _, kind in self._forward.events):
            units = {unit for unit, _ in self._forward.events}
            self._forward.events = [(unit, _Kind.CALL) for unit in (REST, *self._call_order.sorted(units - {REST}))]
            # These would be in the order that was known before.
            self.forget_backwards()

    def _drop_interrupted(self) -> None:
        """Free what backward passes used that an error has ended: it would be old after the next update."""
        if self._tasks and not _is_in_backward():
            self._drop_ahead()
            for call, use in self._held.items():
                self._weights.release_unit(use.unit, call)
            self._held.clear()
            self._tasks.clear()
            self._overdue.clear()
            for order in self._backwards:
                order.drop()

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
        begin = _Kind.BEGIN if self._is_in_model or _is_in_backward() else _Kind.BEGIN_APART
        if entries and not _is_in_backward():
            model_call.add(unit)
        for node in entries:
            node.register_prehook(partial(self._on_entry, (unit, begin), model_call, call, exit_keys, _key(node)))
        for node in exits:
            node.register_prehook(partial(self._on_exit, _key(node)))

    def _on_entry(
        self, event: _Event, model_call: _ModelCall, call: object, exit_keys: frozenset[int], node_key: int, _: Any
    ) -> None:
        unit = event[0]
        # The output of one unit is the input of another, which makes room first.
        self._on_exit(node_key, None)
        if call not in self._held:
            order = self._reached_order()
            task, is_read_later = current_graph_task_id(), torch.is_grad_enabled()
            self._held[call] = _BackwardUse(unit, model_call, set(exit_keys), task, order, is_read_later)
            if self._served[unit] and order is not self._forward:
                self._take_over(unit, call)
            else:
                self._reach(event, order)
                self._gather(unit, call, order)

    def _reached_order(self) -> _PassOrder:
        """The order that the running backward pass follows, which it begins. Collective: all replicas."""
        task = current_graph_task_id()
        # Once in a pass, which may be between units.
        if task not in self._tasks:
            self._tasks[task] = next(iter(self._tasks.values()), self._order_of_pass())
            call_after_backward(partial(self._end_backward, task))
        order = self._tasks[task]
        self._begin(order)
        return order

    def _order_of_pass(self) -> _PassOrder:
        """The order for a backward pass that begins: one of its kind, as replicas run the same code."""
        # A pass within the forward, for a gradient that the loss depends on, is a part of it.
        if self._is_in_model:
            return self._forward
        if not self._is_in_step:
            return self._differentiable if torch.is_grad_enabled() else self._through
        return self._joint if self._is_joint else self._backward

    def _take_over(self, unit: int, user: object) -> None:
        """Use weights that are there, as other replicas have begun to use them before this one did."""
        self._weights.start_unit(unit, user)
        self._weights.release_unit(unit, self._served[unit].pop())

    def _on_exit(self, node_key: int, _: Any) -> None:
        for call, use in list(self._held.items()):
            if node_key in use.left:
                use.left.remove(node_key)
                if not use.left and use.unit != REST:
                    self._leave(call)

    def _leave(self, call: object) -> None:
        use = self._held.pop(call)
        unit, order = use.unit, use.order
        if call not in self._overdue:
            self._reach((unit, _Kind.KEEP if use.is_read_later else _Kind.END), order)
        self._overdue.discard(call)
        self._freed(unit, call, is_read_later=use.is_read_later)
        is_done = use.model_call.leave(unit) and order is self._backward
        if is_done and unit != REST and self.gradients is not None:
            # A pass within this one, of a checkpoint or of a backward in Python, may not bring all gradients.
            is_nested = any(other.task != use.task for other in self._held.values())
            is_done = not self.gradients.are_awaited(unit, from_any_pass=is_nested)
        if is_done and self._reach((unit, _Kind.DONE), order):
            self._ended(unit)

    def _ended(self, unit: int) -> None:
        """A backward pass is done with a unit."""
        if unit != REST and self.after_backward is not None:
            self.after_backward(unit)

    def _end_backward(self, task: int) -> None:
        ended = [call for call, use in self._held.items() if use.task == task]
        self._is_pass_over = True
        try:
            for call in ended:
                self._leave(call)
        finally:
            self._is_pass_over = False
        order = self._tasks.pop(task)
        if not self._tasks and order is not self._forward:
            self._end(order)
            self._is_ended |= order in (self._backward, self._joint)

    @contextmanager
    def own_backward(self) -> Iterator[None]:
        """A context for a backward pass of a step that the script runs, of the model's calls since the last one."""
        self._is_joint, self._is_ended = self._num_calls > 1, False
        try:
            with self.backward_of_step(), force_eager() if self._ran_eagerly else nullcontext():
                yield
            # Its loss may have gone through no unit here.
            if not self._is_ended:
                self._end(self._joint if self._is_joint else self._backward)
        finally:
            self._num_calls, self._is_joint = 0, False

    @contextmanager
    def backward_of_step(self) -> Iterator[None]:
        """A context for a backward pass of a step, which adds to gradients of weights."""
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False

    def gather_as_others(self, *, backward: bool) -> None:
        """Take part in what a pass does that only other replicas run, or that an error has ended here.

        Collective: all replicas.
        """
        order = self._backward if backward else self._forward
        # What the pass used that was ended, in its order.
        for call, use in self._held.items() if backward else ():
            if call in self._overdue:
                self._weights.release_unit(use.unit, call)
            else:
                self._served[use.unit].append(call)
        self._held.clear()
        self._tasks.clear()
        self._overdue.clear()
        self._end(order)

    def forget_backwards(self) -> None:
        """Expect no backward pass as the last one, which reduced no gradients. Call it on all replicas."""
        for order in self._backwards:
            order.forget()

    def reset(self) -> None:
        """After an error in a step: forget what was used."""
        self._held.clear()
        self._tasks.clear()
        self._served.clear()
        self._overdue.clear()
        self._kept.clear()
        self._ahead, self._is_in_model, self._num_calls = None, False, 0
        for order in (self._forward, *self._backwards):
            order.drop()


class _ReadsParameters(TorchFunctionMode):
    """Calls ``found`` with every parameter that a function of torch is called with."""

    def __init__(self, found: Callable[[nn.Parameter], None]):
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = with_lost_weight(func, kwargs or {})
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


def is_watched(node: Any) -> bool:
    """Whether a node of autograd's graph made an input or an output of what weights were gathered for."""
    return _KEY in node.metadata


def _is_in_backward() -> bool:
    return current_graph_task_id() != -1
