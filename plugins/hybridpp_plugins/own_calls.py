"""Calls of the model that the script makes itself: what is kept of one, so that it can be run again."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridpp.cluster import RandomState, random_state, set_random_state
from hybridpp.tensor_parallel import LazyWhole

_Forward = Callable[..., Any]


@dataclass
class OwnCall:
    """One call of the model's forward, and what came back to it. Only references; nothing is copied.

    Attributes:
        args: of the forward.
        kwargs: of the forward.
        random: the generators before it.
        versions: of the tensors among the arguments: whether the script has written to them since.
        gradients: of the tensors that it returned, by their place; filled by the backward pass.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    versions: list[int] = field(init=False)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in _tensors((self.args, self.kwargs)) if not tensor.is_inference()]

    @property
    def is_as_it_was(self) -> bool:
        """Whether nobody has written to its arguments since."""
        return self.versions == self._versions()

    def again(self, forward: _Forward, device: torch.device, came_back: Callable[[Tensor, Tensor], None]) -> None:
        """Forward and backward with the same random numbers; ``came_back`` is shown outputs and their gradients."""
        set_random_state(self.random, device)
        returned = _tensors(forward(*self.args, **self.kwargs))
        starts = []
        for place, gradient in self.gradients.items():
            came_back(returned[place], gradient)
            starts.append(start := _end(returned[place]))
            # What came back in all, also from other outputs: a loss that the model returns is made of its logits.
            start.register_hook(functools.partial(_replaced, gradient))  # type: ignore[no-untyped-call]  # torch
        torch.autograd.backward(starts, [torch.zeros_like(start) for start in starts])


class CannotRepeat(Exception):
    """Why a call cannot be run a second time."""


class OwnCalls:
    """Runs the script's calls of one model; keeps the last one that a gradient came back to, where it may be asked for.

    Args:
        device: where the model draws random numbers.
        is_wanted: whether an overflow in the step that begins will be told.
        examine: finds out where one came from, or raises :class:`CannotRepeat`.
    """

    def __init__(self, device: torch.device, is_wanted: Callable[[], bool], examine: Callable[["OwnCall | None"], str]):
        self._last: OwnCall | None = None
        self._device = device
        self._is_wanted = is_wanted
        self._examine = examine

    def run(self, forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model's forward."""
        if not torch.is_grad_enabled() or not self._is_wanted():
            return forward(*args, **kwargs)
        call = OwnCall(args, kwargs, random_state(self._device))
        output = forward(*args, **kwargs)
        for place, tensor in enumerate(_tensors(output)):
            if (end := _end(tensor)).requires_grad:
                end.register_hook(functools.partial(self._came_back, call, place))  # type: ignore[no-untyped-call]  # torch
        return output

    def _came_back(self, call: OwnCall, place: int, gradient: Tensor) -> None:
        call.gradients[place] = gradient
        self._last = call

    def examine(self) -> str:
        """Where the overflow of a step came from, in words. Collective: all ranks.

        Raises:
            CannotRepeat: it cannot be found; on every rank alike.
        """
        return self._examine(self._last)

    def forget(self) -> None:
        """Let go of the last call."""
        self._last = None


def _tensors(output: Any) -> list[Tensor]:
    """Those in tuples, lists, dicts and Hugging Face outputs, each once."""
    found, pending = {}, [output]
    while pending:
        leaf = pending.pop()
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        elif isinstance(leaf, dict):
            pending.extend(leaf.values())
        elif isinstance(leaf, list | tuple):
            pending.extend(leaf)
    return list(found.values())


def _end(tensor: Tensor) -> Tensor:
    """Where the gradient of something that was returned arrives: of what is divided, at the part that is here."""
    return tensor.local if isinstance(tensor, LazyWhole) else tensor


def _replaced(gradient: Tensor, _: Tensor) -> Tensor:
    return gradient
