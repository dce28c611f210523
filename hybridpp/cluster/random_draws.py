"""Whether code draws random numbers from torch's default generators."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def default_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators that a model on ``device`` draws from: the host's, and the device's if it is a CUDA device."""
    if device.type != "cuda":
        return (torch.default_generator,)
    return torch.default_generator, torch.cuda.default_generators[device.index or 0]


def has_drawn(generator: torch.Generator) -> bool:
    """Whether numbers were drawn since the generator was seeded; its state does not change.

    It takes two copies of the state, 5 KB on the host and 16 bytes of a CUDA device, and does not synchronise.
    """
    state = generator.get_state()
    generator.manual_seed(generator.initial_seed())
    if state.numpy().tobytes() == generator.get_state().numpy().tobytes():
        return False
    generator.set_state(state)
    return True


class DrawMonitor:
    """What is known of the random numbers of the code that runs now, for all code that sets a model's generators.

    Attributes:
        expected: whether it may draw; if not, nobody needs to set a generator for it.
        found: whether a draw was found since observation began.
    """

    def __init__(self) -> None:
        self.expected = True
        self.found = False
        self._is_observing = False

    def observe(self) -> None:
        """Begin to observe; nothing is found yet."""
        self._is_observing, self.found = True, False

    def stop(self) -> None:
        """End the observation."""
        self._is_observing = False

    def note(self, generator: torch.Generator) -> None:
        """Find what was drawn before a generator is seeded or restored; call it first. Costs nothing otherwise."""
        if self._is_observing and not self.found:
            self.found = has_drawn(generator)

    @contextmanager
    def expecting(self, expected: bool) -> Iterator[None]:
        """Inside, draws are expected or not."""
        before, self.expected = self.expected, expected
        try:
            yield
        finally:
            self.expected = before
