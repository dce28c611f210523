"""Adapters of the user's criteria to the call ``criterion(outputs, inputs)``."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.pipeline.forward_signature import ForwardSignature, describe_arguments

_HOMES = ("torch.nn.functional", "torch.nn.modules.loss")
"""The modules of torch's losses, which are called with a tensor and its target, not with a batch."""

_REDUCTIONS = {"mean": False, "batchmean": False, "elementwise_mean": False, "sum": True}


class CriterionAdapter:
    """A user's criterion.

    Three forms are supported: ``criterion(outputs, inputs)``; ``criterion(outputs)``; and torch's losses
    (``nn.CrossEntropyLoss()``, ``F.mse_loss``), whose target is the last entry of a tuple, or the one entry of a dict
    that is no argument of the model's forward.

    Args:
        criterion: callable.
        signature: of the model's forward.

    Attributes:
        criterion: as given.
        identity: equal for functions that a script defines again at every step.
        sums: whether it returns a sum over samples instead of a mean, by its attribute ``reduction``.
        declares_reduction: whether it has such an attribute.
        num_items: counts the items of a micro-batch's inputs that the mean is over; None: items are samples.

    Raises:
        ConfigError: it has none of these forms, or does not reduce.
    """

    def __init__(self, criterion: Callable[..., Any], signature: ForwardSignature):
        self.criterion = criterion
        self.identity: Any = getattr(criterion, "__code__", criterion)
        self._signature = signature
        self._reduction = getattr(criterion, "reduction", None)
        self._is_torchs = takes_targets(criterion)
        self._num_arguments = 2 if self._is_torchs else _num_arguments(criterion)
        # Batches that the forward accepts completely: looked up for every micro-batch, checked once.
        self._taken_names: set[tuple[Any, ...]] = set()
        reduction = reduction_of(criterion)
        self.declares_reduction = reduction is not None
        self.sums = reduction is not None and _REDUCTIONS[reduction]
        self.num_items: Callable[[Any], Any] | None = getattr(criterion, "num_items", None)
        classes = _ClassWeights.of(criterion) if self._is_torchs and self.num_items is None else None
        if classes is not None:
            self.num_items = lambda inputs: classes.num_items(self._target(inputs))

    def is_of(self, criterion: Any) -> bool:
        """Whether this adapter was made for ``criterion``, whose reduction is unchanged."""
        return self.criterion is criterion and getattr(criterion, "reduction", None) == self._reduction

    def model_inputs(self, batch: Any) -> Any:
        """The part of a batch that the model is called with.

        Raises:
            ConfigError: a loss of torch's needs a target, and the batch has none.
            DataError: the forward cannot be called with it.
        """
        if not self._is_torchs:
            if type(batch) is dict and tuple(batch) in self._taken_names:
                return batch
            taken = self._signature.model_inputs(batch)
            if taken is batch and type(batch) is dict:
                self._taken_names.add(tuple(batch))
            return taken
        self._target(batch)
        if isinstance(batch, tuple | list):
            rest = without_target(batch)
            if self._signature.extra_entries(rest):
                raise self._unclear(
                    f"{len(batch)} entries, and a forward with {self._signature.num_positional} arguments"
                )
            return self._signature.model_inputs(rest)
        return self._signature.model_inputs(batch)

    def __call__(self, outputs: Any, inputs: Any) -> Any:
        """The criterion's result for a micro-batch."""
        if self._is_torchs and not isinstance(outputs, Tensor):
            raise self._unclear(f"a model that returns {type(outputs).__name__} instead of a tensor")
        given = (outputs, self._target(inputs)) if self._is_torchs else (outputs, inputs)[: self._num_arguments]
        try:
            return self.criterion(*given)
        except Exception as error:
            error.add_note(f"hybridpp: in {_name(self.criterion)}({', '.join(map(describe_arguments, given))})")
            raise

    def _target(self, batch: Any) -> Any:
        if isinstance(batch, tuple | list) and len(batch) > 1:
            return batch[-1]
        extra_entries = self._signature.extra_entries(batch)
        if isinstance(batch, dict) and len(extra_entries) == 1:
            return batch[extra_entries[0]]
        if isinstance(batch, dict):
            rest = (
                f", which are arguments of {self._signature.owner}.forward except {', '.join(extra_entries) or 'none'}"
            )
            raise self._unclear(f"a dict of {', '.join(map(str, batch))}{rest}")
        raise self._unclear("a single tensor" if isinstance(batch, Tensor) else "a single entry")

    def _unclear(self, got: str) -> ConfigError:
        return ConfigError(
            f"{_name(self.criterion)} takes a tensor and its target, which is the last entry of a tuple, or the one "
            f"entry of a dict that is no argument of the model's forward: got {got}. Select both, for example with "
            'criterion=lambda outputs, inputs: loss(outputs.logits, inputs["labels"]).'
        )


