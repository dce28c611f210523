"""Which tensors hold the samples of a micro-batch, noted call by call."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from hybridpp.nn.deferred_tensor import MadeWhenRead
from hybridpp.pipeline.batch_dims import Dims, dim_at
from hybridpp.pipeline.sample_dims import Call, Found, SampleDim, samples_at, samples_in, tensors_of

# Their result has the numbers of their first argument in one order.
_OTHER_SHAPES = frozenset(["getitem", "unsqueeze", "squeeze", "view", "reshape", "flatten", "to", "long", "int"])
# They may repeat what they get, as for each sample.
_SPREADING = frozenset(["expand", "expand_as", "broadcast_to", "repeat", "tile"])
SIZES = frozenset(["size", "numel", "nelement", "shape"])
"""Names of functions that read sizes."""


def input_leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors of a batch in plain containers, with their paths."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif type(tree) is dict:
        for name, value in tree.items():
            yield from input_leaves(value, (*path, name))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from input_leaves(value, (*path, index))


def _begins_with_0(args: Sequence[Any]) -> bool:
    """Whether ``torch.arange`` counts up from 0 by 1, given its arguments."""
    start, step = args[0] if len(args) > 1 else 0, args[2] if len(args) > 2 else 1
    return bool(start == 0 and step == 1)


class Origins(Protocol):
    """What is known of where tensors come from."""

    def is_computed(self, tensor: Tensor) -> bool:
        """Whether a model computed it, as far as known."""

    def is_of_inputs(self, tensor: Tensor) -> bool:
        """Whether it is made of the inputs alone, as far as known."""

    def is_made_of_parameters(self, tensor: Tensor) -> bool:
        """Whether it is made of parameters alone, as far as known."""


class SampleTracker:
    """Where tensors hold samples, followed through the calls of functions.

    Args:
        num_samples: of the micro-batch.
        origins: of tensors.
    """

    def __init__(self, num_samples: int, origins: Origins):
        self._num_samples, self._origins = num_samples, origins
        self._samples: dict[int, tuple[Any, SampleDim]] = {}
        self._made: dict[int, Found] = {}
        self._counting_up: dict[int, Any] = {}
        self._deferred: list[MadeWhenRead] = []

    def begin(self, leaf: Tensor, path: tuple[Any, ...], dims: Dims) -> None:
        """Note an input of the micro-batch."""
        if isinstance(leaf, MadeWhenRead):
            self._deferred.append(leaf)
        dim = dim_at(path, dims)
        if dim is not None:
            self.hold(leaf, samples_at(dim, leaf.shape, self._num_samples))

    def hold(self, tensor: Tensor, samples: SampleDim | None) -> None:
        """Note where a tensor holds samples; None: nowhere."""
        if samples is None:
            self._samples.pop(id(tensor), None)
        else:
            self._samples[id(tensor)] = weakref.ref(tensor), samples

    def of(self, tensor: Tensor) -> SampleDim | None:
        """Where a tensor holds samples; None: nowhere, or that is not known."""
        noted = self._noted(tensor)
        if noted is not None:
            return noted
        if isinstance(tensor, MadeWhenRead):
            held = tensor.held()
            return None if held is None else self._noted(held)
        for leaf in self._deferred:
            if leaf.held() is tensor:
                return self._noted(leaf)
        return None

    def _noted(self, tensor: Tensor) -> SampleDim | None:
        reference, samples = self._samples.get(id(tensor), (None, None))
        return samples if reference is not None and reference() is tensor else None

    def follow(self, function: Callable[..., Any], name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note where the results of a call hold samples."""
        self._made = {}
        if name in SIZES:
            return
        if (name == "arange" and _begins_with_0(args)) or (name in _OTHER_SHAPES and self.counts_up(args, result)):
            self._counting_up[id(result)] = weakref.ref(result)
        for position, one in enumerate(tensors_of(result)):
            call = Call(
                function,
                name,
                args,
                kwargs,
                one,
                self.of,
                self._origins.is_computed,
                self._is_choice,
                self._num_samples,
                position,
            )
            self._made[id(one)] = found = samples_in(call)
            self.hold(one, found.samples or self._spread(name, args, one))

    def made(self, result: Any) -> Found:
        """What the call that was followed last made of the samples."""
        return self._made.get(id(result), Found())

    def _spread(self, name: str, args: Any, result: Tensor) -> SampleDim | None:
        """Where what is made of parameters alone was repeated for each sample, as its size shows."""
        if name not in _SPREADING or not args or not self._origins.is_made_of_parameters(args[0]):
            return None
        own = [1] * (result.dim() - args[0].dim()) + list(args[0].shape)
        dims = [dim for dim, size in enumerate(result.shape) if size == self._num_samples and own[dim] == 1 != size]
        return SampleDim(dims[0], is_sure=False) if dims else None

    def _is_choice(self, index: Tensor) -> bool:
        origins = self._origins
        is_known = origins.is_computed(index) or origins.is_of_inputs(index)
        return not is_known and not self.counts_up([index], index)

    def counts_up(self, args: Sequence[Any], result: Any) -> bool:
        """Whether a tensor has the numbers of one that ``torch.arange`` has made, the first argument."""
        reference = self._counting_up.get(id(args[0])) if args else None
        if reference is None or reference() is not args[0] or result.numel() != args[0].numel():
            return False
        indices = args[1] if len(args) > 1 and isinstance(args[1], tuple) else ()
        return not any(isinstance(one, Tensor | list) for one in (*indices, *args[1:2]))
