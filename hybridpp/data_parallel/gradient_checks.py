"""What is tried in the passes of parts of a batch, as code that adds or changes gradients is called for each part."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from torch import nn
from torch.autograd.graph import Node

from hybridpp.data_parallel.activation_hooks import ActivationHooks
from hybridpp.data_parallel.function_checks import FunctionChecks
from hybridpp.data_parallel.hook_checks import HookChecks

# A script may put hooks on modules in every step.
_MAX_TRIED_AGAIN = 8


class GradientChecks:
    """Tries hooks on the gradients of parameters when they first change one, and the rest in the first pass.

    A pass before which the script has put hooks on gradients of modules is tried like the first one, and so are some
    later ones.

    Args:
        model: the user's.
        hooks: of parameters.

    Attributes:
        is_first: whether no pass has been tried yet.
    """

    def __init__(self, model: nn.Module, hooks: HookChecks):
        self.is_first, self._in_parts = True, True
        self._hooks, self._functions = hooks, FunctionChecks(hooks.factor)
        self._activations = ActivationHooks(model, hooks.factor)
        self._known_hooks: frozenset[int] | None = None
        self._num_tried_again = 0

    def look(self, *, again: bool = False) -> None:
        """Call before passes if hooks may have been put on modules since those before.

        Args:
            again: whether the passes are tried like the first ones, with what a forward has begun to do since then.
        """
        self.is_first |= again
        if self._num_tried_again == _MAX_TRIED_AGAIN:
            return
        known, self._known_hooks = self._known_hooks, self._activations.keys()
        if known is not None and self._known_hooks - known and not self.is_first:
            self._num_tried_again += 1
            self.is_first = True

    def read_factor(self) -> float:
        """By which the gradient is multiplied that something on trial is given now; the script's part of the factor."""
        return self._hooks.factor.read()

    @contextmanager
    def watching(self, *, has_hooks: bool, in_parts: bool = True) -> Iterator[bool]:
        """A context for passes; gives whether anything is tried in them.

        Args:
            has_hooks: whether the script has hooks on the gradients of parameters.
            in_parts: whether the passes are of parts of a batch; else only hooks on what ranks share are tried.
        """
        self._in_parts = in_parts
        is_first = self.is_first and in_parts
        if not has_hooks:
            yield is_first
            return
        with self._hooks.watching(in_parts=in_parts) as watches:
            yield is_first or watches

    @contextmanager
    def watching_forward(self, num_samples: int | None = None) -> Iterator[None]:
        """A context for a forward of the first step; ``num_samples``: of the part of the batch, if that is known."""
        with self._activations.watching(num_samples) if self.is_first else nullcontext():
            yield

    @contextmanager
    def trying(self, nodes: Iterable[Node]) -> Iterator[None]:
        """A context for a backward pass that begins at these nodes; after the first step, nothing is tried."""
        with self._functions.trying(nodes) if self.is_first and self._in_parts else nullcontext():
            yield

    def refusal(self) -> str:
        """Why the passes since the last call are refused; empty: they are not. The first ones are over then."""
        parts = self._hooks, self._functions, self._activations
        found = next((one.found for one in parts if one.found), "")
        for one in parts:
            one.found = ""
        self.is_first = self.is_first and not self._in_parts
        return found
