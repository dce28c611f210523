"""Sample batches that show how a model is called: from the dataset, without side effects, or generated."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hybridpp.cluster import preserved_random_state
from hybridpp.errors import ConfigError, HybridppError, named
from hybridpp.partition import UntraceableUnitError, has_samples, make_samples
from hybridpp.pipeline import ForwardSignature, form_of, to_plain_containers

# Two samples, because layers that normalise over the batch need more than one.
_NUM_SAMPLES = 2
_FEW_TOKENS = 64


@dataclass(frozen=True)
class Samples:
    """Candidate batches: the model's forward should run on one of them.

    Attributes:
        batches: in the order in which to try them.
        further: batches of other kinds, each with its alternatives; the forward should run on one of each kind.
        are_made: whether they were made from the model's configuration.
    """

    batches: tuple[Any, ...]
    further: tuple[tuple[Any, ...], ...] = ()
    are_made: bool = False

    @property
    def kinds(self) -> tuple[tuple[Any, ...], ...]:
        """The batches of each kind, those of the first kind first."""
        return self.batches, *self.further

    def called_by(self, signature: ForwardSignature, criterion: Any) -> "Samples":
        """The parts of the batches that the model is called with, without the target that ``criterion`` takes.

        Raises:
            DataError: the model cannot be called with them.
        """
        if self.are_made:
            return self
        called = replace(signature, form=None if criterion is None else form_of(criterion))
        first, *further = (
            tuple(part for batch in kind for part in called.possible_inputs(batch)) for kind in self.kinds
        )
        return replace(self, batches=first, further=tuple(further))

    @contextmanager
    def explained(self, model: nn.Module) -> Iterator[None]:
        """A context for running the forward, in which an error on generated batches becomes a :class:`ConfigError`.

        Raises:
            ConfigError: the forward raised on the last made batch.
        """
        try:
            yield
        except Exception as error:  # whatever a model's forward raises
            if not self.are_made or (isinstance(error, HybridppError) and not isinstance(error, UntraceableUnitError)):
                raise
            shapes = "; or ".join(map(_described, self.batches))
            raise ConfigError(
                f"{type(model).__name__} does not run on the samples that were made from its configuration: {shapes}. "
                f"The last one raised {named(error)}. {_ADVICE}"
            ) from error


NO_SAMPLES = Samples(())
_ADVICE = "Pass dataloader= with an indexable dataset, or sample=batch, to booster.boost."


def check_samples(sample: Any, samples: Any) -> None:
    """Refuse what :func:`find_samples` does not take.

    Raises:
        ConfigError: ``samples`` is no list of batches, or is given beside ``sample``.
    """
    if samples is None:
        return
    if not isinstance(samples, list | tuple):
        raise ConfigError(
            f"samples must be a list with one batch of each kind: got {type(samples).__name__}. Write samples=[one, "
            "another], or sample=batch for one batch."
        )
    if not samples or any(batch is None for batch in samples):
        raise ConfigError(
            f"samples must hold at least one batch, and no None: got {len(samples)} entries, "
            f"{sum(batch is None for batch in samples)} of them None. Leave it out, or list one batch of each kind."
        )
    if sample is not None:
        raise ConfigError("sample and samples are both given. Put all batches into samples=[...].")


def find_samples(
    model: nn.Module,
    dataloader: DataLoader[Any] | None,
    sample: Any,
    device: torch.device,
    samples: Sequence[Any] | None = None,
) -> Samples:
    """The given sample or samples, one of each kind; else one from the dataloader's dataset, else samples made from a
    Hugging Face configuration.

    Random generators, and the dataloader's sampler and workers, are not used.

    Raises:
        ConfigError: there is no source of a sample.
    """
    if sample is not None:
        samples = [sample]
    if samples:
        first, *further = ((to_plain_containers(batch),) for batch in samples)
        return Samples(first, tuple(further))
    # The script may iterate over something of its own.
    dataset, collate = getattr(dataloader, "dataset", None), getattr(dataloader, "collate_fn", None)
    is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if collate is not None and dataset is not None and is_indexed and not isinstance(dataset, IterableDataset):
        count = min(_NUM_SAMPLES, len(dataset))
        if count:
            with _untouched_generators(device):
                return Samples((to_plain_containers(collate([dataset[index] for index in range(count)])),))
    made = _made(model)
    if not made:
        raise ConfigError(f"cutting {type(model).__name__} into stages needs a sample of its inputs. {_ADVICE}")
    return Samples(made, are_made=True)


def _made(model: nn.Module) -> tuple[Any, ...]:
    """A Hugging Face model's dummy inputs, and samples made from its configuration."""
    if not has_samples(model):
        return ()
    # Trials compute with them: of images of diffusers, few tokens will do.
    length = None if hasattr(model.config, "sub_configs") else _FEW_TOKENS
    dummy = getattr(model, "dummy_inputs", None)
    own = [dummy] if isinstance(dummy, dict) and getattr(model, "main_input_name", None) in dummy else []
    # A model with unknown inputs has dummy inputs, or no sample.
    with suppress(ConfigError):
        own += make_samples(model, _NUM_SAMPLES, length, torch.float32)
    return tuple(own)


def _described(batch: dict[str, Any]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items() if isinstance(value, Tensor))


@contextmanager
def _untouched_generators(device: torch.device) -> Iterator[None]:
    python, numbers = random.getstate(), numpy.random.get_state()
    try:
        with preserved_random_state(device):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)
