"""The tensors that an optimizer updates on a rank, in place of the model's parameters."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn


class UpdateTarget(Protocol):
    """Parameters, their fp32 masters, or the pieces of them that this rank updates.

    An update is ``pull``, then ``fetch`` and the optimizer's step inside ``lent``, then ``push``. Collective: all
    replicas, each of these, where a rank updates only a part of what it computes with; else none.
    """

    @property
    def tensors(self) -> Mapping[str, nn.Parameter]:
        """The leaves that the optimizer holds, by the parameter's name."""

    @property
    def names(self) -> Mapping[int, str]:
        """The names of the model's parameters that are updated, by their ``id``."""

    @property
    def is_divided(self) -> bool:
        """Whether the tensors are parts of parameters, those that this replica updates."""

    def check(self, model: nn.Module) -> None:
        """Refuse a model with trainable parameters that are not updated.

        Raises:
            ConfigError: a parameter requires a gradient now that did not when the target was made, or was replaced.
        """

    def take_over(self, *, before_update: bool = False) -> None:
        """Bring what the script has written to the tensors since :meth:`push` into the weights, before these compute.

        Args:
            before_update: whether an update and :meth:`push` follow, and nothing computes before.

        Raises:
            ConfigError: the tensors are parts, which replicas exchange in :meth:`push` only, and no update follows.
        """

    def pull(self, *, in_step: bool = False, before_update: bool = False) -> None:
        """Take over model weights that the script has written since :meth:`push`, and tensors: :meth:`take_over`."""

    def lent(self, gradients: Mapping[str, Tensor], unused: Collection[str]) -> AbstractContextManager[None]:
        """A context in which ``grad`` of every tensor is its gradient, of the same shape; None if it is ``unused``."""

    @property
    def copies_gradients(self) -> bool:
        """Whether :meth:`fetch` copies gradients, which must be final by then."""

    def fetch(self) -> None:
        """Inside :meth:`lent`, bring the gradients to where the tensors are."""

    def push(self) -> None:
        """Copy the updated values into the model's weights."""
