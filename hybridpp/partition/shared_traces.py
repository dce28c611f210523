"""Traces that the ranks of one process share: their models are equal, so that one of them traces for all."""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.nn.torch_private import forward_hooks_of, forward_pre_hooks_of, pytree
from hybridpp.partition.calls import Same, TensorSpec, Trace
from hybridpp.partition.trace_cache import is_plain, settings_of

# Kept for the ranks that have not asked yet. They ask soon: all trace at the same point of a step.
_MAX_TRACES = 16


class TracedForward(NamedTuple):
    """What a trace is of.

    Attributes:
        kind: of the model, its settings and the arguments.
        tensors: among the arguments; container code may look at their values.
    """

    kind: Hashable
    tensors: list[Tensor]

    @classmethod
    def of(
        cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Hashable
    ) -> "TracedForward | None":
        """Of ``model(*args, **kwargs)``; None if arguments cannot be compared.

        Args:
            model: the complete model.
            args: of its forward.
            kwargs: of its forward.
            kind: what else the trace depends on.
        """
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        rest = tuple((type(leaf), leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        if not all(is_plain(leaf) for _, leaf in rest) or not all(map(_has_values, tensors)):
            return None
        kinds = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
        return cls((kind, tree, rest, kinds, tuple(map(_module_kind, model.modules()))), tensors)

    def equals(self, other: "TracedForward") -> bool:
        """Whether the traces of both are equal."""
        return self.kind == other.kind and all(map(torch.equal, self.tensors, other.tensors))


class SharedTraces:
    """The traces of a model that in-process ranks hold in equal copies: the first rank that needs one makes it.

    Processes have no such ranks; each of them traces.
    """

    def __init__(self) -> None:
        self._traces: deque[tuple[TracedForward, Trace]] = deque(maxlen=_MAX_TRACES)

    def find(self, forward: TracedForward) -> Trace | None:
        """The trace that another rank made of an equal forward."""
        return next((trace for traced, trace in self._traces if traced.equals(forward)), None)

    def keep(self, forward: TracedForward, trace: Trace) -> None:
        """Keep a trace for the other ranks, unless it holds what belongs to the rank that made it."""
        if _is_of_any_rank(trace):
            copies = [tensor.detach().clone() for tensor in forward.tensors]
            self._traces.append((forward._replace(tensors=copies), trace))


def sizes_of(tensors: Sequence[Tensor]) -> Hashable:
    """What a trace depends on of a model's tensors."""
    return tuple((tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors)


def _has_values(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta


def _module_kind(module: nn.Module) -> Hashable:
    hooks = len(forward_pre_hooks_of(module)), len(forward_hooks_of(module))
    return type(module), settings_of(module), module.training, hooks


def _is_of_any_rank(trace: Trace) -> bool:
    """Whether a trace refers to no object of a model and to no state that units keep."""
    if any(trace.resets) or any(call.assigned or call.appended for call in trace.calls):
        return False
    leaves = (leaf for call in trace.calls for leaf in call.leaves)
    return all(isinstance(leaf, TensorSpec | Same) or is_plain(leaf) for leaf in leaves)
