"""Carry activations to the next stage and gradients to the previous one."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpp.cluster import Group, Work
from hybridpp.pipeline.stage import TensorSpec


@dataclass
class Receipt:
    """Tensors under way to this rank."""

    _tensors: list[Tensor]
    _works: list[Work]

    def wait(self) -> list[Tensor]:
        """The tensors, once they are here."""
        for work in self._works:
            work.wait()
        self._works = []
        return self._tensors


class Transport:
    """Sends and receives lists of tensors whose shapes both sides know.

    Activations and gradients have a group each, so that a send never waits behind the other direction.

    Args:
        down: the ranks of the pipeline by stage, for activations.
        up: the same ranks, for gradients.
        device: where received tensors are put.
    """

    def __init__(self, down: Group, up: Group, device: torch.device):
        self._down, self._up = down, up
        self._device = device
        # Per direction; 1F1B leaves at most one message per later stage unanswered.
        self._max_in_flight = down.size + 1
        self._sent: dict[str, deque[tuple[Tensor, Work]]] = {"down": deque(), "up": deque()}

    def send_down(self, tensors: Sequence[Tensor]) -> None:
        """To the next stage. Returns at once; the tensors are kept until they are away."""
        self._send("down", self._down, tensors, self._down.rank + 1)

    def send_up(self, tensors: Sequence[Tensor]) -> None:
        """To the previous stage. Returns at once; the tensors are kept until they are away."""
        self._send("up", self._up, tensors, self._up.rank - 1)

    def receive_down(self, specs: Sequence[TensorSpec]) -> Receipt:
        """Start to receive from the previous stage."""
        return self._receive(self._down, specs, self._down.rank - 1)

    def receive_up(self, specs: Sequence[TensorSpec]) -> Receipt:
        """Start to receive from the next stage."""
        return self._receive(self._up, specs, self._up.rank + 1)

    def drain(self) -> None:
        """Return when everything sent is away."""
        for sent in self._sent.values():
            while sent:
                sent.popleft()[1].wait()

    def abandon(self) -> None:
        """Forget what is under way: the step has failed."""
        for sent in self._sent.values():
            sent.clear()

    def _send(self, direction: str, group: Group, tensors: Sequence[Tensor], peer: int) -> None:
        sent = self._sent[direction]
        for tensor in tensors:
            # Backends send contiguous memory only.
            dense = tensor.detach().contiguous()
            sent.append((dense, group.send(dense, peer)))
        while len(sent) > self._max_in_flight * max(1, len(tensors)):
            sent.popleft()[1].wait()

    def _receive(self, group: Group, specs: Sequence[TensorSpec], peer: int) -> Receipt:
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs]
        return Receipt(tensors, [group.receive(tensor, peer) for tensor in tensors])
