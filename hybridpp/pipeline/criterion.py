"""The user's criteria: adapters to the call ``criterion(outputs, inputs)``, and the losses of a step."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.nn.deferred_tensor import MadeWhenRead, deferred
from hybridpp.nn.half import HALF_DTYPES
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline.class_weights import ClassWeights
from hybridpp.pipeline.criterion_form import (
    REDUCTIONS,
    check_reduction,
    name_of,
    names_target,
    num_arguments,
    takes_targets,
    without_target,
)
from hybridpp.pipeline.forward_signature import ForwardSignature, describe_arguments
from hybridpp.pipeline.selected_inputs import InputSelection, with_selection
from hybridpp.pipeline.step import PipelineStep, StepResult


class CriterionAdapter:
    """A user's criterion.

    Three forms are supported: ``criterion(outputs, inputs)``; ``criterion(outputs)``; and torch's losses
    (``nn.CrossEntropyLoss()``, ``F.mse_loss``), whose target is the last entry of a tuple, or the one entry of a dict
    that is no argument of the model's forward. ``criterion(outputs, target)`` is called as those are, if one entry of
    the batch is no argument of the forward.

    Args:
        criterion: callable.
        signature: of the model's forward.
        loss_reduction: what criteria return that do not say it themselves; None: unknown.

    Attributes:
        criterion: as given.
        identity: equal for functions that a script defines again at every step.
        sums: whether it returns a sum over samples instead of a mean, by its attribute ``reduction``.
        declares_reduction: whether that is known.
        num_items: counts the items of a micro-batch's inputs that the mean is over; None: items are samples.

    Raises:
        ConfigError: it has none of these forms, does not reduce, or otherwise than ``loss_reduction``.
    """

    def __init__(self, criterion: Callable[..., Any], signature: ForwardSignature, loss_reduction: str | None = None):
        self.criterion = criterion
        self.identity: Any = getattr(criterion, "__code__", criterion)
        self._signature = signature
        self._reduction = getattr(criterion, "reduction", None)
        self._is_torchs = takes_targets(criterion)
        self._names_target = not self._is_torchs and names_target(criterion)
        self._num_arguments = 2 if self._is_torchs else num_arguments(criterion)
        # Batches that the forward accepts completely: looked up for every micro-batch, checked once.
        self._taken_names: set[tuple[Any, ...]] = set()
        reduction = check_reduction(criterion, loss_reduction)
        self.declares_reduction = reduction is not None
        self.sums = reduction is not None and REDUCTIONS[reduction]
        self.num_items: Callable[[Any], Any] | None = getattr(criterion, "num_items", None)
        classes = ClassWeights.of(criterion) if self._is_torchs and self.num_items is None else None
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
        if isinstance(batch, tuple | list) and not self._signature.selects:
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
        if self._is_torchs:
            given = outputs, self._target(inputs)
        elif self._names_target and len(extra_entries := self._signature.extra_entries(inputs)) == 1:
            given = outputs, inputs[extra_entries[0]]
        else:
            given = (outputs, inputs)[: self._num_arguments]
        try:
            return self.criterion(*given)
        except Exception as error:
            error.add_note(f"hybridpp: in {name_of(self.criterion)}({', '.join(map(describe_arguments, given))})")
            raise

    def _target(self, batch: Any) -> Any:
        extra_entries = self._signature.extra_entries(batch)
        if (isinstance(batch, dict) or self._signature.selects) and len(extra_entries) == 1:
            return batch[extra_entries[0]]
        if self._signature.selects:
            raise self._unclear(f"a batch of which model_inputs leaves {len(extra_entries)} entries")
        if isinstance(batch, tuple | list) and len(batch) > 1:
            return batch[-1]
        if isinstance(batch, dict):
            rest = (
                f", which are arguments of {self._signature.owner}.forward except {', '.join(extra_entries) or 'none'}"
            )
            raise self._unclear(f"a dict of {', '.join(map(str, batch))}{rest}")
        raise self._unclear("a single tensor" if isinstance(batch, Tensor) else "a single entry")

    def _unclear(self, got: str) -> ConfigError:
        return ConfigError(
            f"{name_of(self.criterion)} takes a tensor and its target, which is the last entry of a tuple, or the one "
            f"entry of a dict that is no argument of the model's forward: got {got}. Select both, for example with "
            'criterion=lambda outputs, inputs: loss(outputs.logits, inputs["labels"]).'
        )


class SignatureCache:
    """The signatures of one model and of the criteria of its steps; each is read once.

    Args:
        model: its forward may have been wrapped.
        signature: of its forward before it was wrapped.
        model_inputs: what the model gets of a batch; None: all that its forward accepts.
        loss_reduction: what criteria return that do not say it themselves; None: unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        signature: ForwardSignature,
        model_inputs: InputSelection | None = None,
        loss_reduction: Literal["mean", "sum"] | None = None,
    ):
        self._model_inputs, self._loss_reduction = model_inputs, loss_reduction
        self._model = model
        self._forward = model.forward
        self._signature = with_selection(signature, model_inputs)
        self._criterion: CriterionAdapter | None = None

    def of(self, criterion: Callable[..., Any] | None) -> "CriterionAdapter | ForwardSignature":
        """The criterion's adapter, or without a criterion the model's signature.

        Raises:
            ConfigError: the criterion cannot be called.
        """
        forward = self._model.forward
        if self._forward is not forward:  # the script has replaced it
            self._forward, self._criterion = forward, None
            signature = ForwardSignature.of(forward, type(self._model).__name__)
            self._signature = with_selection(signature, self._model_inputs)
        if criterion is None:
            return self._signature
        if self._criterion is None or not self._criterion.is_of(criterion):
            self._criterion = CriterionAdapter(criterion, self._signature, self._loss_reduction)
        return self._criterion


