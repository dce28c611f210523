"""Where gradients add up, and how they get there from autograd."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor, nn

from hybridpp.data_parallel.bucket import Bucket, chunks
from hybridpp.data_parallel.hook import GradientHook


class GradientSums:
    """The sums of a rank's gradients over micro-batches and calls, in flat buckets.

    A sum begins as a copy of its first part. Until that comes, the bucket may still hold the numbers of before, and
    ``parameter.grad`` is None, so that autograd puts a tensor of its own there; from then on it is a view into the
    bucket, if sums are ``visible`` and the dtypes agree, and autograd adds to that by itself.

    Args:
        parameters: trainable ones, by name, in the order of the forward.
        capacity_mib: size of a bucket.
        visible: whether to show the sums as ``parameter.grad``.
        arrived: ``arrived(name)`` is told of each part that autograd brings; whether it has heard enough for now.

    Attributes:
        buckets: in the order in which a backward pass completes them.
        bucket_of: each parameter's.
        views: each parameter's part of its bucket, whatever it holds; see :meth:`read`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        capacity_mib: float,
        visible: bool,
        arrived: Callable[[str], bool],
    ):
        # Backward meets the last parameters first: their bucket is full first.
        self.buckets = [Bucket(chunk) for chunk in chunks(dict(reversed(list(parameters.items()))), capacity_mib)]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.views}
        self.views: dict[str, Tensor] = {name: self.bucket_of[name].views[name] for name in parameters}
        self._parameters = dict(parameters)
        self._shown = {
            name: parameter
            for name, parameter in parameters.items()
            if visible and parameter.dtype == self.views[name].dtype
        }
        self._arrived = arrived
        # Those whose view holds numbers that do not count any more.
        self._stale: set[str] = set()
        # What autograd adds to by itself, in place, until something else begins: their hooks are off, which cost more
        # than adding to a small gradient.
        self._settled: set[str] = set()
        # Weak: Python's garbage collector does not see through torch's hooks, so one that held the sums would keep
        # them and the whole model for ever.
        hook = partial(_hook, weakref.ref(self))
        self._hooks = {name: GradientHook(one, partial(hook, name)) for name, one in parameters.items()}

    def forget(self, set_to_none: bool = True) -> None:
        """Start from zero; where sums are shown, ``parameter.grad`` is None then, or zeros."""
        self.look_again()
        for bucket in self.buckets:
            if not bucket.is_zero:
                self._stale.update(bucket.views)
        if not set_to_none:
            self.read()
            return
        for parameter in self._shown.values():
            parameter.grad = None

    def begin(self) -> None:
        """Get ready for backward passes."""
        self.look_again()
        for name, parameter in self._shown.items():
            view, gradient = self.views[name], parameter.grad
            if gradient is view:
                continue
            # Set to None from outside (module.zero_grad()) or never set: either way it counts as zero.
            if not self.bucket_of[name].is_zero:
                self._stale.add(name)
            parameter.grad = None if name in self._stale else view

    def add(self, name: str, gradient: Tensor) -> None:
        """Add to a sum."""
        if name not in self._stale:
            self.views[name].add_(gradient)
            return
        self._stale.discard(name)
        self.views[name].copy_(gradient)
        if name in self._shown:
            self._shown[name].grad = self.views[name]

    def read(self, buckets: Iterable[Bucket] | None = None) -> dict[str, Tensor]:
        """The sums so far, by name; ``buckets``: only these need be right."""
        if self._stale:
            for bucket in self.buckets if buckets is None else buckets:
                self._clean(bucket)
        return self.views

    def _clean(self, bucket: Bucket) -> None:
        stale = self._stale.intersection(bucket.views)
        if len(stale) == len(bucket.views):
            bucket.zero()
        else:
            for name in stale:
                bucket.views[name].zero_()
        self._stale -= stale
        for name in stale & self._shown.keys():
            # A user may have put one there.
            if self._shown[name].grad is None:
                self._shown[name].grad = bucket.views[name]

    def adopt(self) -> dict[str, bool]:
        """Take over what was put into ``parameter.grad`` from outside; which were, and whether to something."""
        self.read()
        changed = {}
        for name, parameter in self._shown.items():
            view, gradient = self.views[name], parameter.grad
            if gradient is view:
                continue
            changed[name] = gradient is not None
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
            parameter.grad = view
        return changed

    def look_again(self) -> None:
        """Be told of every part from now on."""
        for name in self._settled:
            self._hooks[name].on()
            # A backward pass with create_graph puts another tensor there, with the sum so far in it.
            self._take_in(name)
        self._settled.clear()

    def _take_in(self, name: str) -> None:
        """Have a gradient in its view, if autograd put another tensor there."""
        parameter, view = self._parameters[name], self.views[name]
        gradient = parameter.grad
        if gradient is None or gradient is view:
            return
        # With create_graph it has a graph.
        gradient = gradient.detach()
        if name in self._shown:
            view.copy_(gradient)
            self._stale.discard(name)
            parameter.grad = view
        else:
            self.add(name, gradient)
            parameter.grad = None

    def _part_came(self, name: str) -> None:
        self._take_in(name)
        # Not where another hook has taken the gradient away.
        if self._arrived(name) and self._parameters[name].grad is self.views[name]:
            self._settled.add(name)
            self._hooks[name].off()


def _hook(weak: "weakref.ref[GradientSums]", name: str, parameter: Tensor) -> None:
    if (sums := weak()) is not None:
        sums._part_came(name)
