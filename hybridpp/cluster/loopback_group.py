"""Messages and collectives between ranks inside one process."""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hybridpp.cluster.loopback_messages import MessageEnd, Messages
from hybridpp.cluster.progress import Progress
from hybridpp.cluster.turn_taking import TurnTaking
from hybridpp.cluster.world import Patience, Pending, Work, check_real

T = TypeVar("T")


def _nowhere() -> str:
    return ""


class _Pending:
    """A communication that is complete when ``ready`` returns True."""

    def __init__(self, turns: TurnTaking, rank: int, ready: Callable[[], bool], what: str, progress: Progress | None):
        self._arguments = (rank, ready, what, _nowhere if progress is None else lambda: progress.location())
        self._turns = turns

    def wait(self) -> None:
        self._turns.wait_until(*self._arguments)

    def ends_within(self, patience: Patience) -> bool:
        return self._arguments[1]()  # where it is not so, no other rank has a turn


class _Result(Generic[T]):
    """The result of a pending communication."""

    def __init__(self, work: _Pending, finish: Callable[[], T]):
        self._work, self._finish = work, finish

    def wait(self) -> T:
        self._work.wait()
        return self._finish()

    def ends_within(self, patience: Patience) -> bool:
        return self._work.ends_within(patience)


def _sum(parts: list[Tensor]) -> None:
    total = torch.stack([part.detach() for part in parts]).sum(0)
    for part in parts:
        part.detach().copy_(total)


def _sum_segments(parts: list[Tensor]) -> None:
    for index, part in enumerate(parts):
        segments = [each.detach().view(len(parts), -1)[index] for each in parts]
        part.detach().view(len(parts), -1)[index].copy_(torch.stack(segments).sum(0))


def _copy_segments(parts: list[Tensor]) -> None:
    for index, source in enumerate(parts):
        for target in parts:
            if target is not source:
                target.detach().view(len(parts), -1)[index].copy_(source.detach().view(len(parts), -1)[index])


class LoopbackGroup:
    """Ranks of one process that communicate through a dict that they share.

    Args:
        turns: that the ranks take.
        shared: collectives that not all of them have called yet.
        messages: on their way between them.
        key: of this group, the same on all its members; its second part is their ranks, in order.
        rank: this one, in the world.

    Attributes:
        name: of the group.
        progress: of this rank; told of communications. None: nobody is told.
    """

    process_group = None
    overlaps = True
    transport = "in-process"
    name = ""
    progress: Progress | None = None

    def __init__(
        self,
        turns: TurnTaking,
        shared: dict[Any, Any],
        messages: Messages,
        key: tuple[Any, tuple[int, ...]],
        rank: int,
    ):
        self.ranks = key[1]
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self._world_rank = rank
        self._key = key
        self._turns = turns
        self._shared = shared
        self._messages = messages
        self._num_collectives: dict[str, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "LoopbackGroup":
        """The same: a copy of a model is on the same ranks."""
        return self

    @property
    def num_collectives(self) -> int:
        """How many this member has begun."""
        return sum(self._num_collectives.values())

    def _collect(
        self, kind: str, tensor: Tensor, finish: Callable[[list[Tensor]], None]
    ) -> tuple[dict[int, Tensor], _Pending]:
        """Submit this rank's tensor; the last rank calls ``finish`` on all of them, in rank order."""
        check_real(tensor)
        # Of gathered segments, this rank gives one.
        num_bytes = tensor.nbytes // self.size if kind == "all_gather_segments" else tensor.nbytes
        self._note(kind.removesuffix("_segments"), num_bytes, None)
        turn = self._num_collectives[kind] = self._num_collectives.get(kind, 0) + 1
        key = (self._key, kind, turn)
        parts: dict[int, Tensor] = self._shared.setdefault(key, {})
        parts[self.rank] = tensor
        self._turns.post(self._world_rank)
        if len(parts) == self.size:
            finish([parts[member] for member in range(self.size)])
            del self._shared[key]
        what = f"{kind} number {turn} of ranks {self.ranks}"
        return parts, _Pending(self._turns, self._world_rank, lambda: len(parts) == self.size, what, self.progress)

    def _note(self, kind: str, num_bytes: int, peer: int | None) -> None:
        if self.progress is not None and self.progress.observer is not None:
            self.progress.observer.started(self.name, kind, num_bytes, peer)

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._collect("all_reduce", tensor, _sum)[1]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self.start_all_gather(tensor).wait()

    def start_all_gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        parts, pending = self._collect("all_gather", tensor.detach().clone(), lambda parts: None)
        return _Result(pending, lambda: [parts[member].clone() for member in range(self.size)])

    def all_gather_along(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self.all_gather(tensor), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return self.start_reduce_scatter(tensor, dim).wait()

    def start_reduce_scatter(self, tensor: Tensor, dim: int) -> Pending[Tensor]:
        total = tensor.detach().clone()
        pending = self._collect("reduce_scatter", total, _sum)[1]
        return _Result(pending, lambda: total.chunk(self.size, dim)[self.rank].contiguous())

    def reduce_scatter_segments(self, flat: Tensor) -> Work:
        return self._collect("reduce_scatter_segments", flat, _sum_segments)[1]

    def all_gather_segments(self, flat: Tensor) -> Work:
        return self._collect("all_gather_segments", flat, _copy_segments)[1]

    def send(self, tensor: Tensor, peer: int) -> Work:
        return self._post(tensor, peer, f"rank {self.ranks[peer]} to receive", is_send=True)

    def receive(self, tensor: Tensor, peer: int) -> Work:
        return self._post(tensor, peer, f"a message from rank {self.ranks[peer]}", is_send=False)

    def _post(self, tensor: Tensor, peer: int, what: str, *, is_send: bool) -> Work:
        check_real(tensor)
        self._note("send" if is_send else "receive", tensor.nbytes, self.ranks[peer])
        messages, rank, other = self._messages, self._world_rank, self.ranks[peer]
        if messages.connect(self._key, rank, other):
            self._turns.post(self._world_rank)
        connected = partial(messages.is_connected, self._key, other, rank)
        self._turns.wait_until(rank, connected, f"the first message of rank {other} in its group")
        source, target = (rank, other) if is_send else (other, rank)
        done = messages.post(MessageEnd((self._key, source, target), is_send, tensor.detach()))
        self._turns.post(self._world_rank)
        return _Pending(self._turns, rank, lambda: bool(done), what, self.progress)
