"""Batches that show how a model is called, taken without anyone noticing, or made."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hybridpp.cluster import preserved_random_state
from hybridpp.errors import ConfigError, HybridppError
from hybridpp.partition import make_samples
from hybridpp.pipeline import plain

# Two samples, because layers that normalise over the batch refuse one.
_NUM_SAMPLES = 2


@dataclass(frozen=True)
class Samples:
    """Batches of which the model's forward runs on one; which, is to be tried.

    Attributes:
        batches: in the order in which they are to be tried.
        are_made: whether they were made from the model's configuration.
    """

    batches: tuple[Any, ...]
    are_made: bool = False

    @contextmanager
    def explained(self, model: nn.Module) -> Iterator[None]:
        """Wrap the attempt to run the forward; what it raises says what is wrong with batches that were made.

        Raises:
            ConfigError: the forward raised on the last of them.
        """
        try:
            yield
        except HybridppError:
            raise
        except Exception as error:  # whatever a model's forward raises
            if not self.are_made:
                raise
            shapes = "; or ".join(map(_described, self.batches))
            raise ConfigError(
                f"{type(model).__name__} does not run on the samples that were made from its configuration: {shapes}. "
                f"It says, to the last one: {type(error).__name__}: {error}. {_ADVICE}"
            ) from error


NO_SAMPLES = Samples(())
_ADVICE = "Pass dataloader= with an indexable dataset, or sample=batch, to booster.boost."


def find_samples(model: nn.Module, dataloader: DataLoader[Any] | None, sample: Any, device: torch.device) -> Samples:
    """The sample given, else one of the dataloader's dataset, else some made from a Hugging Face configuration.

    Random generators, sampler and workers of the dataloader are left untouched.

    Raises:
        ConfigError: there is nothing to take a sample from.
    """
    if sample is not None:
        return Samples((plain(sample),))
    dataset = None if dataloader is None else dataloader.dataset
    if dataloader is not None and dataset is not None and not isinstance(dataset, IterableDataset):
        count = min(_NUM_SAMPLES, len(dataset))  # type: ignore[arg-type]  # Dataset declares no length
        if count:
            with _untouched_generators(device):
                return Samples((plain(dataloader.collate_fn([dataset[index] for index in range(count)])),))
    made = _made(model)
    if not made:
        raise ConfigError(f"cutting {type(model).__name__} into stages needs a sample of its inputs. {_ADVICE}")
    return Samples(made, are_made=True)


def _made(model: nn.Module) -> tuple[Any, ...]:
    """What a Hugging Face model says of itself, and what its configuration tells."""
    if not hasattr(getattr(model, "config", None), "sub_configs"):
        return ()
    dummy = getattr(model, "dummy_inputs", None)
    own = [dummy] if isinstance(dummy, dict) and getattr(model, "main_input_name", None) in dummy else []
    # A model of inputs that nobody knows has its own, or none.
    with suppress(ConfigError):
        own += make_samples(model, _NUM_SAMPLES, None, torch.float32)
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