class MicrobatchLosses:
    """Computes and keeps the losses of a step's micro-batches, from the outputs of the last stage.

    Args:
        step: the batch, and what to compute of it.
        device: of the losses.

    Attributes:
        result: of the step on this rank.
    """

    def __init__(self, step: PipelineStep, device: torch.device):
        num_microbatches = len(step.microbatches)
        losses = torch.zeros(num_microbatches, dtype=torch.float64, device=device)
        self.result = StepResult(losses, [False] * num_microbatches, {})
        self._step = step

    def of(self, microbatch: int, outputs: Any, inputs: Any) -> Tensor | None:
        """Keep the loss and the outputs of a micro-batch; returns the loss that its backward pass starts from."""
        # Checking the leaves first is cheaper than rebuilding the output.
        if any(isinstance(leaf, Tensor) and leaf.dtype in HALF_DTYPES for leaf in pytree.tree_leaves(outputs)):
            outputs = pytree.tree_map_only(Tensor, _widened_when_read, outputs)
        loss = None
        if self._step.criterion is not None:
            loss = self._loss(microbatch, outputs, inputs)
            if loss is not None:
                self.result.losses[microbatch] = loss.detach()
                self.result.has_loss[microbatch] = True
        if self._step.keep_outputs:
            self.result.outputs[microbatch] = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
        return loss

    def _loss(self, microbatch: int, outputs: Any, inputs: Any) -> Tensor | None:
        if self._step.microbatches[microbatch].share == 0:
            return None
        assert self._step.criterion is not None
        loss = self._step.criterion(outputs, inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"criterion(outputs, inputs) must return a scalar tensor: got {got}. Return the mean loss of the "
                "micro-batch."
            )
        if self._step.inspect_loss is not None:
            self._step.inspect_loss(microbatch, loss, outputs, inputs)
        if self._step.training and not loss.requires_grad:
            raise ConfigError(
                "the loss does not depend on any trainable parameter, so there is nothing to train. "
                "Unfreeze a parameter, do not detach the outputs, or call execute_pipeline under torch.no_grad()."
            )
        return loss.to(torch.promote_types(loss.dtype, torch.float32)).reshape(())


def _widened_when_read(output: Tensor) -> Tensor:
    """An output in fp32 if it is in half precision. Logits are large, and most criteria read only the model's loss."""
    if output.dtype not in HALF_DTYPES:
        return output
    is_known = isinstance(output, MadeWhenRead) or (type(output) is Tensor and output.layout is torch.strided)
    if output.dim() == 0 or not is_known:
        return output.float()
    return deferred(output, output.float, dtype=torch.float32, device=output.device)
