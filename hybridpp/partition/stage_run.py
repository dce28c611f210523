"""One pass of one micro-batch through the part of the model that a stage owns."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.errors import PartitionError
from hybridpp.partition.attributes import Key, Leavings
from hybridpp.partition.calls import Same, TensorSpec, UnitCall
from hybridpp.partition.dice import Dice
from hybridpp.partition.intercept import Forward
from hybridpp.partition.plan import Parts, StagePlan
from hybridpp.partition.recompute import Recomputable
from hybridpp.partition.structure import Given, flatten, tensors_in
from hybridpp.partition.taint import Value

_Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


Watcher = Callable[..., Any]


class StageDone(BaseException):
    """Leaves the model's forward after a stage's last unit; no ``except Exception`` on the way may stop it."""


class Placeholders:
    """Tensors that stand for values nobody here reads: right in shape, dtype and device, without memory of their own.

    Floating-point ones are NaN: if one is read after all, the loss says so.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._scalars: dict[torch.dtype, Tensor] = {}

    def get(self, spec: TensorSpec) -> Tensor:
        """A read-only tensor of the given shape and dtype."""
        if spec.dtype not in self._scalars:
            value = float("nan") if spec.dtype.is_floating_point or spec.dtype.is_complex else 0
            self._scalars[spec.dtype] = torch.full((), value, dtype=spec.dtype, device=self._device)
        return self._scalars[spec.dtype].expand(spec.shape)


class Again(NamedTuple):
    """A unit call that activation checkpointing may repeat: its place, and the random seed behind it."""

    place: int
    seed_behind: int


