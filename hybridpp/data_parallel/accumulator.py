"""Accumulation of gradients in flat buckets."""

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from hybridpp.data_parallel.bucket import Bucket, GradientSharding
from hybridpp.data_parallel.layout import ShardLayout
from hybridpp.nn.fp32_products import add_product
from hybridpp.nn.torch_private import foreach_add_, foreach_copy_, version_of

# Maximum number of sampled buckets, and of sampled elements in each.
_MAX_SAMPLES = 16
# Elements: the norms and biases of large models. A gradient that waits takes memory, at most as much as its parameter.
_MAX_SMALL = 2**16


class GradientAccumulator:
    """The sums of a rank's gradients over micro-batches and calls, in flat buckets.

    A sum starts as a copy of its first summand. Before that, the bucket may hold old values and ``parameter.grad`` is
    None, so that autograd creates a tensor there. After it, ``parameter.grad`` is a view into the bucket, to which
    autograd adds in place, if ``exposes_grad`` and the dtypes agree.

    Args:
        parameters: the trainable parameters, by name, in the order of the forward.
        layout: the buckets.
        exposes_grad: whether ``parameter.grad`` shows the sums.
        sharding: which sums are kept.

    Attributes:
        buckets: in the order in which a backward pass completes them.
        bucket_of: each parameter's bucket, by name.
        views: each parameter's view into its bucket, which may hold old values; see :meth:`zero_stale`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: ShardLayout,
        exposes_grad: bool,
        sharding: GradientSharding = GradientSharding.NONE,
    ):
        self.buckets = [Bucket(bucket, parameters, layout.index, sharding) for bucket in layout.buckets]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.views}
        self.views: dict[str, Tensor] = {name: self.bucket_of[name].views[name] for name in parameters}
        self._parameters = dict(parameters)
        self._exposed = {
            name: parameter
            for name, parameter in parameters.items()
            if exposes_grad and parameter.dtype == self.views[name].dtype
        }
        self._small = SmallGradients({name: self.views[name] for name in parameters if name not in self._exposed})
        self._is_hidden = False
        # Parameters whose view holds old values.
        self._stale: set[str] = set()
        # The version of each bucket when it was last all zero; writes through ``.data`` do not change the version.
        self._zero_versions = {bucket: -1 if bucket.frees else version_of(bucket.flat) for bucket in self.buckets}

    def reset(self, set_to_none: bool = True) -> None:
        """Set all sums to zero; exposed ``parameter.grad`` become None, or zeros unless ``set_to_none``."""
        self._small.clear()
        self._is_hidden = False
        for bucket in self.buckets:
            if bucket.frees or bucket.aside is not None:
                bucket.clear()
            if self._holds_numbers(bucket):
                self._stale.update(bucket.views)
        if not set_to_none:
            self.zero_stale()
            return
        for parameter in self._exposed.values():
            parameter.grad = None

    def hide(self) -> None:
        """Set exposed ``parameter.grad`` to None, until :meth:`begin`."""
        for parameter in self._exposed.values():
            parameter.grad = None
        self._is_hidden = True

    def begin(self) -> None:
        """Prepare for backward passes."""
        is_hidden, self._is_hidden = self._is_hidden, False
        for name, parameter in self._exposed.items():
            view, gradient = self.views[name], parameter.grad
            if gradient is view:
                continue
            if is_hidden:
                parameter.grad = None if name in self._stale else view
                continue
            # None, set by the script (module.zero_grad()) or never set, counts as zero.
            if self._holds_numbers(self.bucket_of[name]):
                self._stale.add(name)
            parameter.grad = None if name in self._stale else view

    def _holds_numbers(self, bucket: Bucket) -> bool:
        return version_of(bucket.flat) != self._zero_versions[bucket]

    def _ready(self, bucket: Bucket) -> None:
        """Let a bucket have memory that no earlier reduction uses."""
        if bucket.work is not None and bucket.each_pass:
            bucket.wait()
        if not bucket.is_open:
            bucket.open()
            self._zero_versions[bucket] = -1

    def lend(self, bucket: Bucket) -> None:
        """Let a reduction have what a bucket holds: the next gradient starts a new sum."""
        self._stale.update(bucket.views)
        for name in self._exposed.keys() & bucket.views.keys():
            self._exposed[name].grad = None

    def set_aside(self, bucket: Bucket) -> None:
        """Keep the reduced sums in a bucket apart; the next gradients start new ones, see :meth:`Bucket.set_aside`."""
        self.zero_stale([bucket])
        for name in self._exposed.keys() & bucket.views.keys():
            # The script has dropped it (module.zero_grad()).
            if not self._is_hidden and self._exposed[name].grad is not self.views[name]:
                self.views[name].zero_()
        bucket.set_aside()
        self.lend(bucket)

    def free(self, bucket: Bucket) -> None:
        """Free the buffer of a bucket whose sum is kept apart."""
        self.lend(bucket)
        bucket.close()

    def mark_written(self, bucket: Bucket) -> None:
        """Note that something wrote to a bucket of zeros, which its version may not show."""
        self._zero_versions[bucket] = -1

    def add(self, name: str, gradient: Tensor) -> None:
        """Add to the sum of the parameter ``name``: at the latest when the sum is read, and then with other small ones.

        Args:
            name: of the parameter.
            gradient: nobody writes to it afterwards.
        """
        if name in self._small.views:
            if self._small.has(name):
                self.add_collected()
            self._small.collect(name, gradient)
            return
        self._ready(self.bucket_of[name])
        if name not in self._stale:
            self.views[name].add_(gradient)
            return
        self._stale.discard(name)
        self.views[name].copy_(gradient)
        if name in self._exposed:
            self._exposed[name].grad = self.views[name]

    def add_product(self, name: str, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b`` to the fp32 sum of the half-precision parameter ``name``."""
        if self._small.has(name):
            # In the order of the calls.
            self.add_collected()
        self._ready(self.bucket_of[name])
        add_product(self.views[name], a, b, keep=name not in self._stale)
        self._stale.discard(name)

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The dtype of the parameter ``name``; None: there is none."""
        return self._parameters[name].dtype if name in self._parameters else None

    @property
    def small(self) -> Collection[str]:
        """Parameters whose gradients are added together."""
        return self._small.views.keys()

    def add_collected(self, buckets: Collection[Bucket] | None = None) -> None:
        """Add the gradients of small parameters that were given to :meth:`add`, in ``buckets`` (None: in all)."""
        if self._small:
            taken = self._small.take(None if buckets is None else [name for one in buckets for name in one.views])
            for bucket in {self.bucket_of[name] for name in taken}:
                self._ready(bucket)
            self._small.add(taken, self._stale)
            self._stale.difference_update(taken)

    def zero_stale(self, buckets: Collection[Bucket] | None = None) -> dict[str, Tensor]:
        """Complete the sums in ``buckets``: zeros instead of old values; returns all sums, by name.

        Args:
            buckets: None: all that are not reduced after each pass.
        """
        self.add_collected(buckets)
        if self._stale:
            for bucket in [one for one in self.buckets if not one.each_pass] if buckets is None else buckets:
                self._zero_stale_in(bucket)
        return self.views

    def _zero_stale_in(self, bucket: Bucket) -> None:
        stale = self._stale.intersection(bucket.views)
        if stale:
            self._ready(bucket)
        if len(stale) == len(bucket.views):
            if self._holds_numbers(bucket):
                bucket.flat.zero_()
                self._zero_versions[bucket] = version_of(bucket.flat)
        else:
            for name in stale:
                bucket.views[name].zero_()
        self._stale -= stale
        for name in stale & self._exposed.keys():
            # The script may have set another tensor.
            if self._exposed[name].grad is None:
                self._exposed[name].grad = bucket.views[name]

    @property
    def version(self) -> tuple[int, ...]:
        """Changes with every change of the sums, but not through ``.data``."""
        return tuple(version_of(bucket.flat) for bucket in self.buckets)

    def sample(self) -> list[Tensor]:
        """Copies of some elements, at fixed positions in a few buckets."""
        chosen = self.buckets[:: -(-len(self.buckets) // _MAX_SAMPLES) or 1]
        return [bucket.sample(_MAX_SAMPLES) for bucket in chosen]

    def flats(self, *, own: bool) -> list[Tensor]:
        """All sums as flat tensors; ``own``: this replica's segments of them, after a reduction."""
        if own:
            return [bucket.complete() for bucket in self.buckets]
        self.zero_stale()
        return [bucket.flat for bucket in self.buckets]

    def to_host(self) -> list[tuple[Tensor | None, ...]]:
        """Copies in host memory of all sums and of the segments that are kept apart, and those that are set aside."""
        held = [bucket for bucket in self.buckets if bucket.is_open and not bucket.each_pass]
        self.zero_stale(held)
        return [
            (
                bucket.flat.to("cpu", copy=True) if bucket in held else None,
                bucket.complete().to("cpu", copy=True) if bucket.frees else None,
                bucket.aside,
            )
            for bucket in self.buckets
        ]

    def from_host(self, copies: list[tuple[Tensor | None, ...]]) -> None:
        """Set all sums to what :meth:`to_host` gave."""
        self.zero_stale(self.buckets)
        for bucket, (flat, own, aside) in zip(self.buckets, copies, strict=True):
            bucket.aside = aside
            if flat is None:
                self.free(bucket)
            else:
                bucket.flat.copy_(flat)
            if own is not None:
                bucket.complete().copy_(own)

    def foreign_grads(self) -> dict[str, Tensor | None]:
        """Exposed ``parameter.grad`` that are not the sums, by name."""
        return {name: p.grad for name, p in self._exposed.items() if p.grad is not self.views[name]}

    def sync_from_grad(self) -> dict[str, bool]:
        """Copy ``parameter.grad`` that the script replaced into the sums.

        Returns:
            For each replaced gradient, by name, whether it is a tensor (False: None).
        """
        self.zero_stale()
        changed = {}
        for name, gradient in self.foreign_grads().items():
            view, parameter = self.views[name], self._exposed[name]
            changed[name] = gradient is not None
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
            parameter.grad = view
        return changed

    def move_to_view(self, name: str) -> None:
        """Move a gradient into its view, if autograd created another tensor for it."""
        parameter, view = self._parameters[name], self.views[name]
        gradient = parameter.grad
        if gradient is None or gradient is view:
            return
        # With create_graph the gradient has a graph.
        gradient = gradient.detach()
        if name in self._exposed:
            self._ready(self.bucket_of[name])
            view.copy_(gradient)
            self._stale.discard(name)
            parameter.grad = view
        else:
            self.add(name, gradient)
            parameter.grad = None


