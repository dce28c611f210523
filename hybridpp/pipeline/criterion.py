"""The user's criteria: adapters to the call ``criterion(outputs, inputs)``, and the losses of a step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.nn.deferred_tensor import MadeWhenRead, deferred
from hybridpp.nn.half import HALF_DTYPES
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline.criterion_form import (
    REDUCTIONS,
    CriterionForm,
    check_reduction,
    form_of,
    has_option,
    is_batch_name,
    is_target_name,
    key_of,
    name_of,
    second_argument,
)
from hybridpp.pipeline.criterion_state import numbers_of
from hybridpp.pipeline.forward_signature import ForwardSignature, describe_arguments
from hybridpp.pipeline.loss_items import LossForm
from hybridpp.pipeline.read_entries import ReadEntries
from hybridpp.pipeline.selected_inputs import InputSelection, with_selection
from hybridpp.pipeline.step import PipelineStep, StepResult

FoundForms: TypeAlias = dict[Any, tuple[Any, LossForm, list[int | float]]]
"""By criterion, by training or evaluation, and by what a batch has: the criterion, and the form of its loss."""

# Criteria that a script makes anew at every step would fill the memory.
_MAX_FORMS = 64


class CriterionAdapter:
    """A user's criterion.

    Three forms are supported: ``criterion(outputs, inputs)``; ``criterion(outputs)``; and torch's losses
    (``nn.CrossEntropyLoss()``, ``F.mse_loss``), whose target is the last entry of a tuple, or the one entry of a dict
    that is no argument of the model's forward. ``criterion(outputs, target)`` is called as those are, if the model is
    called without one entry of the batch (:class:`~hybridpp.pipeline.criterion_form.CriterionForm`).

    Args:
        criterion: callable.
        signature: of the model's forward.
        loss_reduction: what criteria return that do not say it themselves; None: unknown.
        forms: what the losses of criteria were found to be means over, of all criteria of a model.
        model: that may compute the loss.

    Attributes:
        criterion: as given.
        identity: equal for functions that a script defines again at every step.
        key: the same, but unlike for functions that were defined around other values.
        sums: whether it returns a sum over samples instead of a mean, by its attribute ``reduction``.
        declares_reduction: whether the script says so: by that attribute, where it is no argument of the criterion's
            class, or by ``loss_reduction``.
        is_torchs: whether it is a loss of torch's.
        coupled: whether it couples the samples of a batch, by its attribute ``coupled``.
        num_items: counts the items of a micro-batch's inputs that the mean is over; None: items are samples.

    Raises:
        ConfigError: it has none of these forms, does not reduce, or otherwise than ``loss_reduction``.
    """

    def __init__(
        self,
        criterion: Callable[..., Any],
        signature: ForwardSignature,
        loss_reduction: str | None = None,
        forms: "FoundForms | None" = None,
        model: nn.Module | None = None,
    ):
        if not callable(criterion):
            raise ConfigError(
                f"criterion must be a function or module (outputs, inputs) -> loss: got criterion={criterion!r:.200}. "
                "Pass that which booster.boost returned."
            )
        self._model = model
        self._forms = {} if forms is None else forms
        self.criterion = criterion
        self.identity: Any = getattr(criterion, "__code__", criterion)
        self._form = form_of(criterion)
        self._signature = replace(signature, form=self._form)
        self.key = key_of(criterion)
        self._reduction = getattr(criterion, "reduction", None)
        self.is_torchs = self._form is CriterionForm.TORCHS_TARGET
        self._second_argument = second_argument(criterion)
        # Numbers of entries of tuples: those that were divided, and those of which it is known that this was right.
        self._divided: dict[int, int] = {}
        self._settled: set[int] = set()
        # Batches that the forward accepts completely: looked up for every micro-batch, checked once.
        self._taken_names: set[tuple[Any, ...]] = set()
        reduction = check_reduction(criterion, loss_reduction)
        self.sums = reduction is not None and REDUCTIONS[reduction]
        is_said = self.sums or loss_reduction is not None or not has_option(criterion)
        self.declares_reduction = reduction is not None and is_said
        self.coupled = getattr(criterion, "coupled", False) is True
        self.num_items: Callable[[Any], Any] | None = getattr(criterion, "num_items", None)

    def form(self, training: bool, has_total: bool) -> LossForm | None:
        """What its loss is a mean over; None: that is not known on this rank.

        Args:
            training: whether gradients are enabled.
            has_total: whether the batch has ``num_items_in_batch``.
        """
        held = self._forms.get((self.key, training, has_total))
        return None if held is None else held[1]

    def found(self, training: bool, has_total: bool, form: LossForm) -> None:
        """Note what its loss is a mean over."""
        self._keep((self.key, training, has_total), form)

    def has_other_numbers(self, training: bool, has_total: bool) -> bool:
        """Whether plain numbers of which its items depend are others than when :meth:`form` was found, or last asked.

        They are those that it holds, or the model that computes its loss.
        """
        found = self._forms.get((self.key, training, has_total))
        if found is None or not found[1].holds_numbers:
            return False
        numbers, before = self._held_numbers(found[1]), list(found[2])
        found[2][:] = numbers
        return numbers != before

    def _held_numbers(self, form: LossForm) -> list[int | float]:
        if not form.holds_numbers:
            return []
        return numbers_of(self.criterion, *([self._model] if form.in_model else []))

    def reported_form(self, training: bool, has_total: bool) -> LossForm | None:
        """As :meth:`form`, of a loss that was not checked, because nothing but what is reported depends on it."""
        held = self._forms.get((self.key, training, has_total, "reported"))
        return None if held is None else held[1]

    def found_to_report(self, training: bool, has_total: bool, form: LossForm) -> None:
        """Note what :meth:`reported_form` returns."""
        self._keep((self.key, training, has_total, "reported"), form)

    def _keep(self, key: Any, form: LossForm) -> None:
        # With the criterion, whose key may be its id.
        self._forms[key] = self.criterion, form, self._held_numbers(form)
        while len(self._forms) > _MAX_FORMS:
            del self._forms[next(iter(self._forms))]

    def forget_forms(self) -> None:
        """What the losses of all criteria of the model are means over is found anew."""
        self._forms.clear()

    def is_of(self, criterion: Any) -> bool:
        """Whether this adapter was made for ``criterion``, whose reduction is unchanged."""
        return self.criterion is criterion and getattr(criterion, "reduction", None) == self._reduction

    def model_inputs(self, batch: Any) -> Any:
        """The part of a batch that the model is called with.

        Raises:
            ConfigError: a loss of torch's needs a target, and the batch has none.
            DataError: the forward cannot be called with it.
        """
        is_tuple = isinstance(batch, tuple | list) and not self._signature.selects
        if not self.is_torchs:
            if type(batch) is dict and tuple(batch) in self._taken_names:
                return batch
            taken = self._signature.model_inputs(batch)
            if taken is batch and type(batch) is dict:
                self._taken_names.add(tuple(batch))
            if is_tuple:
                self._divided[len(batch)] = len(taken)
            return taken
        self._target(batch)
        if is_tuple and self._signature.not_accepted(batch[:-1]):
            raise self._unclear(f"{len(batch)} entries, and a forward with {self._signature.num_positional} arguments")
        taken = self._signature.model_inputs(batch)
        if is_tuple:
            self._divided[len(batch)] = len(taken)
        return taken

    def without_loss(self) -> ForwardSignature:
        """How the model is called on such batches where no loss is computed: as with this criterion."""
        return replace(self._signature, form=None, divided=tuple(self._divided.items()))

    def __call__(self, outputs: Any, inputs: Any) -> Any:
        """The criterion's result for a micro-batch."""
        if self.is_torchs and not isinstance(outputs, Tensor):
            raise self._unclear(f"a model that returns {type(outputs).__name__} instead of a tensor")
        if self.is_torchs:
            given: Any = outputs, self._target(inputs)
        elif self._form is CriterionForm.TARGET:
            given = outputs, self._own_target(inputs)
        elif self._form is CriterionForm.OUTPUTS:
            given = (outputs,)
        else:
            return self._of_batch(outputs, inputs)
        return self._called(given)

    def _of_batch(self, outputs: Any, inputs: Any) -> Any:
        """The result of a criterion that gets the batch; of the first tuple, what it reads is compared."""
        count = len(inputs) if isinstance(inputs, tuple | list) else 0
        if not count or count in self._settled:
            return self._called((outputs, inputs))
        without, taken = self._signature.doubtful(count)
        watched = ReadEntries(inputs, (*without, *taken))
        loss = self._called((outputs, watched.entries))
        for index in without:
            if index not in watched.read:
                raise self._doubtful(count, index, "neither the model nor the criterion reads")
        for index in taken:
            if index in watched.read and index in watched.watched:
                raise self._doubtful(count, index, "both the model and the criterion read")
        self._settled.add(count)
        return loss

    def _called(self, given: Any) -> Any:
        try:
            return self.criterion(*given)
        except Exception as error:
            error.add_note(f"hybridpp: in {name_of(self.criterion)}({', '.join(map(describe_arguments, given))})")
            if note := _other_dimension(*given):
                error.add_note(note)
            name = self._second_argument
            if name and not is_batch_name(name) and isinstance(given[-1], dict | tuple | list):
                error.add_note(
                    f"hybridpp: {name!r} is the whole batch. Call it target, to get the one entry that the model does "
                    "not take; or select that: criterion=lambda outputs, inputs: loss(outputs, inputs[1])."
                )
            raise

    def _own_target(self, batch: Any) -> Any:
        """The entry of the batch that a criterion of the script's own takes; if that is not clear, the batch."""
        extra_entries = self._possible_targets(batch)
        if len(extra_entries) == 1:
            return batch[extra_entries[0]]
        name = self._second_argument
        return batch[name] if isinstance(batch, dict) and name in batch and is_target_name(name) else batch

    def _possible_targets(self, batch: Any) -> list[Any]:
        """The keys or indices of what the model is not called with; texts (names of files) are left out."""
        extra_entries = self._signature.extra_entries(batch)
        return extra_entries if len(extra_entries) < 2 else [key for key in extra_entries if not _is_text(batch[key])]

    def _doubtful(self, count: int, index: int, who: str) -> ConfigError:
        names, owner = self._signature.positional, self._signature.owner
        argument = f"its optional argument {names[index]!r}" if index < len(names) else "its further arguments"
        return ConfigError(
            f"{who} entry {index} of a batch of {count}: {owner}.forward could take it as {argument}, and "
            f"{name_of(self.criterion)} as what the outputs are compared with. "
            f"{self._signature.say_which(index)}"
        )

    def _target(self, batch: Any) -> Any:
        target = self._target_entry(batch)
        if not isinstance(target, Tensor):
            raise ConfigError(
                f"the target of {name_of(self.criterion)} is a tensor, with a row for each sample of the batch: got "
                f"{describe_arguments(target)}. If what is iterated over yields samples, pass "
                "plugin.prepare_dataloader(dataset, batch_size=...), which makes batches of them."
            )
        return target

    def _target_entry(self, batch: Any) -> Any:
        extra_entries = self._possible_targets(batch)
        if (isinstance(batch, dict) or self._signature.selects) and len(extra_entries) == 1:
            return batch[extra_entries[0]]
        if self._signature.selects:
            raise self._unclear(f"a batch of which model_inputs leaves {len(extra_entries)} entries")
        if isinstance(batch, tuple | list) and len(batch) > 1:
            return batch[-1]
        if isinstance(batch, dict):
            owner, listed = f"arguments of {self._signature.owner}.forward", ", ".join(map(str, extra_entries))
            rest = f"of which {listed} are no {owner}" if extra_entries else f"all {owner}"
            raise self._unclear(f"a dict of {', '.join(map(str, batch))}, {rest}")
        raise self._unclear("a single tensor" if isinstance(batch, Tensor) else "a single entry")

    def _unclear(self, got: str) -> ConfigError:
        return ConfigError(
            f"{name_of(self.criterion)} takes a tensor and its target, which is the last entry of a batch that is a "
            f"tuple, or the one entry of a dict that is no argument of the model's forward: got {got}. Select both, "
            "for example with "
            'criterion=lambda outputs, inputs: loss(outputs.logits, inputs["labels"]).'
        )


