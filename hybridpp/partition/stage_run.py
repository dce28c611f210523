"""One pass of one micro-batch through the part of the model that a stage owns."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hybridpp.errors import PartitionError
from hybridpp.partition.dice import Dice
from hybridpp.partition.intercept import Forward
from hybridpp.partition.plan import StagePlan
from hybridpp.partition.taint import Value, tensors_in
from hybridpp.partition.trace import TensorSpec, UnitCall


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


class StageRun:
    """The unit handler of a stage: own units run, foreign ones return what arrived, or a placeholder."""

    def __init__(self, plan: StagePlan, received: Sequence[Tensor], placeholders: Placeholders, dice: Dice):
        self._plan = plan
        self._values: dict[Value, Tensor] = dict(zip(plan.incoming, received, strict=True))
        self._placeholders = placeholders
        self._dice = dice
        self._last_local = plan.last_local
        self._outgoing = set(plan.outgoing)
        self._next = 0
        self._inside = False

    def __call__(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        place = self._next
        self._next += 1
        call = self._expect(place, name)
        if call is not None and self._plan.stages[place] != self._plan.stage:
            self._dice.skip(call.inner)
            return self._foreign(call, place, tensors_in((args, kwargs)))
        output = self._local(forward, args, kwargs)
        if call is not None:
            self._keep(call, place, output, tensors_in((args, kwargs)))
            if place == self._last_local:
                raise StageDone
        return output

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

    def _local(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = False

    def _foreign(self, call: UnitCall, place: int, arguments: list[Tensor]) -> Any:
        leaves = [self._stand_in(call, Value(place, number), arguments) for number in range(len(call.leaves))]
        return pytree.tree_unflatten(leaves[: call.tree.num_leaves], call.tree)

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
        leaves = pytree.tree_leaves(output)
        leaves += [arguments[call.arguments[number]] for number in range(call.tree.num_leaves, len(call.leaves))]
        for number, spec in enumerate(call.leaves):
            value = Value(place, number)
            if value not in self._outgoing:
                continue
            leaf = leaves[number] if number < len(leaves) else None
            if not isinstance(leaf, Tensor) or tuple(leaf.shape) != spec.shape or leaf.dtype != spec.dtype:
                got = f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
                raise PartitionError(
                    f"unit {call.name!r} returned {got} where its trace had {spec.dtype} {spec.shape}: its result "
                    "depends on values. Put the cut elsewhere, or use pp_size=1."
                )
            self._values[value] = leaf.clone() if number in call.written else leaf

    def outgoing(self) -> list[Tensor]:
        """The values for the next stage, own ones and those that pass through."""
        return [self._values[value] for value in self._plan.outgoing]
