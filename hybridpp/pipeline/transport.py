"""Carry activations to the next stage and gradients to the previous one."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpp.cluster import Group, Work
from hybridpp.pipeline.stage import TensorSpec


class Lanes(NamedTuple):
    """The ranks of a pipeline, once per direction, so that no message waits behind one of the other direction.

    Where every stage's neighbour sits on one side (one stage per rank), one group can be both.

    Attributes:
        ascending: for messages to a higher place in the group.
        descending: for messages to a lower one.
    """

    ascending: Group
    descending: Group

    def between(self, source: int, target: int) -> Group:
        """The group that carries from one place to another."""
        return self.ascending if source < target else self.descending

    @property
    def rank(self) -> int:
        """This process's place."""
        return self.ascending.rank


class Receipt:
    """Tensors under way to this rank, or handed over by another stage on it."""

    __slots__ = ("_tensors", "_works")

    def __init__(self, tensors: list[Tensor], works: Sequence[Work] = ()):
        self._tensors = tensors
        self._works = works

    def wait(self) -> list[Tensor]:
        """The tensors, once they are here."""
        for work in self._works:
            work.wait()
        self._works = ()
        return self._tensors


class Sent:
    """Tensors under way to another rank, which must stay until they are there."""

    __slots__ = ("_tensors", "_works")

    def __init__(self, tensors: list[Tensor], works: list[Work]):
        self._tensors = tensors
        self._works = works

    def wait(self) -> None:
        """Return, and let go of the tensors, when they are away; until then the peer must have asked for them."""
        for work in self._works:
            work.wait()
        self._tensors, self._works = [], []


class Transport:
    """Sends and receives lists of tensors whose shapes both sides know.

    Args:
        activations: the ranks of the pipeline.
        gradients: the same ranks, over other groups: a send never waits behind the other kind.
        device: where received tensors are put.
    """

    def __init__(self, activations: Lanes, gradients: Lanes, device: torch.device):
        self.rank = activations.rank
        self._activations, self._gradients = activations, gradients
        self._device = device

    def send_activations(self, tensors: Sequence[Tensor], peer: int) -> Sent:
        """To the next stage, on the rank ``peer``. Returns at once."""
        return _send(self._activations.between(self.rank, peer), tensors, peer)

    def send_gradients(self, tensors: Sequence[Tensor], peer: int) -> Sent:
        """To the previous stage, on the rank ``peer``. Returns at once."""
        return _send(self._gradients.between(self.rank, peer), tensors, peer)

    def receive_activations(self, specs: Sequence[TensorSpec], peer: int) -> Receipt:
        """Start to receive from the previous stage, on the rank ``peer``."""
        return self._receive(self._activations.between(peer, self.rank), specs, peer)

    def receive_gradients(self, specs: Sequence[TensorSpec], peer: int) -> Receipt:
        """Start to receive from the next stage, on the rank ``peer``."""
        return self._receive(self._gradients.between(peer, self.rank), specs, peer)

    def _receive(self, group: Group, specs: Sequence[TensorSpec], peer: int) -> Receipt:
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs]
        return Receipt(tensors, [group.receive(tensor, peer) for tensor in tensors])


def _send(group: Group, tensors: Sequence[Tensor], peer: int) -> Sent:
    # Backends send contiguous memory only.
    dense = [tensor.detach().contiguous() for tensor in tensors]
    return Sent(dense, [group.send(tensor, peer) for tensor in dense])
