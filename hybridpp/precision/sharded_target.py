"""What the optimizer updates where replicas divide the parameters among themselves (ZeRO)."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.nn.torch_private import version_of
from hybridpp.precision.mixed_precision import MasterWeights, ReplicatedTarget


class DividedWeights(Protocol):
    """Weights of which each replica updates pieces."""

    @property
    def pieces(self) -> Mapping[str, Tensor]:
        """Views of what this replica updates, by name."""

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

    def _versions_now(self) -> list[int]:
        return [version_of(tensor) for _, tensor, _ in self._own]

    def _take_over(self) -> None:
        now = zip(self._own, self._versions_now(), self._versions, strict=True)
        # With another address: p.data = ....
        written = (
            name
            for (name, tensor, piece), version, before in now
            if version != before or tensor.data_ptr() != piece.data_ptr()
        )
        for name in self._weights.lost(written):
            # Pieces that lie in one buffer have one counter.
            self._refuse_written(f"{name}, or for a weight beside it,")
        super()._take_over()

    def pull(self, *, in_step: bool = False) -> None:
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
        super().pull(in_step=in_step)

    def push(self) -> None:
        """Bring the updated pieces into the model's weights. Collective: all replicas."""
        for _, tensor, piece in self._own:
            # The optimizer has given it other memory (p.data = ...).
            if tensor.data_ptr() != piece.data_ptr():
                piece.copy_(tensor.data)
                tensor.data = piece
        super().push()
        self._weights.gather()
        self._versions = self._versions_now()