class SmallGradients:
    """Gradients that wait to be added to their sums, in a few kernels instead of one for each.

    Args:
        views: the sums, by parameter name; large ones are left out.

    Attributes:
        views: those of small parameters.
    """

    def __init__(self, views: Mapping[str, Tensor]):
        self.views = {name: view for name, view in views.items() if view.numel() <= _MAX_SMALL}
        self._waiting: dict[str, Tensor] = {}
        # Where gradients are converted to the sums' format.
        self._converted: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """The number of gradients that wait."""
        return len(self._waiting)

    def has(self, name: str) -> bool:
        """Whether a gradient of the parameter ``name`` waits."""
        return name in self._waiting

    def collect(self, name: str, gradient: Tensor) -> None:
        """Let a gradient wait, of a parameter of which none does."""
        self._waiting[name] = gradient

    def clear(self) -> None:
        """Drop what waits."""
        self._waiting.clear()

    def take(self, names: Collection[str] | None) -> dict[str, Tensor]:
        """What waits of the parameters ``names`` (None: of all), which waits no more."""
        taken = {name: self._waiting[name] for name in (self._waiting if names is None else names) if self.has(name)}
        for name in taken:
            del self._waiting[name]
        return taken

    def add(self, gradients: Mapping[str, Tensor], overwritten: Collection[str]) -> None:
        """Add to the sums, by name.

        Args:
            gradients: by name.
            overwritten: parameters whose sums hold old values, which the gradients replace.
        """
        groups: dict[tuple[bool, torch.dtype], list[str]] = defaultdict(list)
        for name, gradient in gradients.items():
            groups[name in overwritten, gradient.dtype].append(name)
        for (is_first, _), names in groups.items():
            views, parts = [self.views[name] for name in names], [gradients[name] for name in names]
            if is_first:
                foreach_copy_(views, parts)
            else:
                foreach_add_(views, self._as_sums(names, parts))

    def _as_sums(self, names: list[str], parts: list[Tensor]) -> list[Tensor]:
        """The gradients in the format of the sums, where torch adds lists of one format only in one kernel."""
        first = self.views[names[0]]
        if first.dtype is parts[0].dtype or first.device.type == "cpu":
            return parts
        for name in names:
            if name not in self._converted:
                self._converted[name] = torch.empty_like(self.views[name])
        converted = [self._converted[name] for name in names]
        foreach_copy_(converted, parts)
        return converted
