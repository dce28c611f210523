"""Carry activations to the next stage and gradients to the previous one."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridpp.cluster import Group, Work
from hybridpp.pipeline.stage import TensorSpec


@dataclass
class Receipt:
    """Tensors under way to this rank, or from another stage on it."""

    _tensors: list[Tensor]
    _works: list[Work] = field(default_factory=list)

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
        down: the ranks of the pipeline, for activations.
        up: the same ranks, for gradients.
        device: where received tensors are put.
        max_in_flight: messages per direction after which a send waits for the oldest to be away; None never waits
            before ``drain``. A bound must leave room for what a schedule sends before its peers receive it.
    """

    def __init__(self, down: Group, up: Group, device: torch.device, max_in_flight: int | None = None):
        self._down, self._up = down, up
        self._device = device
        self._max_in_flight = max_in_flight
        self._sent: dict[str, deque[tuple[Tensor, Work]]] = {"down": deque(), "up": deque()}

    def send_down(self, tensors: Sequence[Tensor], peer: int) -> None:
        """To a next stage, on the rank ``peer``. Returns at once; the tensors are kept until they are away."""
        self._send("down", self._down, tensors, peer)

    def send_up(self, tensors: Sequence[Tensor], peer: int) -> None:
        """To a previous stage, on the rank ``peer``. Returns at once; the tensors are kept until they are away."""
        self._send("up", self._up, tensors, peer)

    def receive_down(self, specs: Sequence[TensorSpec], peer: int) -> Receipt:
        """Start to receive from a previous stage, on the rank ``peer``."""
        return self._receive(self._down, specs, peer)

    def receive_up(self, specs: Sequence[TensorSpec], peer: int) -> Receipt:
        """Start to receive from a next stage, on the rank ``peer``."""
        return self._receive(self._up, specs, peer)

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
        while self._max_in_flight is not None and len(sent) > self._max_in_flight * max(1, len(tensors)):
            sent.popleft()[1].wait()

    def _receive(self, group: Group, specs: Sequence[TensorSpec], peer: int) -> Receipt:
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs]
        return Receipt(tensors, [group.receive(tensor, peer) for tensor in tensors])
