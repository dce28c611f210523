"""One flat buffer of gradients, and its way through a reduction."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group, Work

# Views start at multiples of this many elements, so that vector loads of every kernel are aligned.
_ALIGNMENT = 16


class Bucket:
    """Some parameters' gradients side by side in one buffer.

    Attributes:
        flat: the buffer; behind the gradients one flag per parameter, reduced in the same message: who reached it.
        flags: those.
        views: each parameter's part, by name.
        missing: parameters whose gradients are not complete yet.
        work: the reduction under way.
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
        self.missing: set[str] = set()
        self.work: Work | None = None
        self._sent = self.flat
        self._version_of_zeros = self.flat._version

    @property
    def is_zero(self) -> bool:
        """Whether nothing was written since :meth:`zero`; what ``.data`` does escapes it."""
        return self.flat._version == self._version_of_zeros

    def zero(self) -> None:
        """Forget the gradients."""
        if not self.is_zero:
            self.flat.zero_()
            self._version_of_zeros = self.flat._version

    def send_off(self, group: Group, used: Collection[str], dtype: torch.dtype | None) -> None:
        """Start to sum the buffer over a group, rounded to ``dtype`` on the way; ``used``: whom this rank reached."""
        flags = torch.tensor([float(name in used) for name in self.views], dtype=self.flat.dtype)
        self.flags.copy_(flags, non_blocking=True)
        self._sent = self.flat if dtype is None else self.flat.to(dtype)
        self.work = group.all_reduce(self._sent)

    def complete(self) -> None:
        """Have the sum in the buffer."""
        assert self.work is not None
        self.work.wait()
        if self._sent is not self.flat:
            self.flat.copy_(self._sent)
        self.abandon()

    def abandon(self) -> None:
        """Forget a reduction."""
        self.work, self._sent = None, self.flat


def _accumulation_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own strides where it fills its memory (fused optimizers demand it), else contiguous ones."""
    return torch.empty_like(parameter, device="meta").stride()


def chunks(parameters: dict[str, nn.Parameter], capacity_mib: float) -> Iterator[dict[str, nn.Parameter]]:
    """Consecutive parameters of one kind, up to the capacity."""
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
