"""What the optimizer updates where replicas divide the parameters among themselves (ZeRO)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.nn.torch_private import version_of
from hybridpp.precision.mixed_precision import MasterWeights, ReplicatedTarget


class DividedWeights(Protocol):
    """Weights of which each replica updates pieces."""

    @property
    def pieces(self) -> Mapping[str, Tensor]:
        """Views of what this replica updates, by name."""

    @property
    def gathers_where_used(self) -> bool:
        """Whether whatever computes has gathered the pieces just before."""

    def gather(self) -> None:
        """Bring every replica's pieces into the weights. Collective: all replicas."""

    def moved(self) -> Iterable[str]:
        """Parameters that the script has given other memory."""

    def lost(self, written: Iterable[str]) -> Iterable[str]:
        """Of what the script has written to pieces since :meth:`gather`, that which the weights do not have.

        Args:
            written: the names of pieces that were written since, by anyone.
        """


class ShardedTarget(ReplicatedTarget):
    """The pieces of parameters that this replica updates: masters of them, or views of the weights.

    Args:
        parameters: this rank's trainable ones, by name.
        masters: of the pieces of those in half precision.
        weights: have the pieces.
        frozen: parameters that are not trained.

    Attributes:
        tensors: what is updated, by the parameter's name; parameters that lie on other replicas are missing.
    """

    is_divided = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        masters: MasterWeights,
        weights: DividedWeights,
        frozen: Iterable[nn.Parameter] = (),
    ):
        super().__init__(parameters, masters, frozen)
        pieces = weights.pieces
        self.tensors = {
            name: masters.masters.get(name, nn.Parameter(pieces[name])) for name in parameters if name in pieces
        }
        self._weights = weights
        self._own = [(name, one, pieces[name]) for name, one in self.tensors.items() if name not in masters.masters]
        self._versions = self._versions_now()
        self._count_writes()

    def _versions_now(self) -> list[int]:
        return [version_of(tensor) for _, tensor, _ in self._own]

    def take_over(self, *, before_update: bool = False) -> None:
        """See :class:`UpdateTarget`.

        Raises:
            ConfigError: the script wrote to what the optimizer updates, and no update follows.
        """
        now = zip(self._own, self._versions_now(), self._versions, strict=True)
        # With another address: p.data = ....
        written = (
            name
            for (name, tensor, piece), version, before in now
            if version != before or tensor.data_ptr() != piece.data_ptr()
        )
        for name in self._weights.lost(() if before_update else written):
            # Pieces that lie in one buffer have one counter.
            self._refuse_written(f"{name}, or for a weight beside it,")
        self._bring_back()
        super().take_over(before_update=before_update)

    def _check_seen(self, written: Sequence[str]) -> None:
        if not self._weights.gathers_where_used:
            self._refuse_written(written[0])

    @staticmethod
    def _refuse_written(name: str) -> NoReturn:
        raise ConfigError(
            f"what the optimizer updates for {name} was written between steps (a tensor of optimizer.param_groups): "
            "with ZeRO it is this replica's part of the weight, or of an fp32 copy of it, from which the weights that "
            "compute are taken at a step only. Write to it between the backward pass and optimizer.step(), or to the "
            "model's parameters, under torch.no_grad(), on every rank."
        )

    @torch.no_grad()
    def _bring_back(self) -> None:
        """Copy tensors that were given other memory (``p.data = ...``) to where replicas gather them from."""
        for _, tensor, piece in self._own:
            if tensor.data_ptr() != piece.data_ptr():
                piece.copy_(tensor.data)
                tensor.data = piece

    def pull(self, *, in_step: bool = False, before_update: bool = False) -> None:
        """Take over weights of the model that the script has written to.

        Raises:
            ConfigError: the script gave a parameter other memory, or wrote to what the optimizer updates.
        """
        for name in self._weights.moved():
            raise ConfigError(
                f"{name} was given other memory after booster.boost ({name}.data = ..., model.to(...), or "
                "flatten_parameters()): with ZeRO, weights lie in buffers that the replicas share out. Write in "
                "place, with parameter.copy_(...) under torch.no_grad()."
            )
        super().pull(in_step=in_step, before_update=before_update)

    def push(self) -> None:
        """Bring the updated pieces into the model's weights. Collective: all replicas."""
        self._bring_back()  # the optimizer may have moved them, too
        super().push()
        self._weights.gather()
        self._versions = self._versions_now()
