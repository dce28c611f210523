"""Records of the script's own calls of the model, from which the calls can be run again."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridpp.cluster import RandomState, random_state, set_random_state
from hybridpp.nn.torch_private import version_or_none
from hybridpp.sharded_activations import DeferredGatherTensor

_Forward = Callable[..., Any]

# Limit of the memory that recorded calls hold, except for the last call: gradients of logits are large.
MAX_BYTES = 64 * 2**20


@dataclass(eq=False)
class ManualCall:
    """One call of the model's forward, and the gradients of its outputs. It holds references, not copies.

    Attributes:
        number: the call's number, in the order of the calls.
        args: of the forward.
        kwargs: of the forward.
        random: the state of the random generators before the call.
        versions: version counters of the argument tensors, to detect later writes.
        gradients: of the returned tensors, by index; set in the backward pass.
        size: of arguments and gradients, in bytes.
    """

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    versions: list[int | None] = field(init=False)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        given = tensors_of((self.args, self.kwargs))
        self.versions = _versions(given)
        self.size = sum([tensor.nbytes for tensor in given])

    @property
    def is_as_it_was(self) -> bool:
        """Whether the arguments have not been written to since the call."""
        return self.versions == _versions(tensors_of((self.args, self.kwargs)))

    def again(
        self, forward: _Forward, device: torch.device, on_output_gradient: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Run forward and backward again with the same random numbers.

        ``on_output_gradient(output, gradient)`` is called for every output.
        """
        set_random_state(self.random, device)
        returned = tensors_of(forward(*self.args, **self.kwargs))
        starts = []
        for index, gradient in self.gradients.items():
            on_output_gradient(returned[index], gradient)
            starts.append(start := end_of(returned[index]))
            # The total gradient, which includes paths through other outputs: a returned loss depends on the logits.
            start.register_hook(functools.partial(_replaced, gradient))  # type: ignore[no-untyped-call]  # torch
        torch.autograd.backward(starts, [torch.zeros_like(start) for start in starts])


class NotRepeatable(Exception):
    """The reason why a call cannot be run again."""


@dataclass(frozen=True, kw_only=True)
class RecordedCalls:
    """The recorded calls at the end of a step.

    Attributes:
        calls: in the order in which the backward pass reached them; the last ones that fit the memory limit.
        numbers: of all calls that the backward pass reached, in the same order.
    """

    calls: Sequence[ManualCall]
    numbers: Sequence[int]

    def last(self, count: int) -> list[ManualCall]:
        """The last ``count`` recorded calls."""
        return list(self.calls[len(self.calls) - count :])

    def name(self, call: ManualCall) -> str:
        """``" call 2 of 3"``, in the order of the calls; "" if there is only one."""
        if len(self.numbers) == 1:
            return ""
        return f" call {sorted(self.numbers).index(call.number) + 1} of {len(self.numbers)}"


class ManualCallRecorder:
    """Runs the script's calls of one model, and records those that the backward pass reaches.

    Args:
        device: where the model draws random numbers.
        is_wanted: whether an overflow in the current step would be reported.
        diagnose: finds the source of an overflow, or raises :class:`NotRepeatable`.

    Attributes:
        kept: the calls that backward passes reached since the last step; the last ones that fit the memory limit.
    """

    def __init__(self, device: torch.device, is_wanted: Callable[[], bool], diagnose: Callable[[RecordedCalls], str]):
        self._device = device
        self._is_wanted = is_wanted
        self._diagnose = diagnose
        self._num_made = 0
        self.forget()

    def run(self, forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model's forward."""
        if not torch.is_grad_enabled() or not self._is_wanted():
            return forward(*args, **kwargs)
        self._num_made += 1
        call = ManualCall(self._num_made, args, kwargs, random_state(self._device))
        output = forward(*args, **kwargs)
        for index, tensor in enumerate(tensors_of(output)):
            if (end := end_of(tensor)).requires_grad:
                end.register_hook(functools.partial(self._came_back, call, index))  # type: ignore[no-untyped-call]  # torch
        return output

    def _came_back(self, call: ManualCall, index: int, gradient: Tensor) -> None:
        call.gradients[index] = gradient
        call.size += gradient.nbytes
        if call.number not in self._numbers:
            self._numbers.append(call.number)
            self.kept.append(call)
        while len(self.kept) > 1 and sum(kept.size for kept in self.kept) > MAX_BYTES:
            self.kept.pop(0).gradients.clear()

    def diagnose(self) -> str:
        """A description of where the overflow of a step came from. Collective: all ranks.

        Raises:
            NotRepeatable: it was not found; raised on every rank.
        """
        return self._diagnose(RecordedCalls(calls=self.kept, numbers=self._numbers))

    def forget(self) -> None:
        """Release all recorded calls."""
        self.kept: list[ManualCall] = []
        self._numbers: list[int] = []


def _versions(tensors: list[Tensor]) -> list[int | None]:
    return [version_or_none(tensor) for tensor in tensors]


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors in tuples, lists, dicts and Hugging Face outputs, each once."""
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


def end_of(tensor: Tensor) -> Tensor:
    """The tensor that receives the gradient of an output: of a deferred gather, the local shard."""
    return tensor.local if isinstance(tensor, DeferredGatherTensor) else tensor


def _replaced(gradient: Tensor, _: Tensor) -> Tensor:
    return gradient
