"""Micro-batches' inputs on the device of a stage: what it reads is copied ahead of use, the rest not at all.

Which inputs a stage reads is seen in its first micro-batches. All are deferred copies there, made by the first
operation that needs their values. Whatever was read once is copied beforehand from then on, so nothing can be missing.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hybridpp.nn.deferred_tensor import deferred
from hybridpp.nn.torch_private import pytree
from hybridpp.pipeline.batch import Microbatch

_Path = tuple[Any, ...]
ForwardKey = tuple[int, int]
"""A forward of a step: its stage and micro-batch."""


class SideStream(Protocol):
    """A stream of the device that copies run on while the current stream computes."""

    def active(self) -> AbstractContextManager[Any]:
        """Inside, operations are queued on this stream."""

    def wait_for_current(self) -> None:
        """Let this stream wait for what is queued on the current one."""

    def mark(self) -> Any:
        """The end of what is queued here now."""

    def hand_over(self, mark: Any, tensors: Sequence[Tensor]) -> None:
        """Let the current stream wait for a mark, and use tensors that were made before it."""


class CudaSideStream:
    """A side stream of a CUDA device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch

    def active(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def wait_for_current(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> Any:
        return self._stream.record_event()

    def hand_over(self, mark: Any, tensors: Sequence[Tensor]) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(mark)
        for tensor in tensors:
            # The allocator must not give its memory away while the current stream uses it.
            tensor.record_stream(current)


class InputCopies:
    """Copies inputs to one device, over all steps of one rank.

    Args:
        device: of the copies.
        side: the stream on which inputs are copied ahead; None: they are copied when they are needed. By default a CUDA
            device has one.
    """

    def __init__(self, device: torch.device, side: SideStream | None = None):
        self.device = device
        self.side = CudaSideStream(device) if side is None and device.type == "cuda" else side
        self._read: dict[tuple[int, bool], set[_Path]] = {}

    def read_by(self, stage: int, training: bool) -> set[_Path]:
        """The places in a batch that a stage has read, in training or in evaluation; added to when more are read."""
        return self._read.setdefault((stage, training), set())


class _Copied(NamedTuple):
    inputs: Any
    tensors: list[Tensor]
    mark: Any


class StepInputs:
    """The inputs of one step's micro-batches.

    Args:
        copies: of this rank.
        microbatches: of the step.
        training: whether the step trains.
        is_cut: whether the model has several stages; if not, its stage reads all inputs.
    """

    def __init__(self, copies: InputCopies, microbatches: Sequence[Microbatch], training: bool, is_cut: bool):
        self._copies = copies
        self._microbatches = microbatches
        self._training = training
        self._is_cut = is_cut
        self._next: dict[ForwardKey, ForwardKey] = {}
        self._ahead: dict[ForwardKey, _Copied] = {}

    def expect(self, forwards: Sequence[ForwardKey]) -> None:
        """Set the forwards of this rank, in order."""
        self._next = dict(pairwise(forwards))

    def take(self, stage: int, microbatch: int) -> Any:
        """The inputs of a forward that begins now; those of the next one are copied meanwhile."""
        key = stage, microbatch
        copied = self._ahead.pop(key, None) or self._copy(key)
        side, following = self._copies.side, self._next.get(key)
        if side is not None:
            side.hand_over(copied.mark, copied.tensors)
            if following is not None:
                self._ahead[following] = self._copy(following)
        return copied.inputs

    def _copy(self, key: ForwardKey) -> _Copied:
        stage, microbatch = key
        device, side = self._copies.device, self._copies.side
        read = self._copies.read_by(stage, self._training)
        inputs = self._microbatches[microbatch].inputs
        tensors: list[Tensor] = []

        def copy(path: _Path, leaf: Tensor) -> Tensor:
            if self._is_cut and path not in read and _is_deferrable(leaf):
                make = partial(self._read_late, read, path, leaf)
                return deferred(leaf, make, dtype=leaf.dtype, device=device)
            tensors.append(copy_to(leaf, device))
            return tensors[-1]

        if side is None:
            return _Copied(_map_tensors(inputs, copy), tensors, None)
        if any(leaf.device.type != "cpu" for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)):
            side.wait_for_current()
        with side.active():
            found = _map_tensors(inputs, copy)
        return _Copied(found, tensors, side.mark())

    def _read_late(self, read: set[_Path], path: _Path, leaf: Tensor) -> Tensor:
        read.add(path)
        return copy_to(leaf, self._copies.device)


def copy_to(leaf: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device``. The host does not wait: what a device copies from host memory is page-locked first."""
    if device.type == "cuda" and leaf.device.type == "cpu" and not _is_fast_source(leaf):
        leaf = torch.empty_like(leaf, pin_memory=True).copy_(leaf)
    # A copy even on the same device: parts of one tensor share a version counter, so a model that writes to its inputs
    # would break the backward passes of earlier micro-batches.
    return leaf.to(device, non_blocking=True, copy=True)


def _is_fast_source(leaf: Tensor) -> bool:
    """Whether a device can copy this host tensor without the host: page-locked, and without gaps."""
    if leaf.layout is not torch.strided or leaf.requires_grad:
        return True  # as torch does it
    dense = leaf.is_contiguous() or (leaf.dim() == 4 and leaf.is_contiguous(memory_format=torch.channels_last))
    return dense and leaf.is_pinned()


def _is_deferrable(leaf: Tensor) -> bool:
    plain = type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested
    return plain and not leaf.requires_grad and not leaf.is_quantized and not leaf.is_conj() and not leaf.is_neg()


def _map_tensors(tree: Any, function: Callable[[_Path, Tensor], Tensor], path: _Path = ()) -> Any:
    """``tree`` with ``function(path, leaf)`` for its tensors; inside of other containers all have one path."""
    # Handles most batches: torch's pytree creates reference cycles at every call.
    if isinstance(tree, Tensor):
        return function(path, tree)
    if type(tree) is dict:
        return {name: _map_tensors(value, function, (*path, name)) for name, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_map_tensors(value, function, (*path, index)) for index, value in enumerate(tree))
    return pytree.tree_map_only(Tensor, lambda leaf: function(path, leaf), tree)
