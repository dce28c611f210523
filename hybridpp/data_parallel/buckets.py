"""Gradients in flat buffers, reduced over the replicas while the last backward still runs."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from itertools import groupby

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group
from hybridpp.data_parallel.sums import GradientSums
from hybridpp.errors import ConfigError

_UNKNOWN_BACKWARD = (
    "a backward pass that hybridpp does not know of reached a boosted model's parameters: its gradients would not be "
    "scaled or reduced. Call booster.backward(loss, optimizer) or booster.execute_pipeline."
)


class _State(Enum):
    CONSUMED = auto()
    LOCAL = auto()
    REDUCED = auto()


class GradientBuckets:
    """Owns the gradients of a rank's parameters: accumulates them over micro-batches and calls, and reduces them.

    Accumulation is in fp32 (float64 for float64 parameters). While gradients are wanted, ``parameter.grad`` is a view
    into the buckets, if they are ``visible`` and the dtypes agree; otherwise it is None.

    The rule for every precision: backward passes add up until ``consume`` (an optimizer step) is called; the next one
    then starts from zero. Gradients are summed over the replicas; what makes them a mean is the weight of the losses.

    Args:
        parameters: this rank's trainable parameters, by name, in the order of the forward.
        group: the replicas.
        capacity_mib: size of a bucket.
        shared: for a parameter of which several ranks hold a summand of the gradient (stages that share it, ranks
            that use it on different parts of an activation), their groups.
        communication_dtype: what gradients are rounded to on their way between replicas; None: as accumulated.
        visible: whether to show them as ``parameter.grad``.
        alike: one of the groups in ``shared``, whose members hold the same parameters: they sum those in one message.

    Attributes:
        parameters: as given.
        visible: as given.
        communication_dtype: as given.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Group,
        capacity_mib: float,
        shared: Mapping[str, Sequence[Group]] | None = None,
        communication_dtype: torch.dtype | None = None,
        visible: bool = True,
        alike: Group | None = None,
    ):
        self.parameters = parameters
        self._group = group
        self._sums = GradientSums(parameters, capacity_mib, visible, self._arrived)
        self._buckets = self._sums.buckets
        self._shared: list[tuple[str, Group, Tensor]] = []
        self._alike = alike
        for name, groups in (shared or {}).items():
            for one in groups:
                self.share(name, one, self._sums.views[name])
        self.communication_dtype = communication_dtype
        self.visible = visible
        self._used: set[str] = set()
        self._postponed: set[str] = set()
        self._state = _State.CONSUMED
        self._sync = True
        self._in_last_backward = False
        self._num_launched = 0

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The sums, by name."""
        return self._sums.read()

    def share(self, name: str, group: Group, view: Tensor) -> None:
        """Say that all members of a group hold a summand of a gradient, or of the part of it that ``view`` is."""
        self._shared.append((name, group, view))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up inside; the first backward outside, or ``finish``, reduces it all."""
        previous, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = previous

    def begin(self) -> None:
        """Get ready for backward passes."""
        if self._state is _State.CONSUMED:
            self.zero()
        if self._state is _State.REDUCED:
            self._keep_one_copy()
        self._sums.begin()
        self._state = _State.LOCAL

    def _keep_one_copy(self) -> None:
        """Before more is added to sums: the next reduction must count them once."""
        self._sums.read()
        if self._group.rank != 0:
            self._sums.forget()
        for _, group, view in self._shared:
            if group.rank != 0:
                view.zero_()

    def last_backward(self, pending: Collection[str] | None = None) -> bool:
        """Say that what follows completes the gradients: full buckets are sent off in it.

        Args:
            pending: the parameters that still get something; None: all may.

        Returns:
            Whether there is anybody to send them to.
        """
        if not self._sync or self._group.size == 1:
            return False
        for bucket in self._buckets:
            bucket.missing = set(bucket.views) if pending is None else set(bucket.views).intersection(pending)
        self._postponed.clear()
        self._sums.look_again()
        self._num_launched = 0
        self._in_last_backward = True
        self._launch(only_full=True)
        return True

    def postpone(self, names: Iterable[str]) -> None:
        """Say that the running backward pass leaves parts of these gradients, which come from outside."""
        self._postponed.update(names)

    def reached(self, names: Iterable[str]) -> None:
        """Say that :meth:`add` follows for these."""
        if self._state is _State.CONSUMED:
            raise ConfigError(_UNKNOWN_BACKWARD)
        self._used.update(names)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a part that does not come from autograd."""
        self._sums.add(name, gradient)

    def completed(self, name: str) -> None:
        """Say that what :meth:`add` was given last was the last part of the step."""
        if self._in_last_backward:
            self._sums.bucket_of[name].missing.discard(name)
            self._launch(only_full=True)

    def _arrived(self, name: str) -> bool:
        """A part came from autograd; whether the next ones of this gradient make no difference."""
        if self._state is _State.CONSUMED:
            raise ConfigError(_UNKNOWN_BACKWARD)
        self._used.add(name)
        if not self._in_last_backward:
            return True
        if name not in self._postponed:
            bucket = self._sums.bucket_of[name]
            if bucket.work is not None:
                raise ConfigError(
                    f"the gradient of {name!r} came in several parts in one backward pass, after it was sent off. "
                    "Reentrant activation checkpointing does that to a module that is called twice: checkpoint "
                    "with use_reentrant=False."
                )
            bucket.missing.discard(name)
            self._launch(only_full=True)
        return False

    def _launch(self, only_full: bool) -> None:
        """Start reductions, always in the order of the buckets, so that all replicas start the same."""
        for bucket in self._buckets[self._num_launched :]:
            if only_full and bucket.missing:
                return
            self._sums.read([bucket])
            bucket.send_off(self._group, self._used, self.communication_dtype)
            self._num_launched += 1

    def finish(self) -> None:
        """Complete the sums over replicas, then over ranks that hold summands of a gradient.

        Collective: all replicas of this stage, and all ranks that share a parameter; not inside ``no_sync``.
        """
        self._sums.look_again()
        self._sums.read()
        if not self._sync or self._state is not _State.LOCAL:
            return
        if self._group.size > 1:
            if not self._in_last_backward:
                self._num_launched = 0
            self._launch(only_full=False)
            for bucket in self._buckets:
                bucket.complete()
        self._in_last_backward = False
        for group, views in self._messages():
            _sum(views, group)
        self._used.update(name for name, _, _ in self._shared)
        self._state = _State.REDUCED

    def _messages(self) -> Iterator[tuple[Group, list[Tensor]]]:
        """What is summed at once, in order: a parameter's sums over several groups follow on each other."""
        for (group, _), shared in groupby(self._shared, lambda one: (one[1], one[2].dtype)):
            views = [view for _, _, view in shared]
            for together in [views] if group is self._alike else [[view] for view in views]:
                yield group, together

    @property
    def is_consumed(self) -> bool:
        """Whether there has been no backward pass since the last ``consume``."""
        return self._state is _State.CONSUMED

    @property
    def version(self) -> tuple[int, ...]:
        """Another one after each change of the gradients, also through ``parameter.grad``; ``.data`` escapes it."""
        return tuple(bucket.flat._version for bucket in self._buckets)

    @property
    def is_syncing(self) -> bool:
        """Whether gradients are reduced: not inside ``no_sync``."""
        return self._sync

    def launch(self) -> None:
        """Send off what is left after the last backward. Collective: all replicas of this stage."""
        if self._in_last_backward:
            self._launch(only_full=False)

    def unused(self) -> list[str]:
        """Parameters whose gradients no backward pass has reached on any replica."""
        unused = [name for name in self.parameters if name not in self._used]
        if self._group.size > 1 and unused:
            flags = [flag for bucket in self._buckets for flag in zip(bucket.views, bucket.flags.tolist(), strict=True)]
            reached = {name for name, flag in flags if flag}
            unused = [name for name in unused if name not in reached]
        return unused

    def adopt(self) -> None:
        """Take over gradients that were set or cleared from outside between backward and step."""
        if self._state is _State.CONSUMED:
            return
        for name, is_set in self._sums.adopt().items():
            if is_set:
                self._used.add(name)
            else:
                self._used.discard(name)

    def discard(self) -> None:
        """After an error in the middle of a step: forget what was added up, and whatever was under way."""
        self._in_last_backward = False
        for bucket in self._buckets:
            bucket.abandon()
        self.zero(set_to_none=False)
        self._state = _State.CONSUMED

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside, gradients add up from zero and are not reduced; behind, everything is as it was before.

        The sums wait in host memory.
        """
        self._sums.look_again()
        self._sums.read()
        host = [bucket.flat.to("cpu", copy=True) for bucket in self._buckets]
        used, state = set(self._used), self._state
        try:
            with self.no_sync():
                # In full, for whoever looks at them before anything comes.
                self.zero(set_to_none=False)
                yield
        finally:
            self._sums.look_again()
            self._sums.read()
            self._used, self._state, self._in_last_backward = used, state, False
            for bucket, flat in zip(self._buckets, host, strict=True):
                bucket.flat.copy_(flat)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        if factor != 1.0:
            self._sums.read()
            for bucket in self._buckets:
                bucket.flat.mul_(factor)

    def clamp(self, limit: float) -> None:
        """Bring every element into ``[-limit, limit]``."""
        self._sums.read()
        for bucket in self._buckets:
            bucket.flat.clamp_(-limit, limit)

    def zero(self, set_to_none: bool = True) -> None:
        """Forget all gradients; where they are shown, ``parameter.grad`` is None then, or zeros."""
        self._sums.forget(set_to_none)
        self._used.clear()
        self._state = _State.LOCAL

    def consume(self) -> None:
        """Mark the gradients as used: they stay readable until the next backward pass, which starts from zero."""
        self._sums.look_again()
        self._state = _State.CONSUMED


def _sum(views: list[Tensor], group: Group) -> None:
    if len(views) == 1 and views[0].is_contiguous():
        group.all_reduce(views[0]).wait()
        return
    total = torch.cat([view.reshape(-1) for view in views])
    group.all_reduce(total).wait()
    for view, part in zip(views, torch.split(total, [view.numel() for view in views]), strict=True):
        view.copy_(part.view(view.shape))
