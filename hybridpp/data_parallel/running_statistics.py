"""Running statistics of batch normalisation: the same on all replicas, and those of one process."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group
from hybridpp.nn import walk
from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import NormWithStatistics, buffers_of, transient_buffers_of, version_of


class RunningStatistics:
    """The running means and variances of this rank's batch normalisation modules.

    Each forward pass updates them: ``r = (1 - momentum) * r + momentum * b``. The effect of ``k`` passes on one replica
    follows from its ``r`` before and after, and can be applied to any other ``r``. So the passes of all replicas are
    applied one after the other, as in one process that runs all micro-batches.

    ``SyncBatchNorm`` sees all replicas' batches itself and is not changed; nor are modules that count no passes.

    Args:
        model: this rank's part of the model.
        group: the ranks that hold the same part of other replicas.

    Attributes:
        is_needed: whether there are running statistics that replicas could disagree about; else all methods do nothing.
    """

    def __init__(self, model: nn.Module, group: Group):
        self._group = group
        self._norms: list[Any] = [module for module in walk.modules(model) if _keeps(module)] if group.size > 1 else []
        self._sizes: list[int] = [2 * norm.num_features for norm in self._norms]
        self._before: Tensor | None = None
        self.is_needed = bool(self._norms)

    def begin(self) -> None:
        """Call before forward passes. Nothing is communicated."""
        self._before = self._flat() if self._are_moving() else None

    @torch.no_grad()
    def finish(self) -> None:
        """Call after forward passes. Collective: the group, if a module was in training mode; one all-gather."""
        before, self._before = self._before, None
        if before is None:
            return
        start, count = now, total = self._split(before)
        decays = self._decays(start)
        for other in self._group.all_gather(self._flat()):
            values, seen = self._split(other)
            passes = seen - count
            # Without a momentum, they are the mean over all batches so far.
            kept = decays**passes
            kept_of_start = torch.where(decays.isnan(), count / seen.clamp(min=1), kept)
            kept = torch.where(decays.isnan(), total / (total + passes).clamp(min=1), kept)
            scale = torch.where(decays.isnan(), seen / (total + passes).clamp(min=1), 1.0)
            moved = self._wide(kept) * now + self._wide(scale) * (values - self._wide(kept_of_start) * start)
            now, total = torch.where(self._wide(passes) == 0, now, moved), total + passes
        self._set(now, total)

    @torch.no_grad()
    def average(self) -> None:
        """Average them over the replicas, where :meth:`begin` was not called. Collective: as :meth:`finish`."""
        if self._are_moving():
            values, counts = zip(*map(self._split, self._group.all_gather(self._flat())), strict=True)
            self._set(torch.stack(values).mean(0), torch.stack(counts).amax(0))

    def _are_moving(self) -> bool:
        return any(norm.training for norm in self._norms)

    def _flat(self) -> Tensor:
        """All statistics, then each module's number of passes, in one tensor."""
        tensors = [tensor for norm in self._norms for tensor in (norm.running_mean, norm.running_var)]
        counts = torch.stack([norm.num_batches_tracked for norm in self._norms])
        dtype = torch.float32
        for tensor in tensors:
            dtype = torch.promote_types(dtype, tensor.dtype)
        return torch.cat([*(tensor.to(dtype) for tensor in tensors), counts.to(dtype)])

    def _split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        values, counts = torch.split(flat, [sum(self._sizes), len(self._norms)])
        return values, counts

    def _decays(self, like: Tensor) -> Tensor:
        """By module, the factor of the old statistics in one pass; NaN where it depends on the number of passes."""
        momenta = [norm.momentum for norm in self._norms]
        decays = [float("nan") if momentum is None else 1.0 - momentum for momentum in momenta]
        return torch.tensor(decays, dtype=like.dtype).to(like.device, non_blocking=True)

    def _wide(self, by_module: Tensor) -> Tensor:
        sizes = torch.tensor(self._sizes).to(by_module.device, non_blocking=True)
        return torch.repeat_interleave(by_module, sizes, output_size=sum(self._sizes))

    def _set(self, values: Tensor, counts: Tensor) -> None:
        sizes = [size // 2 for size in self._sizes for _ in range(2)]
        targets = [tensor for norm in self._norms for tensor in (norm.running_mean, norm.running_var)]
        _copy(targets, torch.split(values, sizes))
        _copy([norm.num_batches_tracked for norm in self._norms], counts.round().unbind())


def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def _keeps(module: nn.Module) -> bool:
    if not isinstance(module, NormWithStatistics) or isinstance(module, nn.SyncBatchNorm):
        return False
    # What this rank does not own is an attribute, not a buffer.
    held = buffers_of(module)
    return all(held.get(name) is not None for name in ("running_mean", "running_var", "num_batches_tracked"))


class BufferWriteDetector:
    """Detects forward passes that write to persistent buffers other than running statistics.

    Args:
        model: this rank's part of the model.
    """

    def __init__(self, model: nn.Module):
        self._seen = {name: (buffer, version_of(buffer)) for name, buffer in _others(model)}

    def written(self, model: nn.Module) -> list[str]:
        """The names of the buffers that were written to, or replaced, since this object was made."""
        now = [(name, buffer, *self._seen.get(name, (None, 0))) for name, buffer in _others(model)]
        return [name for name, buffer, before, version in now if buffer is not before or version_of(buffer) != version]


def _others(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in walk.named_modules(model):
        if isinstance(module, NormWithStatistics):
            continue
        for name, buffer in buffers_of(module).items():
            if buffer is not None and name not in transient_buffers_of(module):
                yield qualified(prefix, name), buffer
