"""Micro-batches that a model can be estimated on: the user's, or made from its configuration."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.nn.torch_private import pytree
from hybridpp.partition import has_samples, make_samples
from hybridpp.pipeline import resize_batch, to_plain_containers

PASS_A_BATCH = (
    "pass EstimateInput(sample=batch), or --model module:function with a function that returns the model and a batch"
)
# Labels of a recording.
_SEQUENCE = 8


class EstimateBatch(NamedTuple):
    """A micro-batch, and what is made of the model's outputs."""

    inputs: Any
    criterion: Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """Where micro-batches come from.

    Attributes:
        sequence_length: tokens of a text; None: what the model's configuration suggests.
        images: of each text, if batches are made.
        dims: where the sample's samples are, as the plugin's ``batch_dims``.
        sample: a batch, whose samples are repeated; None: batches are made from the model's configuration.
        criterion: of the outputs and the micro-batch; None: the model's own loss, else a mean of its outputs.
    """

    sequence_length: int | None = None
    images: int = 1
    dims: Any = 0
    sample: Any = None
    criterion: Callable[[Any, Any], Tensor] | None = None

    def candidates(self, model: nn.Module, size: int) -> Iterator[EstimateBatch]:
        """Micro-batches of ``size`` samples, the likeliest first: the caller tries which the model runs on.

        Raises:
            ConfigError: none can be made.
        """
        if self.sample is not None:
            taken = resize_batch(to_plain_containers(self.sample), size, self.dims)
            yield EstimateBatch(taken, self.criterion or _loss_or_mean)
            return
        if not has_samples(model):
            raise ConfigError(
                f"an estimate of {type(model).__name__} needs a batch: it is no model of transformers or diffusers, "
                f"from whose configuration one is made. To give one, {PASS_A_BATCH}."
            )
        made = list(reversed(make_samples(model, size, self.sequence_length, torch.float32, self.images)))
        for inputs in made:
            for labels in _labels(model, inputs, size):
                yield EstimateBatch({**inputs, "labels": labels}, self.criterion or _own_loss)
        for inputs in made:
            yield EstimateBatch(inputs, self.criterion or _mean_of_outputs)


def _labels(model: nn.Module, inputs: dict[str, Tensor], size: int) -> Iterator[Tensor]:
    if "labels" not in inspect.signature(model.forward).parameters:
        return
    for name in ("decoder_input_ids", "input_ids"):
        if name in inputs:
            yield inputs[name].clone()
            break
    if hasattr(getattr(model, "config", None), "ctc_loss_reduction"):
        # Of one sample, the loss would take one label for a sequence.
        yield torch.ones(size, _SEQUENCE, dtype=torch.long)
    yield torch.zeros(size, dtype=torch.long)


def _own_loss(outputs: Any, inputs: Any) -> Tensor:
    loss = outputs["loss"] if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        raise ConfigError("the model returns no loss.")
    return loss


def _mean_of_outputs(outputs: Any, inputs: Any) -> Tensor:
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise ConfigError("no output of the model depends on a weight that is trained.")
    return torch.stack([leaf.float().mean() for leaf in leaves]).sum()


def _loss_or_mean(outputs: Any, inputs: Any) -> Tensor:
    try:
        return _own_loss(outputs, inputs)
    except (ConfigError, KeyError, TypeError):
        return _mean_of_outputs(outputs, inputs)
