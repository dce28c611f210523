"""The world of ``torch.distributed``: NCCL for device memory, gloo for host memory."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpp.cluster.neighbours import Neighbours, Sum, added, connect
from hybridpp.cluster.world import Pending, Work

T = TypeVar("T")
R = TypeVar("R")

# Larger sums and gathers go through gloo, which divides them among the ranks, and goes on by itself.
_MAX_EXCHANGED_BYTES = 2**21


class TorchGroup:
    """A ``torch.distributed`` process group as a :class:`~hybridpp.cluster.world.Group`.

    Where all ranks are on one host and its backend is gloo, messages and small collectives go through shared memory.

    Collective: every rank of the group must make it.
    """

    def __init__(self, process_group: dist.ProcessGroup):
        self.process_group = process_group
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.rank = dist.get_rank(process_group)
        self.size = len(self.ranks)
        self._host_only = dist.get_backend(process_group) == "gloo"
        self._neighbours = connect(process_group) if self._host_only else None
        self.overlaps = self._neighbours is None

    def _staged(self, tensor: Tensor) -> bool:
        return self._host_only and tensor.device.type != "cpu"

    def _exchanging(self, num_bytes: int) -> Neighbours | None:
        """Whom to exchange so much with; by what all ranks agree on alone: one that chose otherwise would hang."""
        return self._neighbours if num_bytes * (self.size - 1) <= _MAX_EXCHANGED_BYTES else None

    def all_reduce(self, tensor: Tensor) -> Work:
        host = tensor.cpu() if self._staged(tensor) else tensor
        neighbours = self._exchanging(host.nbytes)
        work: Work
        if neighbours is not None:
            work = Sum(neighbours.exchange([host] * self.size, host.shape), host)
        else:
            work = _started(dist.all_reduce(host, group=self.process_group, async_op=True))
        return work if host is tensor else _Staged(work, host, tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self.start_all_gather(tensor).wait()

    def start_all_gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        source = tensor.cpu() if self._staged(tensor) else tensor
        neighbours = self._exchanging(source.nbytes)

        def gathered(parts: list[Tensor]) -> list[Tensor]:
            if neighbours is not None:
                # A copy of its own: who asked may write to either.
                parts[self.rank] = source.clone()
            return [part.to(tensor.device) for part in parts]

        if neighbours is not None:
            return _Then(neighbours.exchange([source] * self.size, source.shape), gathered)
        parts = [torch.empty_like(source) for _ in self.ranks]
        work = _started(dist.all_gather(parts, source, group=self.process_group, async_op=True))
        return _Then(_Giving(work, parts), gathered)

    def all_gather_along(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self.all_gather(tensor.contiguous()), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return self.start_reduce_scatter(tensor, dim).wait()

    def start_reduce_scatter(self, tensor: Tensor, dim: int) -> Pending[Tensor]:
        parts = [part.contiguous() for part in tensor.chunk(self.size, dim)]
        if not self._host_only:
            mine = torch.empty_like(parts[self.rank])
            work = _started(dist.reduce_scatter(mine, parts, group=self.process_group, async_op=True))
            # With the parts, which are read until then.
            return _Then(_Giving(work, (mine, parts)), lambda both: both[0])
        parts = [part.cpu() for part in parts]
        neighbours = self._exchanging(parts[0].nbytes)
        if neighbours is not None:
            return _Then(neighbours.exchange(parts, parts[0].shape), lambda summands: added(summands).to(tensor.device))
        # gloo's own takes twice the time: it sums everything everywhere first. As bytes: it does not know every format.
        source = torch.stack(parts)
        target = torch.empty_like(source)
        to, of = (each.flatten().view(torch.uint8) for each in (target, source))
        work = _started(dist.all_to_all_single(to, of, group=self.process_group, async_op=True))
        return _Then(_Giving(work, list(target)), lambda summands: added(summands).to(tensor.device))

    def send(self, tensor: Tensor, peer: int) -> Work:
        host = tensor.cpu() if self._staged(tensor) else tensor
        if self._neighbours is not None:
            return self._neighbours.link(peer).send(host)
        work = _started(dist.isend(host, group=self.process_group, group_dst=peer))
        return work if host is tensor else _Staged(work, host, None)

    def receive(self, tensor: Tensor, peer: int) -> Work:
        host = tensor
        if self._staged(tensor):
            # Pinned, so that the copy to the device need not be staged a second time by the driver.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if self._neighbours is not None:
            work: Work = self._neighbours.link(peer).receive(host)
        else:
            work = _started(dist.irecv(host, group=self.process_group, group_src=peer))
        return work if host is tensor else _Staged(work, host, tensor)


class _Direct:
    """A communication of torch."""

    def __init__(self, work: dist.Work):
        self._work = work

    def wait(self) -> None:
        self._work.wait()


class _Staged:
    """A communication on a host copy, for a backend that cannot reach device memory."""

    def __init__(self, work: Work, host: Tensor, device: Tensor | None):
        self._work, self._host, self._device = work, host, device

    def wait(self) -> None:
        self._work.wait()
        if self._device is not None:
            self._device.copy_(self._host)


class _Giving(Generic[T]):
    """A communication, and what it fills."""

    def __init__(self, work: Work, given: T):
        self._work, self._given = work, given

    def wait(self) -> T:
        self._work.wait()
        return self._given


class _Then(Generic[T, R]):
    """What is made of what a communication gives."""

    def __init__(self, pending: Pending[T], function: Callable[[T], R]):
        self._pending, self._function = pending, function

    def wait(self) -> R:
        return self._function(self._pending.wait())


def _started(work: dist.Work | None) -> Work:
    assert work is not None, "this rank is a member of the group it communicates in"
    return _Direct(work)


class TorchWorld:
    """Every rank of the initialised default process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._control: TorchGroup | None = None

    @property
    def device(self) -> torch.device:
        """The current CUDA device where there is one, else the CPU."""
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def split(self, groups: Sequence[Sequence[int]]) -> TorchGroup | None:
        """The group that this rank is in. Collective: all ranks of the world, with the same lists."""
        mine = None
        for ranks in groups:
            process_group = dist.new_group(list(ranks))
            if self.rank in ranks:
                mine = TorchGroup(process_group)
        return mine

    def control(self) -> TorchGroup:
        """All ranks over gloo, whatever the backend of the data. Collective at the first call."""
        if self._control is None:
            whole = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
            assert whole is not None, "the default group is initialised"
            self._control = TorchGroup(whole)
        return self._control
