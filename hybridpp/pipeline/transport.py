"""Carry activations to the next stage and gradients to the previous one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridpp.cluster import Group, Work, resolved
from hybridpp.pipeline.stage import TensorMeta


class RecvHandle:
    """Tensors that this rank receives from another rank, or gets from another stage on the same rank."""

    __slots__ = ("_tensors", "_works")

    def __init__(self, tensors: list[Tensor], works: Sequence[Work] = ()):
        self._tensors = tensors
        self._works = works

    def wait(self) -> list[Tensor]:
        """The tensors, after they have arrived."""
        for work in self._works:
            work.wait()
        self._works = ()
        return self._tensors


class SendHandle:
    """Tensors that this rank sends, which must stay alive until they have been sent."""

    __slots__ = ("_tensors", "_works")

    def __init__(self, tensors: list[Tensor], works: list[Work]):
        self._tensors = tensors
        self._works = works

    def wait(self) -> None:
        """Wait until the tensors are sent, then release them. Blocks until the peer has posted the receive."""
        for work in self._works:
            work.wait()
        self._tensors, self._works = [], []


class Transport:
    """Sends and receives lists of tensors whose shapes both sides know.

    Messages between two ranks arrive in the order in which they are sent, activations and gradients alike, so both
    ranks must start them in one order (:func:`~hybridpp.schedule.lower`).

    Args:
        group: the pipeline's ranks.
        device: of received tensors.
    """

    def __init__(self, group: Group, device: torch.device):
        self.rank = group.rank
        self._group, self._device = group, device

    def send(self, tensors: Sequence[Tensor], peer: int) -> SendHandle:
        """Start to send to rank ``peer``."""
        # Backends send contiguous memory only, as it is.
        dense = [resolved(tensor.detach()).contiguous() for tensor in tensors]
        return SendHandle(dense, [self._group.send(tensor, peer) for tensor in dense])

    def receive(self, specs: Sequence[TensorMeta], peer: int) -> RecvHandle:
        """Start to receive from rank ``peer``."""
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs]
        return RecvHandle(tensors, [self._group.receive(tensor, peer) for tensor in tensors])
