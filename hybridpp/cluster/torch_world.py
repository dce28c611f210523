"""The world of ``torch.distributed``: NCCL for device memory, gloo for host memory."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpp.cluster.world import Work


class _Staged:
    """A communication on a host copy, for a backend that cannot reach device memory."""

    def __init__(self, work: dist.Work, host: Tensor, device: Tensor | None):
        self._work, self._host, self._device = work, host, device

    def wait(self) -> None:
        self._work.wait()
        if self._device is not None:
            self._device.copy_(self._host)


class _Direct:
    """A communication that uses the tensor itself."""

    def __init__(self, work: dist.Work):
        self._work = work

    def wait(self) -> None:
        self._work.wait()


class _Exchanged:
    """A sum over two ranks of host memory: each sends the other what it has.

    gloo's own all-reduce takes longer for the few hundred kilobytes of an activation. Both ranks add the same two
    numbers.
    """

    def __init__(self, tensor: Tensor, process_group: dist.ProcessGroup, other: int):
        self._tensor, self._received = tensor, torch.empty_like(tensor)
        self._sent = _work(dist.isend(tensor, group=process_group, group_dst=other))
        self._arrived = _work(dist.irecv(self._received, group=process_group, group_src=other))

    def wait(self) -> None:
        self._arrived.wait()
        self._sent.wait()
        self._tensor.add_(self._received)


# Above it, a sum takes its time to copy, and should go on by itself.
_EXCHANGED_BYTES = 2**21


class TorchGroup:
    """A ``torch.distributed`` process group as a :class:`~hybridpp.cluster.world.Group`."""

    def __init__(self, process_group: dist.ProcessGroup):
        self.process_group = process_group
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.rank = dist.get_rank(process_group)
        self.size = len(self.ranks)
        self._host_only = dist.get_backend(process_group) == "gloo"

    def _staged(self, tensor: Tensor) -> bool:
        return self._host_only and tensor.device.type != "cpu"

    def all_reduce(self, tensor: Tensor) -> Work:
        if self._staged(tensor):
            host = tensor.cpu()
            return _Staged(_work(dist.all_reduce(host, group=self.process_group, async_op=True)), host, tensor)
        # By what the ranks agree on alone: one that chose otherwise would wait for ever.
        if self._host_only and self.size == 2 and tensor.nbytes <= _EXCHANGED_BYTES:
            return _Exchanged(tensor, self.process_group, 1 - self.rank)
        return _Direct(_work(dist.all_reduce(tensor, group=self.process_group, async_op=True)))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        source = tensor.cpu() if self._staged(tensor) else tensor
        parts = [torch.empty_like(source) for _ in self.ranks]
        dist.all_gather(parts, source, group=self.process_group)
        return [part.to(tensor.device) for part in parts]

    def all_gather_along(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self.all_gather(tensor.contiguous()), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        if self._host_only:
            # gloo's own takes twice the time: it sums everything everywhere first.
            summands = torch.stack(tensor.chunk(self.size, dim)).cpu()
            mine = torch.empty_like(summands)
            # As bytes: it does not know every format.
            source, target = (each.flatten().view(torch.uint8) for each in (summands, mine))
            dist.all_to_all_single(target, source, group=self.process_group)
            return mine.sum(0).to(tensor.device)
        parts = [part.contiguous() for part in tensor.chunk(self.size, dim)]
        mine = torch.empty_like(parts[self.rank])
        dist.reduce_scatter(mine, parts, group=self.process_group)
        return mine

    def send(self, tensor: Tensor, peer: int) -> Work:
        if self._staged(tensor):
            host = tensor.cpu()
            return _Staged(_work(dist.isend(host, group=self.process_group, group_dst=peer)), host, None)
        return _Direct(_work(dist.isend(tensor, group=self.process_group, group_dst=peer)))

    def receive(self, tensor: Tensor, peer: int) -> Work:
        if self._staged(tensor):
            # Pinned, so that the copy to the device need not be staged a second time by the driver.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            return _Staged(_work(dist.irecv(host, group=self.process_group, group_src=peer)), host, tensor)
        return _Direct(_work(dist.irecv(tensor, group=self.process_group, group_src=peer)))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is a member of the group it communicates in"
    return work


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
