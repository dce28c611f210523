"""Communications that are under way, with what is done when they end."""

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from hybridpp.cluster.world import Patience, Pending, PolledWork, Work

T = TypeVar("T")
R = TypeVar("R")


class StagedCopy:
    """A communication on a host copy, for a backend that cannot reach device memory."""

    def __init__(self, work: Work, host: Tensor, device: Tensor | None):
        self._work, self._host, self._device = work, host, device

    def wait(self) -> None:
        self._work.wait()
        if self._device is not None:
            self._device.copy_(self._host)


class WithResult(Generic[T]):
    """A communication and the tensors that it fills."""

    def __init__(self, work: PolledWork, result: T):
        self._work, self._result = work, result

    def wait(self) -> T:
        self._work.wait()
        return self._result

    def ends_within(self, patience: Patience) -> bool:
        return self._work.ends_within(patience)


class Mapped(Generic[T, R]):
    """A function of a communication's result."""

    def __init__(self, pending: Pending[T], function: Callable[[T], R]):
        self._pending, self._function = pending, function

    def wait(self) -> R:
        return self._function(self._pending.wait())

    def ends_within(self, patience: Patience) -> bool:
        return self._pending.ends_within(patience)


class FilledFrom(Generic[T]):
    """A communication whose result goes into a tensor that was there before; the result is not kept."""

    def __init__(self, pending: Pending[T], fill: Callable[[T], object]):
        self._pending: tuple[Pending[T], Callable[[T], object]] | None = (pending, fill)

    @property
    def is_done(self) -> bool:
        """Whether it has been waited for."""
        return self._pending is None

    def wait(self) -> None:
        if self._pending is not None:
            (pending, fill), self._pending = self._pending, None
            fill(pending.wait())
