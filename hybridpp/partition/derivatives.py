"""Derivatives that a forward computes (``torch.autograd.grad``): in a trace, and where a cut would divide them."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridpp.errors import PartitionError
from hybridpp.partition.containers import tensors_in

GRAD = signature(torch.autograd.grad)


@dataclass(frozen=True)
class Derivative:
    """A backward pass inside a forward.

    Attributes:
        position: the number of unit calls that began before it.
        call: the call of a unit that computes it; None: container code does.
        path: the calls that it may go back through.
    """

    position: int
    call: int | None
    path: frozenset[int]


def refuse_divided_derivatives(derivatives: Sequence[Derivative], names: Sequence[str], stages: Sequence[int]) -> None:
    """Refuse a cut through what a forward differentiates: a stage has the graph of its own calls only.

    Args:
        derivatives: of the forward.
        names: the unit of each call.
        stages: the stage of each call.

    Raises:
        PartitionError: one goes back through calls of another stage than those that compute it.
    """
    for derivative in derivatives:
        # Stages run container code up to their last call.
        at = {*stages[derivative.position :], stages[-1]}
        at = at if derivative.call is None else {stages[derivative.call]}
        foreign = sorted(call for call in derivative.path if {stages[call]} != at)
        if foreign:
            where = "container code" if derivative.call is None else f"unit {names[derivative.call]!r}"
            raise PartitionError(
                f"{where} computes a derivative inside the forward (torch.autograd.grad) that goes back through "
                f"{names[foreign[0]]!r} of stage {stages[foreign[0]]}, but it runs on stage "
                f"{', '.join(map(str, sorted(at)))}: autograd has the graph of one stage only. Use pp_size=1 (with "
                "tp_size, replicas or checkpointing where memory is short), or compute all of it inside one block."
            )


class MadeUpDerivatives(TorchFunctionMode):
    """While active, a forward may compute derivatives although some of its graph is missing: that part is made up."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.backward:
            return None
        if func is not torch.autograd.grad:
            return func(*args, **(kwargs or {}))
        options = GRAD.bind(*args, **(kwargs or {})).arguments
        outputs, inputs = tensors_in(options["outputs"]), tensors_in(options["inputs"])
        found: tuple[Tensor | None, ...] = (None,) * len(inputs)
        with suppress(RuntimeError):  # nothing of it is in the graph
            found = func(**{**options, "allow_unused": True, "materialize_grads": False})
        made_up = stand_ins(outputs, inputs, options)
        return tuple(made if one is None else one for one, made in zip(found, made_up, strict=True))


def stand_ins(outputs: Iterable[Tensor], inputs: Sequence[Tensor], options: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """What a derivative gives in a trace, whose graph has gaps: a fake for each input, computed from the outputs.

    Args:
        outputs: what is differentiated; fake.
        inputs: with respect to what.
        options: of ``torch.autograd.grad``.
    """
    anchor = sum((torch.view_as_real(one) if one.is_complex() else one).sum() for one in outputs) * 0.0
    made = tuple(torch.zeros_like(one) + anchor.to(one.dtype) for one in inputs)  # type: ignore[union-attr]  # a tensor
    if options.get("is_grads_batched"):
        size = tensors_in(options.get("grad_outputs"))[0].shape[0]
        made = tuple(one.expand(size, *one.shape).clone() for one in made)
    return made if options.get("create_graph") else tuple(one.detach() for one in made)