class SignatureCache:
    """The signatures of one model and of the criteria of its steps; each is read once.

    Args:
        model: its forward may have been wrapped.
        signature: of its forward before it was wrapped.
    """

    def __init__(self, model: nn.Module, signature: ForwardSignature):
        self._model = model
        self._forward = model.forward
        self._signature = signature
        self._criterion: CriterionAdapter | None = None

    def of(self, criterion: Callable[..., Any] | None) -> "CriterionAdapter | ForwardSignature":
        """The criterion's adapter, or without a criterion the model's signature.

        Raises:
            ConfigError: the criterion cannot be called.
        """
        forward = self._model.forward
        if self._forward is not forward:  # the script has replaced it
            self._forward, self._criterion = forward, None
            self._signature = ForwardSignature.of(forward, type(self._model).__name__)
        if criterion is None:
            return self._signature
        if self._criterion is None or not self._criterion.is_of(criterion):
            self._criterion = CriterionAdapter(criterion, self._signature)
        return self._criterion


def reduction_of(criterion: Any) -> str | None:
    """The reduction that a criterion declares: its attribute ``reduction``, or a bound argument of that name.

    Criteria inside of it do not count: it may divide the sum that an inner criterion returns.

    Raises:
        ConfigError: it declares that it does not reduce.
    """
    held = criterion.keywords.get("reduction") if isinstance(criterion, functools.partial) else None
    said = held or getattr(criterion, "reduction", None)
    if said == "none":
        raise ConfigError(
            f"a criterion must return one number per micro-batch: {_name(criterion)} has reduction='none'. "
            "Use 'mean' or 'sum', or reduce its result."
        )
    return said if isinstance(said, str) and said in _REDUCTIONS else None


def without_target(batch: Any) -> Any:
    """A tuple or list without its last entry, the target of a torch loss. A dict is unchanged: names select from it."""
    return batch[:-1] if isinstance(batch, tuple | list) and len(batch) > 1 else batch


def takes_targets(criterion: Any) -> bool:
    """Whether it is one of torch's losses that are called with a tensor and its target, not with a batch."""
    function = criterion
    while isinstance(function, functools.partial) and not function.args:
        function = function.func
    if isinstance(function, nn.Module):
        function = type(function).forward.__get__(function)
    if getattr(function, "__module__", None) not in _HOMES:
        return False
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    return len(needed) == 2


def _num_arguments(criterion: Any) -> int:
    """2 (outputs and inputs) or 1 (outputs)."""
    try:
        signature = inspect.signature(criterion.forward if isinstance(criterion, nn.Module) else criterion)
    except (TypeError, ValueError, AttributeError):
        return 2
    for count in (2, 1):
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return count
    raise ConfigError(
        f"a criterion must accept (outputs, inputs) or (outputs): {_name(criterion)} has the signature "
        f"{signature}. Bind other arguments: criterion=lambda outputs, inputs: ..."
    )


class _ClassWeights(NamedTuple):
    """The items that torch's classification losses average over; their number differs between micro-batches."""

    ignore_index: int
    weight: Tensor | None

    @classmethod
    def of(cls, criterion: Any) -> "_ClassWeights | None":
        """Of a classification loss; None for any other criterion."""
        held: dict[str, Any] = {}
        while isinstance(criterion, functools.partial):
            held, criterion = {**criterion.keywords, **held}, criterion.func
        if criterion in (nn.functional.cross_entropy, nn.functional.nll_loss):
            return cls(held.get("ignore_index", -100), held.get("weight"))
        if isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss):
            return cls(criterion.ignore_index, criterion.weight)
        return None

    def num_items(self, target: Tensor) -> Tensor:
        """The weight of the targets that count."""
        if target.is_floating_point():  # class probabilities: every sample counts
            return torch.tensor(float(target.shape[0]))
        counts = target != self.ignore_index
        if self.weight is None:
            return counts.sum()
        return (self.weight.detach().to(target.device)[target.where(counts, 0)] * counts).sum()


def _name(criterion: Any) -> str:
    return getattr(criterion, "__name__", None) or type(criterion).__name__