def _other_dimension(outputs: Any, inputs: Any = None) -> str:
    """What to say of outputs that have as many rows as the batch has in dimension 1; else empty."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    rows = outputs.shape[0] if isinstance(outputs, Tensor) and outputs.dim() else 0
    if not rows or not tensors or any(leaf.shape[0] in (1, rows) for leaf in tensors):
        return ""
    return (
        f"hybridpp: the outputs have {rows} rows, and the micro-batch {tensors[-1].shape[0]}. If an input has its "
        "samples in dimension 1 ([T, B]), say so: HybridParallelPlugin(batch_dims={'x': 1, 'y': 0}), or (1, 0) for a "
        "tuple. See docs/batches.md."
    )


def _is_text(entry: Any) -> bool:
    is_list = isinstance(entry, list | tuple) and len(entry) > 0
    return isinstance(entry, str | bytes) or (is_list and all(isinstance(one, str | bytes) for one in entry))


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
        self._forms: FoundForms = {}

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
            return self._signature if self._criterion is None else self._criterion.without_loss()
        if self._criterion is None or not self._criterion.is_of(criterion):
            self._criterion = CriterionAdapter(
                criterion, self._signature, self._loss_reduction, self._forms, self._model
            )
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
        self._part: Tensor | None = None

    def of(self, microbatch: int, outputs: Any, inputs: Any) -> Tensor | None:
        """Keep the loss and the outputs of a micro-batch; returns the loss that its backward pass starts from."""
        # Checking the leaves first is cheaper than rebuilding the output.
        if any(isinstance(leaf, Tensor) and leaf.dtype in HALF_DTYPES for leaf in pytree.tree_leaves(outputs)):
            outputs = pytree.tree_map_only(Tensor, _widened_when_read, outputs)
        loss = None
        if self._step.criterion is not None:
            loss = self._loss(microbatch, outputs, inputs)
            if loss is not None:
                self.result.losses[microbatch] = (loss if self._part is None else self._part).detach()
                self.result.has_loss[microbatch] = True
        if self._step.keep_outputs:
            self.result.outputs[microbatch] = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
        return loss

    def _loss(self, microbatch: int, outputs: Any, inputs: Any) -> Tensor | None:
        step = self._step
        self._part = None
        if (step.microbatches[microbatch].share if step.shares is None else step.shares[microbatch]) == 0:
            return None
        assert self._step.criterion is not None
        loss = self._step.criterion(outputs, inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"criterion(outputs, inputs) must return a scalar tensor: got {got}. Return the mean loss of the "
                "micro-batch."
            )
        if step.inspect_loss is not None:
            start, self._part = step.inspect_loss(microbatch, loss, outputs, inputs)
            if start is None or (step.shares is not None and step.shares[microbatch] == 0):
                return None
            loss = start
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
