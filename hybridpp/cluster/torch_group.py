"""Groups of ``torch.distributed``: NCCL for device memory, gloo for host memory."""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpp.cluster.direct_exchange import DirectExchange, add_into_own, received_beside
from hybridpp.cluster.exit_reports import NO_REPORT, ExitReason, no_exit_reason, timeout_error
from hybridpp.cluster.gloo_errors import is_gloo_error, is_gloo_timeout
from hybridpp.cluster.pending import FilledFrom, Mapped, StagedCopy, WithResult
from hybridpp.cluster.progress import Awaited, Progress
from hybridpp.cluster.shared_memory import PendingSum, SharedMemoryGroup, connect, sum_in_order
from hybridpp.cluster.wire_format import as_carried, resolved
from hybridpp.cluster.world import Patience, Pending, PolledWork, Work, check_real
from hybridpp.errors import PeerError
from hybridpp.nn.torch_private import timeout_of

# Torch 2.13 renamed them. From and to lists of tensors, every collective copies once more.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Larger collectives use gloo, which distributes their work over the ranks and proceeds by itself.
_MAX_EXCHANGED_BYTES = 2**21
# Sums of large segments under way: each holds memory for what the other ranks send.
_MAX_SUMS = 4
# Gloo waits without a limit for 0.
_LEAST_S = 0.001
# Bytes of small collectives under way, for the same reason.
_MAX_SMALL_BYTES = _MAX_SUMS * _MAX_EXCHANGED_BYTES


