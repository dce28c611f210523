"""Calls of the model that the script makes itself: what is kept of them, so that they can be run again."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridpp.cluster import RandomState, random_state, set_random_state
from hybridpp.tensor_parallel import LazyWhole

_Forward = Callable[..., Any]

# What calls may hold beyond the last one, which may hold what it will: the gradients of a text's logits are large.
MAX_BYTES = 64 * 2**20


@dataclass(eq=False)
class OwnCall:
    """One call of the model's forward, and what came back to it. Only references; nothing is copied.

    Attributes:
        number: counted as they are made.
        args: of the forward.
        kwargs: of the forward.
        random: the generators before it.
        versions: of the tensors among the arguments: whether the script has written to them since.
        gradients: of the tensors that it returned, by their place; filled by the backward pass.
        size: of arguments and gradients, in bytes.
    """

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    versions: list[int] = field(init=False)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        given = _tensors((self.args, self.kwargs))
        self.versions = _versions(given)
        self.size = sum([tensor.nbytes for tensor in given])

    @property
    def is_as_it_was(self) -> bool:
        """Whether nobody has written to its arguments since."""
        return self.versions == _versions(_tensors((self.args, self.kwargs)))

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


@dataclass(frozen=True, kw_only=True)
class KeptCalls:
    """What is left of the calls of a step, at its end.

    Attributes:
        calls: in the order in which gradients came back to them; as many of the last ones as there was room for.
        numbers: of all calls that gradients came back to, in the same order.
    """

    calls: Sequence[OwnCall]
    numbers: Sequence[int]

    def last(self, count: int) -> list[OwnCall]:
        """The last ``count`` of those that are kept."""
        return list(self.calls[len(self.calls) - count :])

    def name(self, call: OwnCall) -> str:
        """``" call 2 of 3"``, by the order in which they were made; "" of a single one."""
        if len(self.numbers) == 1:
            return ""
        return f" call {sorted(self.numbers).index(call.number) + 1} of {len(self.numbers)}"


class OwnCalls:
    """Runs the script's calls of one model; keeps those that gradients came back to, where they may be asked for.

    Args:
        device: where the model draws random numbers.
        is_wanted: whether an overflow in the step that begins will be told.
        examine: finds out where one came from, or raises :class:`CannotRepeat`.
    """

    def __init__(self, device: torch.device, is_wanted: Callable[[], bool], examine: Callable[[KeptCalls], str]):
        self._device = device
        self._is_wanted = is_wanted
        self._examine = examine
        self._num_made = 0
        self.forget()

    def run(self, forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model's forward."""
        if not torch.is_grad_enabled() or not self._is_wanted():
            return forward(*args, **kwargs)
        self._num_made += 1
        call = OwnCall(self._num_made, args, kwargs, random_state(self._device))
        output = forward(*args, **kwargs)
        for place, tensor in enumerate(_tensors(output)):
            if (end := _end(tensor)).requires_grad:
                end.register_hook(functools.partial(self._came_back, call, place))  # type: ignore[no-untyped-call]  # torch
        return output

    def _came_back(self, call: OwnCall, place: int, gradient: Tensor) -> None:
        call.gradients[place] = gradient
        call.size += gradient.nbytes
        if call.number not in self._numbers:
            self._numbers.append(call.number)
            self._kept.append(call)
        while len(self._kept) > 1 and sum(kept.size for kept in self._kept) > MAX_BYTES:
            self._kept.pop(0).gradients.clear()

    def examine(self) -> str:
        """Where the overflow of a step came from, in words. Collective: all ranks.

        Raises:
            CannotRepeat: it cannot be found; on every rank alike.
        """
        return self._examine(KeptCalls(calls=self._kept, numbers=self._numbers))

    def forget(self) -> None:
        """Let go of all calls that gradients came back to."""
        self._kept: list[OwnCall] = []
        self._numbers: list[int] = []


def _versions(tensors: list[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


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
