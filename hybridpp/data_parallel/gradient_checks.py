"""What is tried in the passes of parts of a batch, as code that adds or changes gradients is called for each part."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from torch.autograd.graph import Node

from hybridpp.data_parallel.function_checks import FunctionChecks
from hybridpp.data_parallel.hook_checks import HookChecks


class GradientChecks:
    """Tries hooks on the gradients of parameters when they first change one, and the rest in the first pass.

    Args:
        hooks: of parameters.

    Attributes:
        is_first: whether no pass has been tried yet.
    """

    def __init__(self, hooks: HookChecks):
        self.is_first = True
        self._hooks, self._functions = hooks, FunctionChecks(hooks.factor)

    def read_factor(self) -> float:
        """By which the gradient is multiplied that something on trial is given now; the script's part of the factor."""
        return self._hooks.factor.read()

    @contextmanager
    def watching(self, *, has_hooks: bool) -> Iterator[bool]:
        """A context for passes; gives whether anything is tried in them.

        Args:
            has_hooks: whether the script has hooks on the gradients of parameters.
        """
        if not has_hooks:
            yield self.is_first
            return
        with self._hooks.watching() as watches:
            yield self.is_first or watches

    @contextmanager
    def trying(self, nodes: Iterable[Node]) -> Iterator[None]:
        """A context for a backward pass that begins at these nodes; after the first step, nothing is tried."""
        with self._functions.trying(nodes) if self.is_first else nullcontext():
            yield

    def refusal(self) -> str:
        """Why the passes since the last call are refused; empty: they are not. The first ones are over then."""
        found = self._hooks.found or self._functions.found
        self._hooks.found, self._functions.found, self.is_first = "", "", False
        return found
