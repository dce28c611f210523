"""What is put on modules and tensors beside layers, with what was there before."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from hybridpp.nn.snapshot import MISSING, put_entry


class Change(Protocol):
    """Something that was put on a module or a tensor."""

    @property
    def owner(self) -> nn.Module | Tensor:
        """What it was put on."""

    @property
    def what(self) -> str:
        """What it is for."""

    @property
    def can_be_undone(self) -> bool:
        """Whether :meth:`undo` does anything."""

    def is_replaced(self) -> bool:
        """Whether somebody else has put something else there since."""

    def undo(self) -> None:
        """Put back what was there before."""


class AttributeSet(NamedTuple):
    """An entry of ``vars(owner)``.

    Attributes:
        owner: a module or a tensor.
        what: what it is for.
        name: of the attribute.
        before: its value before; ``MISSING``: there was none.
        put: its value.
    """

    owner: nn.Module | Tensor
    what: str
    name: str
    before: Any
    put: Any

    @property
    def can_be_undone(self) -> bool:
        return True

    def is_replaced(self) -> bool:
        return vars(self.owner).get(self.name, MISSING) is not self.put

    def undo(self) -> None:
        put_entry(vars(self.owner), self.name, self.before)


class HookPut(NamedTuple):
    """A hook of a module, or of a parameter's gradient.

    Attributes:
        owner: a module or a parameter.
        what: what it is for.
        remove: takes it off; None: that cannot be.
    """

    owner: nn.Module | Tensor
    what: str
    remove: Callable[[], None] | None

    @property
    def can_be_undone(self) -> bool:
        return self.remove is not None

    def is_replaced(self) -> bool:
        return False

    def undo(self) -> None:
        if self.remove is not None:
            self.remove()
