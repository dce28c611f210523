"""Random seeds that depend on what is computed, not on the rank."""

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

_MASK = 2**63 - 1
# An odd constant with well-spread bits (2**64 divided by the golden ratio): adjacent stream ids get distant seeds.
_STRIDE = 0x9E3779B97F4A7C15


def set_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators of this process."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def microbatch_key(seed: int, step: int, microbatch: int) -> int:
    """The key of a micro-batch of a training run; ``microbatch`` counts over all replicas of a step."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed % 2**64, step, microbatch), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK


def stream_seed(key: int, stream: int) -> int:
    """The seed of an RNG stream of the model's forward (see ``microbatch_key``)."""
    return (key + stream * _STRIDE) & _MASK


def stream_seeder(key: int, device: torch.device) -> Callable[[int], None]:
    """A function that sets the default generators for an RNG stream, given its id; cheap enough for every layer."""
    # stream_seed is inlined: a call would take as long as the rest.
    set_host = torch.default_generator.manual_seed
    if device.type != "cuda":

        def seed(stream: int) -> None:
            set_host((key + stream * _STRIDE) & _MASK)

        return seed
    set_device = torch.cuda.default_generators[device.index or 0].manual_seed

    def seed_both(stream: int) -> None:
        number = (key + stream * _STRIDE) & _MASK
        set_host(number)
        set_device(number)

    return seed_both


def seed_stream(key: int, stream: int, device: torch.device) -> None:
    """Set the default generators for one RNG stream."""
    stream_seeder(key, device)(stream)


class RandomState(NamedTuple):
    """State of torch's generators: the host's, and the device's if it is a CUDA device."""

    cpu: Tensor
    cuda: Tensor | None


def random_state(device: torch.device) -> RandomState:
    """The state of the generators that a model on ``device`` draws from; does not synchronise."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RandomState(torch.default_generator.get_state(), cuda)


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Restore the generators to ``state``."""
    torch.default_generator.set_state(state.cpu)
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda, device)


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restore the user's torch generators after the block."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)
