"""A batch that shows how a model is called, taken without anyone noticing."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hybridpp.errors import ConfigError
from hybridpp.pipeline import plain

# Two samples, because layers that normalise over the batch refuse one.
_NUM_SAMPLES = 2


def find_sample(model: nn.Module, dataloader: DataLoader[Any] | None, sample: Any) -> Any:
    """The sample given, else one of the dataloader's dataset, else what a Hugging Face model says of itself.

    Random generators, sampler and workers of the dataloader are left untouched.

    Raises:
        ConfigError: there is nothing to take a sample from.
    """
    if sample is not None:
        return plain(sample)
    dataset = None if dataloader is None else dataloader.dataset
    if dataloader is not None and dataset is not None and not isinstance(dataset, IterableDataset):
        count = min(_NUM_SAMPLES, len(dataset))  # type: ignore[arg-type]  # Dataset declares no length
        if count:
            with _untouched_generators():
                return plain(dataloader.collate_fn([dataset[index] for index in range(count)]))
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, dict) and getattr(model, "main_input_name", None) in dummy:
        return dummy
    raise ConfigError(
        f"cutting {type(model).__name__} into stages needs a sample of its inputs. "
        "Pass dataloader= with an indexable dataset, or sample=batch, to booster.boost."
    )


@contextmanager
def _untouched_generators() -> Iterator[None]:
    python, numbers, cpu = random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.default_generator.set_state(cpu)
