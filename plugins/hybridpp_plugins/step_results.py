"""What a step returns beside the loss: the losses of its micro-batches, and the model's outputs."""

import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpp.cluster import as_carried, gather_objects, resolved
from hybridpp.errors import ConfigError
from hybridpp.nn.deferred_tensor import with_values
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline import SplitBatch, StepResult, merge_outputs
from hybridpp.plugin import StepOptions
from hybridpp.sharded_activations import gathered
from hybridpp_plugins.layout import Layout


class _Slot(NamedTuple):
    """Where a tensor belongs in outputs that are sent without their tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StepResults:
    """Makes the results of a model's steps.

    Args:
        layout: this rank's groups.
        placement: position in the pipeline of every stage.
        dims: dimensions of the samples in outputs.
        device: of outputs that this rank receives.
        model_name: of the model, in errors.
    """

    def __init__(self, layout: Layout, placement: tuple[int, ...], dims: Any, device: torch.device, model_name: str):
        self._layout, self._dims, self._device, self._model_name = layout, dims, device, model_name
        self._source = placement[-1]
        everyone = frozenset(placement)
        self._ranks_of = {"last": frozenset(placement[-1:]), "first": frozenset(placement[:1]), "all": everyone}

    def meets(self, options: StepOptions) -> bool:
        """Whether :meth:`of` communicates. The same on all ranks of the world."""
        return self._layout.pp.size > 1 and (options.return_losses or self._is_sent(options))

    def _is_sent(self, options: StepOptions) -> bool:
        return options.return_outputs and bool(self._ranks_of[options.outputs_on] - {self._source})

    def of(self, batch: SplitBatch, result: StepResult, options: StepOptions) -> dict[str, Any]:
        """``outputs`` and ``losses`` as :meth:`hybridpp.Booster.execute_pipeline` returns them.

        Collective if it :meth:`meets`: all ranks of the world.

        Raises:
            ConfigError: the outputs cannot be sent; on all ranks.
            UnlikeCallsError: ranks have different options; on all ranks.
        """
        outputs = None
        if options.return_outputs and result.outputs:
            parts = [gathered(result.outputs[index]) for index in range(len(batch.microbatches))]
            outputs = merge_outputs(parts, batch.microbatches, self._dims)
        losses = _losses(result) if options.return_losses and self._layout.pp.rank == self._source else None
        if self.meets(options):
            losses, outputs = self._share(losses, outputs, options)
        if self._layout.pp.rank not in self._ranks_of[options.outputs_on]:
            outputs = None
        if losses is None:
            return {"outputs": outputs}
        return {"losses": torch.tensor(losses, dtype=torch.float32), "outputs": outputs}

    def _share(self, losses: list[float] | None, outputs: Any, options: StepOptions) -> tuple[list[float] | None, Any]:
        """The losses, and the outputs where they are wanted, from the last stage of this rank's pipeline."""
        wants = f"return_losses={options.return_losses}, outputs_on={options.outputs_on!r}"
        call = f"at the end of a step of {self._model_name} (execute_pipeline, {wants})"
        is_sent, is_source = self._is_sent(options), self._layout.pp.rank == self._source
        tensors: list[Tensor] = []
        message: list[Any] = [losses, None, None]
        if is_sent and is_source:
            try:
                outputs = with_values(outputs)
                tensors, data = _taken_apart(outputs)
                message[1] = data.hex()
            except Exception as error:  # whatever the classes of outputs raise when they are pickled
                message[2] = f"{type(error).__name__}: {error}"
        rows = gather_objects(self._layout.control, call, message)
        refusals = [row[2] for row in rows if row[2] is not None]
        if refusals:
            raise ConfigError(
                f"the outputs of {self._model_name} cannot be sent to other ranks ({refusals[0]}). Leave out "
                "outputs_on, or return tensors in lists, tuples and dicts."
            )
        losses, data, _ = rows[self._layout.pp.ranks[self._source]]
        if is_sent:
            outputs = self._exchanged(outputs, tensors, data, self._ranks_of[options.outputs_on])
        return losses, outputs

    def _exchanged(self, outputs: Any, tensors: list[Tensor], data: str, targets: frozenset[int]) -> Any:
        pp = self._layout.pp
        if pp.rank == self._source:
            sends = [pp.send(as_carried(tensor), peer) for peer in sorted(targets - {pp.rank}) for tensor in tensors]
            for work in sends:
                work.wait()
            return outputs
        if pp.rank not in targets:
            return None
        leaves, tree = pytree.tree_flatten(
            pickle.loads(bytes.fromhex(data)), is_leaf=lambda leaf: isinstance(leaf, _Slot)
        )
        return pytree.tree_unflatten(
            [self._received(leaf) if isinstance(leaf, _Slot) else leaf for leaf in leaves], tree
        )

    def _received(self, slot: _Slot) -> Tensor:
        tensor = torch.empty(slot.shape, dtype=slot.dtype, device=self._device)
        if tensor.numel():
            self._layout.pp.receive(as_carried(tensor), self._source).wait()
        return tensor


def _losses(result: StepResult) -> list[float]:
    return [
        loss if known else float("nan") for loss, known in zip(result.losses.tolist(), result.has_loss, strict=True)
    ]


def _taken_apart(outputs: Any) -> tuple[list[Tensor], bytes]:
    """The tensors of ``outputs`` that have elements, and all the rest, pickled."""
    leaves, tree = pytree.tree_flatten(outputs)
    tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    strided = {index: resolved(leaf.to_dense()).contiguous() for index, leaf in tensors.items()}
    rest = [_Slot(tuple(leaf.shape), leaf.dtype) if index in tensors else leaf for index, leaf in enumerate(leaves)]
    sent = [tensor for tensor in strided.values() if tensor.numel()]
    return sent, pickle.dumps(pytree.tree_unflatten(rest, tree))