class TorchGroup:
    """A ``torch.distributed`` process group as a :class:`~hybridpp.cluster.world.Group`.

    If all ranks are on one host and the backend is gloo, messages and small collectives use shared memory.

    Collective: every rank of the group must construct it.

    Args:
        process_group: the ranks.
        shared_memory: whether this rank may share memory; it is used only if all ranks may.
        name: name of the group in errors.
        exit_reason: why a rank has ended.
        progress: of this rank; told of waits for other ranks. None: nobody is told.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        shared_memory: bool = True,
        name: str = "",
        exit_reason: ExitReason = no_exit_reason,
        progress: Progress | None = None,
    ):
        self.process_group: dist.ProcessGroup | None = process_group
        self.name = name
        self._exit_reason = exit_reason
        self._timeout_s = timeout_of(process_group).total_seconds()
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.rank = dist.get_rank(process_group)
        self.size = len(self.ranks)
        self._host_only = dist.get_backend(process_group) == "gloo"
        self._shared_memory_group = (
            connect(process_group, shared_memory, name, exit_reason) if self._host_only else None
        )
        self.progress = Progress() if progress is None else progress
        if self._shared_memory_group is not None:
            self._shared_memory_group.tell_waits(self.progress, self.ranks, name)
        self.overlaps = self._shared_memory_group is None
        self._started = [0] * (1 + 2 * self.size)
        self._exchanges: deque[DirectExchange] = deque()
        self._sums: deque[Work] = deque()
        # Through shared memory, with what each receives.
        self._small: deque[tuple[FilledFrom[Any] | PendingSum, int]] = deque()
        self._small_bytes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "TorchGroup":
        """The same: a copy of a model is on the same ranks."""
        return self

    @property
    def transport(self) -> str:
        """What small messages travel by."""
        if self._shared_memory_group is not None:
            return "shared memory"
        return "gloo" if self._host_only else "nccl"

    @property
    def num_collectives(self) -> int:
        """How many this member has begun."""
        return self._started[0]

    @property
    def started(self) -> tuple[int, list[int], list[int]]:
        """Number of collectives started here, and of sends to and receives from each member."""
        collectives, *messages = self._started
        return collectives, messages[: self.size], messages[self.size :]

    def _note(self, kind: str, tensor: Tensor, counter: int = 0, peer: int | None = None) -> None:
        """Count a communication that starts, and tell who observes them."""
        self._started[counter] += 1
        if self.progress.observer is not None:
            self.progress.observer.started(self.name, kind, tensor.nbytes, peer)

    def leave(self) -> None:
        """Tell the other ranks, if they share memory, that this one leaves the job in order."""
        if self._shared_memory_group is not None:
            self._shared_memory_group.leave()

    def has_left(self, peer: int) -> bool | None:
        """Whether a member has left the job in order; None: nothing here would tell."""
        return None if self._shared_memory_group is None else self._shared_memory_group.has_left(peer)

    def release(self) -> None:
        """Release the group's resources in this process; it cannot communicate afterwards. May be called again."""
        if self._shared_memory_group is not None:
            self._shared_memory_group.close()
        # Its threads end with the last reference to it.
        self.process_group = None

    def detach(self) -> None:
        """Let nothing go over this object any more; copies of the group stay as they are. May be called again."""
        self._shared_memory_group = self.process_group = None

    def _staged(self, tensor: Tensor) -> bool:
        check_real(tensor)
        return self._host_only and tensor.device.type != "cpu"

    def _exchanging(self, num_bytes: int) -> SharedMemoryGroup | None:
        """The shared-memory group, if the message is small enough; depends only on what all ranks agree on, to avoid
        deadlocks."""
        return self._shared_memory_group if num_bytes * (self.size - 1) <= _MAX_EXCHANGED_BYTES else None

    def _start(self, start: Callable[..., dist.Work | None], *args: Any, **options: Any) -> PolledWork:
        """Start a communication of ``torch.distributed``; its errors name the waiting and the missing ranks."""
        if self.process_group is None:
            raise PeerError(
                f"group {self.name} was released: its plugin was closed, or the job was left. Make a new plugin, and "
                "boost the model again."
            )
        try:
            work = start(*args, group=self.process_group, **options)
        except RuntimeError as error:
            if not is_gloo_error(error):
                raise
            raise self.lost(error, options.get("group_src", options.get("group_dst"))) from error
        assert work is not None, "this rank is a member of the group it communicates in"
        if not self._host_only:
            return _TorchWork(work)
        return _GlooWork(work, self, options.get("group_src", options.get("group_dst")))

    def lost(self, error: RuntimeError, peer: int | None = None) -> PeerError:
        """The error for a peer that is silent or gone; gloo's own names its address only. ``peer``: None in a
        collective."""
        others = [rank for rank in self.ranks if rank != self.ranks[self.rank]] if peer is None else [self.ranks[peer]]
        who = f"one of the ranks {', '.join(map(str, self.ranks))}" if peer is None else f"rank {self.ranks[peer]}"
        who += f" (group {self.name})"
        if is_gloo_timeout(error):
            return timeout_error(who, self._timeout_s, self.progress.location(), by_network=True)
        reasons = [text for text in map(self._exit_reason, others) if text]
        why = " ".join(reasons) or NO_REPORT
        return PeerError(f"{who} is gone: {str(error).splitlines()[0]}. {why}")

    def all_reduce(self, tensor: Tensor) -> Work:
        self._note("all_reduce", tensor)
        host = tensor.cpu() if self._staged(tensor) else tensor
        shared_memory_group = self._exchanging(host.nbytes)
        work: Work
        if shared_memory_group is not None:
            work = PendingSum(shared_memory_group.exchange([host] * self.size, host.shape), host)
            self._limit_small(work, host.nbytes)
        else:
            work = self._start(dist.all_reduce, host, async_op=True)
        return work if host is tensor else StagedCopy(work, host, tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self.start_all_gather(tensor).wait()

    def start_all_gather(self, tensor: Tensor) -> Pending[list[Tensor]]:
        self._note("all_gather", tensor)
        source = resolved(tensor.cpu() if self._staged(tensor) else tensor)
        shared_memory_group = self._exchanging(source.nbytes)

        if shared_memory_group is None:
            # Parts that count their own versions, because the caller may write to each.
            return Mapped(
                self._start_stacked(source), lambda stacked: [part.data for part in stacked.to(tensor.device)]
            )

        def gathered(parts: list[Tensor]) -> list[Tensor]:
            # A separate copy, because the caller may write to either.
            parts[self.rank] = source.clone()
            return [part.to(tensor.device) for part in parts]

        return Mapped(shared_memory_group.exchange([source] * self.size, source.shape), gathered)

    def _start_stacked(self, source: Tensor) -> Pending[Tensor]:
        """Start to gather every member's tensor in one, whose first dimension is the members."""
        source = source.contiguous()
        stacked = source.new_empty((self.size, *source.shape))
        if self._host_only:
            stacked[self.rank].copy_(source)
            return WithResult(self._exchange([source] * self.size, list(stacked)), stacked)
        to, of = as_carried(stacked).view(-1), as_carried(source).view(-1)
        work = self._start(_all_gather_single, to, of, async_op=True)
        return WithResult(work, stacked)

    def all_gather_along(self, tensor: Tensor, dim: int) -> Tensor:
        if self._exchanging(tensor.nbytes) is not None or self._staged(tensor):
            return torch.cat(self.all_gather(tensor.contiguous()), dim)
        self._note("all_gather", tensor)
        stacked = self._start_stacked(resolved(tensor)).wait()
        return stacked.flatten(0, 1) if dim % tensor.dim() == 0 else torch.cat(stacked.unbind(), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return self.start_reduce_scatter(tensor, dim).wait()

    def start_reduce_scatter(self, tensor: Tensor, dim: int) -> Pending[Tensor]:
        check_real(tensor)
        self._note("reduce_scatter", tensor)
        source = _by_member(resolved(tensor), self.size, dim)
        if not self._host_only:
            own = source.new_empty(source.shape[1:])
            work = self._start(_reduce_scatter_single, own.view(-1), source.view(-1), async_op=True)
            # The source is kept alive, because it is read until then.
            return Mapped(WithResult(work, (own, source)), lambda both: both[0])
        source = source.cpu()
        shared_memory_group = self._exchanging(source[0].nbytes)
        if shared_memory_group is not None:
            return Mapped(
                shared_memory_group.exchange(list(source), source.shape[1:]),
                lambda summands: sum_in_order(summands).to(tensor.device),
            )
        summands = received_beside(source[self.rank], self.rank, self.size)
        work = self._exchange(list(source), summands)
        return Mapped(WithResult(work, summands), lambda summands: sum_in_order(summands).to(tensor.device))

    def reduce_scatter_segments(self, flat: Tensor) -> Work:
        check_real(flat)
        flat = flat.detach()
        segments = flat.view(self.size, -1)
        own = segments[self.rank]
        if self._staged(flat) or (self._host_only and self._exchanging(own.nbytes) is not None):
            return self._limit_small(FilledFrom(self.start_reduce_scatter(flat, 0), own.copy_), own.nbytes)
        self._note("reduce_scatter", flat)
        if not self._host_only:
            return self._start(_reduce_scatter_single, own, flat, async_op=True)
        while len(self._sums) >= _MAX_SUMS:
            self._sums.popleft().wait()
        summands = received_beside(own, self.rank, self.size)
        total = FilledFrom(WithResult(self._exchange(list(segments), summands), summands), self._add_into_own)
        self._sums.append(total)
        return total

    def all_gather_segments(self, flat: Tensor) -> Work:
        check_real(flat)
        flat = flat.detach()
        segments = flat.view(self.size, -1)
        own = segments[self.rank]
        if self._staged(flat) or self._exchanging(own.nbytes) is not None:
            gathered = FilledFrom(self.start_all_gather(own), lambda parts: torch.cat(parts, out=flat))
            return self._limit_small(gathered, own.nbytes)
        self._note("all_gather", own)
        if self._host_only:
            return self._exchange([own] * self.size, list(segments))
        return self._start(_all_gather_single, as_carried(flat), as_carried(own), async_op=True)

    def _limit_small(self, work: FilledFrom[Any] | PendingSum, num_bytes: int) -> Work:
        """Note a collective that receives so many bytes from each member; wait for the oldest ones if it is too much.

        No rank waits for this one to go on: what is sent through shared memory is there when the collective begins.
        """
        if self._exchanging(num_bytes) is None:
            return work
        self._small.append((work, num_bytes * (self.size - 1)))
        self._small_bytes += num_bytes * (self.size - 1)
        while self._small and (self._small[0][0].is_done or self._small_bytes > _MAX_SMALL_BYTES):
            oldest, size = self._small.popleft()
            self._small_bytes -= size
            oldest.wait()
        return work

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> DirectExchange:
        return DirectExchange(self._start, self.rank, outgoing, incoming, self._exchanges)

    def _add_into_own(self, summands: Sequence[Tensor]) -> None:
        add_into_own(summands, self.rank)

    def send(self, tensor: Tensor, peer: int) -> Work:
        self._note("send", tensor, 1 + peer, self.ranks[peer])
        host = tensor.cpu() if self._staged(tensor) else tensor
        if self._shared_memory_group is not None:
            return self._shared_memory_group.link(peer).send(host)
        work = self._start(dist.isend, as_carried(host), group_dst=peer)
        return work if host is tensor else StagedCopy(work, host, None)

    def receive(self, tensor: Tensor, peer: int) -> Work:
        self._note("receive", tensor, 1 + self.size + peer, self.ranks[peer])
        host = tensor
        if self._staged(tensor):
            # Pinned, so that the driver does not stage the copy to the device again.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if self._shared_memory_group is not None:
            work: Work = self._shared_memory_group.link(peer).receive(host)
        else:
            work = self._start(dist.irecv, as_carried(host), group_src=peer)
        return work if host is tensor else StagedCopy(work, host, tensor)


class _TorchWork:
    """A communication of torch."""

    def __init__(self, work: dist.Work):
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def ends_within(self, patience: Patience) -> bool:
        return patience.until(self._work.is_completed)


class _GlooWork:
    """A communication of gloo, whose errors become ones that name the ranks; ``peer`` is None for a collective."""

    def __init__(self, work: dist.Work, group: TorchGroup, peer: int | None):
        self._work, self._group, self._peer = work, group, peer
        self._number = group.started[0] if peer is None else None
        self._has_ended = False

    def awaited(self) -> Awaited:
        """What its wait is for."""
        group = self._group
        if self._peer is not None:
            return Awaited("a message", (group.ranks[self._peer],), group.name)
        others = tuple(rank for rank in group.ranks if rank != group.ranks[group.rank])
        return Awaited("a collective", others, group.name, self._number)

    def wait(self) -> None:
        if self._has_ended:
            return
        progress = self._group.progress
        progress.begin_wait(self.awaited)
        try:
            self._work.wait()
        except RuntimeError as error:
            if not is_gloo_error(error):
                raise
            raise self._group.lost(error, self._peer) from error
        finally:
            progress.end_wait()

    def ends_within(self, patience: Patience) -> bool:
        if self._peer is None:
            return patience.until(self._work.is_completed)
        # Gloo does not say of a message whether it is there. Where the time is over, it closes its connections.
        try:
            self._has_ended = self._work.wait(timedelta(seconds=max(patience.left_s, _LEAST_S)))
        except RuntimeError as error:
            if not is_gloo_error(error):
                raise
        return self._has_ended


def _by_member(tensor: Tensor, size: int, dim: int) -> Tensor:
    """The equal parts of a tensor along ``dim``, in a new first dimension: contiguous, copied at most once."""
    if dim % tensor.dim() == 0:
        return tensor.reshape(size, tensor.shape[0] // size, *tensor.shape[1:]).contiguous()
    return torch.stack(tensor.chunk(size, dim))
