"""The exchange of losses alone, which begins when they are known, and losses of evaluations, which wait for it."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybridpp.cluster import Group, HostCopy, Patience, PendingNumbers, start_gather_numbers
from hybridpp.nn.deferred_tensor import DeferredTensor, deferred

MessageOf: TypeAlias = Callable[[list[float], float], list[float]]
"""A rank's message, from its losses and the digest of what is still compared of its batch."""

_SCALAR = torch.empty(())


class LossExchange:
    """The end of a step whose ranks need no norm: it begins when the host knows this rank's losses.

    Args:
        control: all ranks.
        call: that this rank is in.
        losses: of this rank, float64; empty: it computes none.
        unchecked: see :class:`~hybridpp.cluster.HostCopy`.
        message_of: makes the message.

    Attributes:
        num_items: that this replica's loss is a mean over; set when the losses are known.
    """

    num_items = 0.0

    def __init__(self, control: Group, call: str, losses: Tensor, unchecked: Sequence[Tensor], message_of: MessageOf):
        self._control, self._call, self._message_of = control, call, message_of
        self._copy = HostCopy([losses], unchecked, early=True)
        self._exchange: PendingNumbers | None = None
        if losses.is_cpu and not unchecked:
            self._exchange = self._begin()

    def _begin(self) -> PendingNumbers:
        return start_gather_numbers(self._control, self._call, self._message_of(*self._copy.read()))

    def wait(self) -> Sequence[Sequence[float]]:
        """The messages of all ranks."""
        if self._exchange is None:
            self._exchange = self._begin()
        return self._exchange.wait()

    def check_calls(self, patience: Patience) -> Sequence[Sequence[float]]:
        """Look at the exchange if it has begun; see :meth:`~hybridpp.cluster.PendingNumbers.check_arrived`.

        Returns:
            The messages of all ranks, if they are here; else nothing.

        Raises:
            UnlikeCallsError: ranks are in different calls.
        """
        if self._exchange is None or not self._exchange.check_arrived(patience):
            return ()
        return self._exchange.wait()


class EvaluationLosses:
    """Losses of evaluations, which wait when they are read.

    The last stage is behind the others, which go on with the next batch. In training all losses are known at the end of
    a step, or all ranks wait for the norm.

    Args:
        device: of the losses.

    Attributes:
        pending: losses whose exchange may still run, each with that.
    """

    def __init__(self, device: torch.device):
        self.pending: deque[tuple[DeferredTensor, LossExchange]] = deque()
        self._device = device
        self._evaluated: Any = None

    def loss(self, exchange: LossExchange, close: Callable[[], Tensor], identity: Any) -> Tensor:
        """The loss of a batch, a scalar. Collective: all ranks; the first with a criterion waits for ``close``.

        Args:
            exchange: of the loss.
            close: waits for the loss, and checks what ranks report with it.
            identity: of the criterion.

        Raises:
            Exception: of ``close``: in the criterion's first step, on all ranks; then when the loss is read, or in
                :meth:`wait`.
        """
        if identity != self._evaluated:
            loss = close()
            self._evaluated = identity
            return loss
        refusal: Exception | None = None

        def close_once() -> Tensor:
            nonlocal refusal
            # The losses are exchanged once: who reads the loss again after an error gets the same error.
            if refusal is not None:
                raise refusal
            try:
                return close()
            except Exception as error:
                refusal = error
                raise

        lazy = deferred(_SCALAR, close_once, dtype=torch.float32, device=self._device)
        self.pending.append((lazy, exchange))
        return lazy

    def wait(self, num_left: int = 0) -> None:
        """Wait for all losses, except the last ``num_left``. Call it before the next step."""
        while len(self.pending) > num_left:
            self.pending.popleft()[0].values_now()

    def check_calls(self, patience: Patience) -> None:
        """See :meth:`LossExchange.check_calls`."""
        for _, exchange in self.pending:
            exchange.check_calls(patience)
