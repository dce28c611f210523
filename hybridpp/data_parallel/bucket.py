"""A flat buffer of gradients, and its all-reduce."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group, Work

# Views start at multiples of this many elements, so that vector loads of every kernel are aligned.
_ALIGNMENT = 16


class Bucket:
    """Some parameters' gradients in one contiguous buffer.

    Attributes:
        flat: the buffer: the gradients, then one flag per parameter, which says whether a backward pass reached it.
        flags: the flags; they are reduced in the same message.
        views: each parameter's gradient, by name.
        pending: parameters whose gradients are not complete yet.
        work: the running reduction; None: there is none.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]):
        starts = [0]
        for parameter in parameters.values():
            starts.append(starts[-1] + -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT)
        first = next(iter(parameters.values()))
        self.flat = torch.zeros(starts[-1] + len(parameters), dtype=_accumulation_dtype(first), device=first.device)
        self.flags = self.flat[starts[-1] :]
        self.views = {
            name: self.flat.as_strided(parameter.size(), _strides(parameter), start)
            for (name, parameter), start in zip(parameters.items(), starts, strict=False)
        }
        self.pending: set[str] = set()
        self.work: Work | None = None
        self._sent = self.flat

    def sample(self, count: int) -> Tensor:
        """A copy of about ``count`` evenly spaced elements of the gradients and the zero padding between them."""
        size = self.flat.numel() - self.flags.numel()
        return self.flat[: size : max(1, size // count)].clone()

    def launch_reduce(self, group: Group, used: Collection[str], dtype: torch.dtype | None) -> None:
        """Start to all-reduce the buffer, rounded to ``dtype``, over a group. Collective: the group.

        Args:
            group: the replicas.
            used: parameters that a backward pass on this rank has reached.
            dtype: of the message; None: the buffer's dtype.
        """
        flags = torch.tensor([float(name in used) for name in self.views], dtype=self.flat.dtype)
        self.flags.copy_(flags, non_blocking=True)
        self._sent = self.flat if dtype is None else self.flat.to(dtype)
        self.work = group.all_reduce(self._sent)

    def wait(self) -> None:
        """Wait for the reduction, and copy the sum into the buffer."""
        assert self.work is not None
        self.work.wait()
        if self._sent is not self.flat:
            self.flat.copy_(self._sent)
        self.cancel()

    def cancel(self) -> None:
        """Forget the running reduction."""
        self.work, self._sent = None, self.flat


def _accumulation_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's strides if it is dense (fused optimizers require equal strides), else contiguous strides."""
    return torch.empty_like(parameter, device="meta").stride()


def split_into_buckets(parameters: dict[str, nn.Parameter], capacity_mib: float) -> Iterator[dict[str, nn.Parameter]]:
    """Consecutive parameters of one dtype and device, up to the capacity."""
    chunk: dict[str, nn.Parameter] = {}
    size = 0
    kind = None
    for name, parameter in parameters.items():
        dtype = _accumulation_dtype(parameter)
        nbytes = parameter.numel() * dtype.itemsize
        if chunk and (size + nbytes > capacity_mib * 2**20 or kind != (dtype, parameter.device)):
            yield chunk
            chunk, size = {}, 0
        chunk[name] = parameter
        size += nbytes
        kind = (dtype, parameter.device)
    if chunk:
        yield chunk
