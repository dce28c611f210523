"""What the optimizer updates where replicas divide the parameters among themselves (ZeRO)."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from hybridpp.errors import ConfigError
from hybridpp.precision.mixed_precision import MasterWeights, ReplicatedTarget


class ShardedTarget(ReplicatedTarget):
    """The pieces of parameters that this replica updates: masters of them, or views of the weights.

    Args:
        parameters: this rank's trainable ones, by name.
        masters: of the pieces of those in half precision.
        pieces: views of the weights that this replica updates, by name.
        gather: brings every replica's pieces into the weights. Collective: all replicas.
        moved: names of parameters that the script has given other memory.
        frozen: parameters that are not trained.

    Attributes:
        tensors: what is updated, by the parameter's name; parameters that lie on other replicas are missing.
    """

    is_divided = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        masters: MasterWeights,
        pieces: Mapping[str, Tensor],
        gather: Callable[[], None],
        moved: Callable[[], Iterable[str]],
        frozen: Iterable[nn.Parameter] = (),
    ):
        super().__init__(parameters, masters, frozen)
        self.tensors = {
            name: masters.masters.get(name, nn.Parameter(pieces[name])) for name in parameters if name in pieces
        }
        self._gather, self._moved = gather, moved
        self._own = [(self.tensors[name], pieces[name]) for name in self.tensors if name not in masters.masters]

    def pull(self, *, in_step: bool = False) -> None:
        """Take over weights of the model that the script has written to.

        Raises:
            ConfigError: the script gave a parameter other memory.
        """
        for name in self._moved():
            raise ConfigError(
                f"{name} was given other memory after booster.boost ({name}.data = ..., model.to(...), or "
                "flatten_parameters()): with ZeRO, weights lie in buffers that the replicas share out. Write in "
                "place, with parameter.copy_(...) under torch.no_grad()."
            )
        super().pull(in_step=in_step)

    def push(self) -> None:
        """Bring the updated pieces into the model's weights. Collective: all replicas."""
        for tensor, piece in self._own:
            # The optimizer has given it other memory (p.data = ...).
            if tensor.data_ptr() != piece.data_ptr():
                piece.copy_(tensor.data)
                tensor.data = piece
        super().push()
        self._gather()
