"""The generators of random numbers that a script draws from: Python's, numpy's and torch's."""

import random
from typing import Any

import numpy
import torch

from hybridpp.cluster.seeds import RandomState, random_state, set_random_state
from hybridpp.errors import ConfigError, named


def generator_states(device: torch.device) -> dict[str, Any]:
    """The states of this process's generators, and of that of a device: tuples, arrays and tensors."""
    torch_state = random_state(device)
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch_state.cpu,
        "cuda": torch_state.cuda,
    }


def check_generator_states(states: dict[str, Any], device: torch.device) -> None:
    """Check that :func:`set_generator_states` would take states; no generator that a script draws from changes.

    Raises:
        ConfigError: it would not.
    """
    try:
        random.Random().setstate(states["python"])
        numpy.random.RandomState().set_state(states["numpy"])
        torch.Generator().set_state(states["torch"])
        if device.type == "cuda" and states["cuda"] is not None:
            torch.Generator(device).set_state(states["cuda"])
    except (KeyError, IndexError, AttributeError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"a state of the random generators is none: {named(error)}. Restore the files from a "
            'copy, or resume without "generators" in parts'
        ) from error


def set_generator_states(states: dict[str, Any], device: torch.device) -> None:
    """Set them again. A device of another kind than the one of the states keeps its own."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    cuda = states["cuda"] if device.type == "cuda" else None
    set_random_state(RandomState(states["torch"], cuda), device)
