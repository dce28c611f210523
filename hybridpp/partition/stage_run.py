"""Forward of one micro-batch through one stage."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.errors import PartitionError
from hybridpp.module_adapter import Forward
from hybridpp.nn.deferred_tensor import DeferredTensor
from hybridpp.nn.torch_private import pytree
from hybridpp.partition.absent import overwritten
from hybridpp.partition.calls import CallArguments, Same, TensorSpec, UnitCall
from hybridpp.partition.containers import ContainerSnapshot, flatten, tensors_in
from hybridpp.partition.module_outputs import AttributeDelta, AttributeKey
from hybridpp.partition.placeholders import Placeholders
from hybridpp.partition.plan import BoundarySharding, StagePlan
from hybridpp.partition.rng import UnitRng
from hybridpp.partition.taint import Value

Watcher = Callable[..., Any]


class StageDone(BaseException):
    """Leaves the model's forward after a stage's last unit; a BaseException, so that no ``except Exception`` stops
    it."""


class CheckpointedCall(NamedTuple):
    """A unit call that activation checkpointing may repeat: its index, and the random seed after it."""

    call_index: int
    seed_after: int


class StageRun:
    """The unit handler of a stage: own units run, units of other stages return received values or placeholders.

    Args:
        plan: of the stage.
        received: the values of ``plan.incoming``.
        placeholders: for values that were not received.
        rng: of the forward.
        modules: the units, by name.
        sharding: of ``plan.sharded``.
        reached_from: gives what hooks inside of a unit refer to.

    Attributes:
        checkpointed_calls: the calls that activation checkpointing may repeat, by unit and random seed.
        deltas: attributes that were set on modules of other stages' units, to be undone.
        watch: wraps the calls of own units, for diagnosis.
    """

    def __init__(
        self,
        plan: StagePlan,
        received: Sequence[Tensor],
        placeholders: Placeholders,
        rng: UnitRng,
        modules: Mapping[str, nn.Module],
        sharding: BoundarySharding | None = None,
        reached_from: Callable[[nn.Module], tuple[Any, ...]] = lambda _: (),
    ):
        self._plan, self._reached_from = plan, reached_from
        self._values: dict[Value, Tensor] = dict(zip(plan.incoming, received, strict=True))
        self._sharding = sharding
        self._outgoing_shards: dict[Value, Tensor] = {}
        self._placeholders = placeholders
        self._rng = rng
        self._modules = modules
        self._next = 0
        self._inside = False
        self.deltas: list[AttributeDelta] = []
        self.checkpointed_calls: dict[tuple[str, int], CheckpointedCall] = {}
        self.watch: Watcher | None = None
        if sharding is not None:
            self._gather_received(sharding)

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        index = self._next
        self._next += 1
        call = self._expect(index, name)
        if self.watch is not None:
            forward = functools.partial(self.watch, name, forward)
        if call is None or not call.checkpointed:
            return self._run(call, index, forward, (args, kwargs))
        seed = torch.default_generator.initial_seed()
        try:
            return self._run(call, index, forward, (args, kwargs))
        finally:
            self.checkpointed_calls[name, seed] = CheckpointedCall(index, torch.default_generator.initial_seed())

    def _run(self, call: UnitCall | None, index: int, forward: Forward, inputs: CallArguments) -> Any:
        if call is not None and not self.is_own(index):
            self._rng.skip(call.inner)
            result = self.remote_result(index, inputs)
            if index == self._plan.last_local:
                raise StageDone
            return result
        if call is None or index not in self._plan.calls_with_outgoing:
            output = self._local(forward, *inputs)
        else:
            output = self._run_with_outgoing(call, index, forward, inputs)
        if call is not None and index == self._plan.last_local:
            raise StageDone
        return output

    def _run_with_outgoing(self, call: UnitCall, index: int, forward: Forward, inputs: CallArguments) -> Any:
        """Run an own unit whose result contains outgoing values."""
        # Before the unit runs, because it may write to its arguments' containers.
        arguments = _arguments(call, inputs)
        given = self._given(call, inputs) if call.changed or call.uses_refs else ContainerSnapshot(())
        deltas = self._delta_of(call)
        output = self._local(forward, *inputs)
        if call.is_simple and isinstance(output, Tensor):
            self._keep_leaf(call, Value(index, 0), output)
            return output
        returned = given.to_refs(output) if call.uses_refs else output
        assigned = deltas.now() if deltas else ({}, {})
        self._keep(call, index, (returned, given.changes(call.changed), *assigned), arguments)
        return output

    def _given(self, call: UnitCall, inputs: CallArguments) -> ContainerSnapshot:
        """The containers that a call may write to."""
        return ContainerSnapshot(inputs, self._reached_from(self._modules[call.name]) if call.reaches else ())

    def _delta_of(self, call: UnitCall) -> AttributeDelta | None:
        if not call.assigned and not call.appended:
            return None
        return AttributeDelta(self._modules[call.name], call.assigned, call.appended)

    def _expect(self, index: int, name: str) -> UnitCall | None:
        if not self._plan.calls:
            return None
        expected = self._plan.calls[index].name if index < len(self._plan.calls) else "nothing"
        if expected != name:
            raise PartitionError(
                f"the forward called unit {name!r} where its trace had {expected!r}: it branches on values, not only "
                "on shapes. Move that branch into a block, or use pp_size=1."
            )
        return self._plan.calls[index]

    def is_in_unit(self) -> bool:
        """Whether a unit of this stage runs."""
        return self._inside

    def next_is_own(self) -> bool:
        """Whether this stage runs the next call."""
        return self._next < len(self._plan.calls) and self.is_own(self._next)

    def latest_is_own(self) -> bool:
        """Whether this stage ran the latest call."""
        return 0 < self._next <= len(self._plan.calls) and self.is_own(self._next - 1)

    def is_own(self, index: int) -> bool:
        """Whether a call is run by this stage."""
        return self._plan.stages[index] == self._plan.stage

    def _local(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside = True
        try:
            return forward(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
        finally:
            self._inside = False

    def remote_result(self, index: int, inputs: CallArguments) -> Any:
        """The result of a unit of another stage, which is not run."""
        call = self._plan.calls[index]
        if call.is_simple:
            return self._received_or_placeholder(call, Value(index, 0), {})
        arguments = _arguments(call, inputs)
        leaves: list[Any] = []
        for number, spec in enumerate(call.leaves):
            same = isinstance(spec, Same)
            leaves.append(
                leaves[spec.leaf] if same else self._received_or_placeholder(call, Value(index, number), arguments)
            )
        output, changes, assigned, appended = pytree.tree_unflatten(leaves[: call.tree.num_leaves], call.tree)
        deltas = self._delta_of(call)
        if deltas is not None:
            deltas.repeat(
                assigned if call.name not in self._plan.own_units else self._received_only(assigned, deltas), appended
            )
            self.deltas.append(deltas)
        if call.changed or call.uses_refs:
            given = self._given(call, inputs)
            given.repeat(call.changed, changes)
            output = given.from_refs(output)
        return output

    def _received_only(self, assigned: Mapping[AttributeKey, Any], deltas: AttributeDelta) -> dict[AttributeKey, Any]:
        """For a unit that this stage runs, too: received values only, so that placeholders do not replace the values of
        this stage's calls.

        An attribute that is None gets a placeholder, because the forward may test for None.
        """
        here = {id(value) for value in self._values.values()}
        now = deltas.now()[0]
        return {key: v for key, v in assigned.items() if now[key] is None or here.issuperset(map(id, tensors_in(v)))}

    def _received_or_placeholder(self, call: UnitCall, at: Value, arguments: Mapping[int, Any]) -> Any:
        spec = call.leaves[at.leaf]
        if not isinstance(spec, TensorSpec):
            return spec
        value = self._values.get(at)
        if at.leaf in call.arguments:
            # The unit returned its argument, or wrote to it, which all holders of that tensor must see.
            argument = arguments[at.leaf]
            return argument if value is None else overwritten(argument, value)
        if value is None:
            value = self._placeholders.get(spec)
        return value.clone() if at.leaf in call.written else value

    def _keep(self, call: UnitCall, index: int, output: Any, arguments: Mapping[int, Any]) -> None:
        """Store outgoing values."""
        leaves, tree = flatten(output)
        if tree != call.tree:
            # Then only the result has the traced structure, not the attributes set on modules.
            leaves = flatten(output[:1])[0]
        leaves = [*leaves, *[None] * call.tree.num_leaves][: call.tree.num_leaves]
        leaves += [arguments[number] for number in range(call.tree.num_leaves, len(call.leaves))]
        for number in range(len(call.leaves)):
            value = Value(index, number)
            if value in self._plan.outgoing_set:
                self._keep_leaf(call, value, leaves[number] if number < len(leaves) else None)

    def _keep_leaf(self, call: UnitCall, value: Value, leaf: Any) -> None:
        spec = call.leaves[value.leaf]
        if not isinstance(leaf, Tensor) or leaf.shape != spec.shape or leaf.dtype != spec.dtype:
            got = f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise PartitionError(
                f"unit {call.name!r} returned {got} where its trace had {spec.dtype} {spec.shape}: its result depends "
                "on values. Choose another cut, or use pp_size=1."
            )
        if self._sharding is not None and value in self._plan.sharded:
            shard = self._sharding.shard(leaf)
            # Later units of this stage may write to the tensor.
            self._outgoing_shards[value] = shard if value.call == self._plan.last_local else shard.clone()
            return
        # A subclass of Tensor may have no memory of its own; plain tensors are sent.
        is_own = value.leaf not in call.written and type(leaf) is Tensor
        self._values[value] = leaf if is_own else leaf.clone()

    def outgoing(self) -> list[Tensor]:
        """The values for the next stage, including those that only pass through."""
        return [
            self._outgoing_shards[v] if v in self._outgoing_shards else self._values[v] for v in self._plan.outgoing
        ]

    def _gather_received(self, sharding: BoundarySharding) -> None:
        """Replace received shards by unsharded values."""
        for value in self._plan.sharded & self._values.keys():
            shard = self._values[value]
            self._values[value] = sharding.unshard(shard, self._plan.calls[value.call].leaves[value.leaf])
            if value in self._plan.outgoing_set:
                self._outgoing_shards[value] = shard.clone()


def _arguments(call: UnitCall, inputs: CallArguments) -> dict[int, Any]:
    """The arguments that a call returns or writes to, by the leaf of its result."""
    if call.given is None:
        return {}
    leaves, tree = flatten(inputs)
    found = {leaf: leaves[index] for leaf, index in call.arguments.items() if tree == call.given}
    if all(isinstance(found.get(leaf), Tensor) for leaf in call.arguments):
        return found
    raise PartitionError(
        f"unit {call.name!r} returned or wrote to an argument in its trace that it was not given now: the model's code "
        "gives it other arguments, depending on values. Move that branch into a block, or use pp_size=1."
    )


def _plain(argument: Any) -> Any:
    """An argument of an own unit: a plain tensor, which compiled code takes, too."""
    return argument.values_now() if type(argument) is DeferredTensor else argument