class StageRun:
    """The unit handler of a stage: own units run, foreign ones return what arrived, or a placeholder.

    Args:
        plan: of the stage.
        received: the values of ``plan.incoming``.
        placeholders: for the rest.
        dice: of the forward.
        recomputable: units of which only the inputs are kept.
        modules: the units, by name.
        parts: what of ``plan.in_parts`` travels.

    Attributes:
        again: what activation checkpointing may call again, by unit and random seed.
        leavings: what units of other stages were made to leave on their modules, to be undone.
        watch: runs own units, if someone wants to look at them.
    """

    def __init__(
        self,
        plan: StagePlan,
        received: Sequence[Tensor],
        placeholders: Placeholders,
        dice: Dice,
        recomputable: Recomputable,
        modules: Mapping[str, nn.Module],
        parts: Parts | None = None,
    ):
        self._plan = plan
        self._values: dict[Value, Tensor] = dict(zip(plan.incoming, received, strict=True))
        self._parts = parts
        self._leaving: dict[Value, Tensor] = {}
        self._placeholders = placeholders
        self._dice = dice
        self._recomputable = recomputable
        self._modules = modules
        self._next = 0
        self._inside = False
        self.leavings: list[Leavings] = []
        self.again: dict[tuple[str, int], Again] = {}
        self.watch: Watcher | None = None
        if parts is not None:
            self._take_parts(parts)

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        place = self._next
        self._next += 1
        call = self._expect(place, name)
        forward = self._recomputable.wrapped(name, forward)
        if self.watch is not None:
            forward = functools.partial(self.watch, name, forward)
        if call is None or not call.checkpointed:
            return self._run(call, place, forward, (args, kwargs))
        seed = torch.default_generator.initial_seed()
        try:
            return self._run(call, place, forward, (args, kwargs))
        finally:
            self.again[name, seed] = Again(place, torch.default_generator.initial_seed())

    def _run(self, call: UnitCall | None, place: int, forward: Forward, inputs: _Inputs) -> Any:
        if call is not None and not self.is_own(place):
            self._dice.skip(call.inner)
            return self.foreign(place, inputs)
        if call is None or place not in self._plan.observed:
            output = self._local(forward, *inputs)
        else:
            output = self._observed(call, place, forward, inputs)
        if call is not None and place == self._plan.last_local:
            raise StageDone
        return output

    def _observed(self, call: UnitCall, place: int, forward: Forward, inputs: _Inputs) -> Any:
        """Run an own unit of whose result something must travel on."""
        # Before it runs: it may write to the containers it is given.
        arguments = [] if call.is_simple else tensors_in(inputs)
        given = Given(inputs if call.changed or call.refers else ())
        leavings = self._leavings_of(call)
        output = self._local(forward, *inputs)
        if call.is_simple and isinstance(output, Tensor):
            self._keep_leaf(call, Value(place, 0), output)
            return output
        returned = given.refer(output) if call.refers else output
        left = leavings.now() if leavings else ({}, {})
        self._keep(call, place, (returned, given.changes(call.changed), *left), arguments)
        return output

    def _leavings_of(self, call: UnitCall) -> Leavings | None:
        if not call.left and not call.added:
            return None
        return Leavings(self._modules[call.name], call.left, call.added)

    def _expect(self, place: int, name: str) -> UnitCall | None:
        if not self._plan.calls:
            return None
        expected = self._plan.calls[place].name if place < len(self._plan.calls) else "nothing"
        if expected != name:
            raise PartitionError(
                f"the forward called unit {name!r} where its trace had {expected!r}: it branches on values, not only "
                "on shapes. Move that branch into a block, or use pp_size=1."
            )
        return self._plan.calls[place]

    def is_own(self, place: int) -> bool:
        """Whether a call is run by this stage."""
        return self._plan.stages[place] == self._plan.stage

    def _local(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = False

    def foreign(self, place: int, inputs: _Inputs) -> Any:
        """What a unit of another stage returns; it is not run."""
        call = self._plan.calls[place]
        if call.is_simple:
            return self._stand_in(call, Value(place, 0), [])
        arguments = tensors_in(inputs)
        leaves: list[Any] = []
        for number, spec in enumerate(call.leaves):
            same = isinstance(spec, Same)
            leaves.append(leaves[spec.leaf] if same else self._stand_in(call, Value(place, number), arguments))
        output, changes, left, added = pytree.tree_unflatten(leaves[: call.tree.num_leaves], call.tree)
        leavings = self._leavings_of(call)
        if leavings is not None:
            leavings.repeat(left if call.name not in self._plan.own_units else self._arrived(left), added)
            self.leavings.append(leavings)
        if call.changed or call.refers:
            given = Given(inputs)
            given.repeat(call.changed, changes)
            output = given.resolve(output)
        return output

    def _arrived(self, left: Mapping[Key, Any]) -> dict[Key, Any]:
        """Those that are no placeholders; of a unit that also runs here, which may have made what they stand for."""
        here = {id(value) for value in self._values.values()}
        return {key: value for key, value in left.items() if here.issuperset(map(id, tensors_in(value)))}

    def _stand_in(self, call: UnitCall, at: Value, arguments: list[Tensor]) -> Any:
        spec = call.leaves[at.leaf]
        if not isinstance(spec, TensorSpec):
            return spec
        value = self._values.get(at)
        if at.leaf in call.arguments:
            # The unit returned its argument, or wrote to it: whoever holds it must see that.
            argument = arguments[call.arguments[at.leaf]]
            return argument if value is None else argument.copy_(value)
        if value is None:
            value = self._placeholders.get(spec)
        return value.clone() if at.leaf in call.written else value

    def _keep(self, call: UnitCall, place: int, output: Any, arguments: list[Tensor]) -> None:
        """Remember what must travel on."""
        leaves, tree = flatten(output)
        if tree != call.tree:
            # Only what it returned is in its place then, not what it left on its modules.
            leaves = flatten(output[:1])[0]
        leaves = [*leaves, *[None] * call.tree.num_leaves][: call.tree.num_leaves]
        leaves += [arguments[call.arguments[number]] for number in range(call.tree.num_leaves, len(call.leaves))]
        for number in range(len(call.leaves)):
            value = Value(place, number)
            if value in self._plan.leaving:
                self._keep_leaf(call, value, leaves[number] if number < len(leaves) else None)

    def _keep_leaf(self, call: UnitCall, value: Value, leaf: Any) -> None:
        spec = call.leaves[value.leaf]
        if not isinstance(leaf, Tensor) or leaf.shape != spec.shape or leaf.dtype != spec.dtype:
            got = f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise PartitionError(
                f"unit {call.name!r} returned {got} where its trace had {spec.dtype} {spec.shape}: its result "
                "depends on values. Put the cut elsewhere, or use pp_size=1."
            )
        if self._parts is not None and value in self._plan.in_parts:
            part = self._parts.part(leaf)
            # Units behind it on this stage may write to theirs.
            self._leaving[value] = part if value.call == self._plan.last_local else part.clone()
            return
        # A subclass of Tensor may stand for something else than memory of its own; what travels is plain.
        is_own = value.leaf not in call.written and type(leaf) is Tensor
        self._values[value] = leaf if is_own else leaf.clone()

    def outgoing(self) -> list[Tensor]:
        """The values for the next stage, own ones and those that pass through."""
        return [self._leaving[v] if v in self._leaving else self._values[v] for v in self._plan.outgoing]

    def _take_parts(self, parts: Parts) -> None:
        """Let what arrived in parts look whole."""
        for value in self._plan.in_parts & self._values.keys():
            part = self._values[value]
            self._values[value] = parts.whole(part, self._plan.calls[value.call].leaves[value.leaf])
            if value in self._plan.leaving:
                self._leaving[value] = part.clone()
