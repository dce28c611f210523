"""The update path's interface to a rank's gradients, independent of how they are stored."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn


class GradientReducer(Protocol):
    """Accumulates the gradients of a rank's parameters over micro-batches and calls, and sums them over replicas.

    A step of training calls ``begin``; ``begin_last_backward`` before the last backward pass; ``end_backward`` after
    each; ``launch_remaining`` and ``finish_grad_sync`` after the last. An update reads ``gradients`` and calls
    ``consume``; the next ``begin`` starts from zero. Collective, where a method says "reduces": all replicas of this
    stage, and all ranks that share a parameter.

    Attributes:
        parameters: this rank's trainable parameters, by name, in the order of the forward.
        exposes_grad: whether ``parameter.grad`` shows the gradients, so that the script may change them there.
        communication_dtype: dtype of the messages between replicas; None: the accumulation dtype.
        are_in_step: whether all replicas run the same passes in the next step, so that they begin reductions alike.
        cleared: parameters whose reduced gradients the script has set to None; see :meth:`sync_from_grad`.
    """

    parameters: Mapping[str, nn.Parameter]
    exposes_grad: bool
    communication_dtype: torch.dtype | None
    are_in_step: bool
    cleared: set[str]

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """This replica's part of the sums so far, by name, at least in fp32.

        Before a reduction, and after one that leaves the sums on all replicas, in the parameters' shapes. After one
        that scatters them, only of parameters of which this replica has a piece: flat, or in its shape if it is whole.
        """

    @property
    def held_tensors(self) -> list[Tensor]:
        """All memory that gradients have now; several tensors may share one."""

    def whole_gradients(self) -> Mapping[str, Tensor]:
        """The sums so far, by name, in the parameters' shapes. Collective: all replicas of this stage."""

    @property
    def has_hooks(self) -> bool:
        """Whether the script has hooks on the gradients of parameters."""

    @property
    def is_syncing(self) -> bool:
        """Whether gradients are reduced: not inside ``no_sync``."""

    @property
    def is_consumed(self) -> bool:
        """Whether there has been no backward pass since the last ``consume``."""

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass has reached a parameter here since the last ``consume`` or ``zero``."""

    @property
    def version(self) -> tuple[int, ...]:
        """Changes with every change of the gradients."""

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which gradients are only accumulated."""

    def release(self, name: str) -> None:
        """Let a parameter go: neither a hook nor a gradient is left on it."""

    def begin(self) -> None:
        """Prepare for backward passes."""

    def begin_last_backward(self, stage: int | None = None, pending: Collection[str] | None = None) -> bool:
        """Before the backward pass that completes the gradients of a stage (None: of all); may start reductions.

        ``pending`` are the parameters of the stage that the pass may add to; None: all of them.

        Returns:
            Whether gradients are reduced over replicas, so that each should be completed as early as possible.
        """

    def end_backward(self) -> None:
        """After a backward pass, before the next. ``finish_grad_sync`` does the same after the last."""

    def launch_remaining(self, stage: int | None = None) -> None:
        """Start the remaining reductions of a stage (None: of all) after that pass. Reduces."""

    def finish_grad_sync(self) -> None:
        """Complete all reductions. Reduces."""

    def unread_flags(self) -> Tensor | None:
        """What :meth:`unused_parameters` will read of the device, for the caller to read with other numbers."""

    def take_flags(self, flags: Sequence[float]) -> None:
        """Take over the numbers of :meth:`unread_flags`."""

    def unused_parameters(self) -> Collection[str]:
        """Parameters whose gradients no backward pass has reached on any replica, or the script has set to None."""

    def sync_from_grad(self) -> None:
        """Take over gradients that the script set or cleared in ``parameter.grad``."""

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""

    def clamp(self, limit: float) -> None:
        """Bring every element into ``[-limit, limit]``."""

    def sample(self) -> list[Tensor]:
        """Copies of some elements, at fixed positions."""

    def samples_of(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """Copies of some elements of the gradients of these parameters; of complex ones none."""

    def zero(self, set_to_none: bool = True) -> None:
        """Drop all gradients; exposed ``parameter.grad`` become None, or zeros unless ``set_to_none``."""

    def clear(self, set_to_none: bool) -> None:
        """Drop all gradients as a script does; without ``set_to_none``, those that were there are 0 in the next one."""

    def written(self) -> Collection[str]:
        """Parameters whose gradients the script has set since they were used or dropped; without passes since then."""

    def take_written(self, names: Iterable[str]) -> None:
        """Let gradients that the script has set be those of the next step, without others."""

    def consume(self) -> None:
        """Mark the gradients as used: they stay readable until the next ``begin``."""

    def resumed(self, reduces: bool) -> AbstractContextManager[None]:
        """A context for the rest of a step that an error ended, and that ``reduces`` gradients or only adds up."""

    def abort(self) -> None:
        """After an error in a step: drop its gradients and running reductions."""

    def stash(self) -> AbstractContextManager[None]:
        """A context in which gradients accumulate from zero and are not reduced; after it, they are as before."""
