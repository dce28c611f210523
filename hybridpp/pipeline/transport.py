"""Carry activations to the next stage and gradients to the previous one."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpp.cluster import Group, Work
from hybridpp.pipeline.stage import TensorMeta


class P2PGroups(NamedTuple):
    """One group of a pipeline's ranks per direction, so that messages of the two directions do not block each other.

    If messages go in one direction only (one stage per rank), both may be the same group.

    Attributes:
        ascending: carries messages to a higher rank in the group.
        descending: carries messages to a lower rank in the group.
    """

    ascending: Group
    descending: Group

    def between(self, source: int, target: int) -> Group:
        """The group that carries messages from rank ``source`` to rank ``target``."""
        return self.ascending if source < target else self.descending

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.ascending.rank


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

    Args:
        activations: the pipeline's groups for activations.
        gradients: other groups of the same ranks, so that activations and gradients do not block each other.
        device: of received tensors.
    """

    def __init__(self, activations: P2PGroups, gradients: P2PGroups, device: torch.device):
        self.rank = activations.rank
        self._activations, self._gradients = activations, gradients
        self._device = device

    def send_activations(self, tensors: Sequence[Tensor], peer: int) -> SendHandle:
        """Start to send to the next stage, on rank ``peer``."""
        return _send(self._activations.between(self.rank, peer), tensors, peer)

    def send_gradients(self, tensors: Sequence[Tensor], peer: int) -> SendHandle:
        """Start to send to the previous stage, on rank ``peer``."""
        return _send(self._gradients.between(self.rank, peer), tensors, peer)

    def receive_activations(self, specs: Sequence[TensorMeta], peer: int) -> RecvHandle:
        """Start to receive from the previous stage, on rank ``peer``."""
        return self._receive(self._activations.between(peer, self.rank), specs, peer)

    def receive_gradients(self, specs: Sequence[TensorMeta], peer: int) -> RecvHandle:
        """Start to receive from the next stage, on rank ``peer``."""
        return self._receive(self._gradients.between(peer, self.rank), specs, peer)

    def _receive(self, group: Group, specs: Sequence[TensorMeta], peer: int) -> RecvHandle:
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs]
        return RecvHandle(tensors, [group.receive(tensor, peer) for tensor in tensors])


def _send(group: Group, tensors: Sequence[Tensor], peer: int) -> SendHandle:
    # Backends send contiguous memory only.
    dense = [tensor.detach().contiguous() for tensor in tensors]
    return SendHandle(dense, [group.send(tensor, peer) for tensor in dense])
