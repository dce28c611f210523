"""The records of a trace: every unit call of one forward."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch

from hybridpp.nn.torch_private import pytree
from hybridpp.partition.derivatives import Derivative
from hybridpp.partition.hooks import HookEffects
from hybridpp.partition.left_state import LeftKey
from hybridpp.partition.module_outputs import AttributeKey
from hybridpp.partition.resets import AttributeReset
from hybridpp.partition.taint import Source

CallArguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call, of the model or of a unit."""

BufferKind: TypeAlias = tuple[type, str]
"""The class of a module, and the name of a buffer that modules of it have."""


@dataclass(frozen=True)
class TensorSpec:
    """Metadata of a tensor before it is computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


# The returned value only, without the other parts of ``UnitCall.tree``.
_ONE_TENSOR = pytree.tree_structure((0, [], {}, {}))


@dataclass(frozen=True)
class Same:
    """A leaf that is the same tensor object as another leaf."""

    leaf: int


@dataclass
class UnitCall:
    """One call of a unit.

    Attributes:
        name: name of the unit.
        occurrence: number of its earlier calls in this forward.
        sources: sources of its arguments.
        parameters: names of the parameters it holds.
        tree: structure of its result, of the changes to containers, and of the attributes it set on its modules.
        leaves: for each leaf of ``tree`` a :class:`TensorSpec`, :class:`Same`, or the leaf itself if it is no tensor;
            after them, the arguments that it wrote to in place without returning them.
        arguments: leaves that are an argument itself (returned or written to): its index among the leaves of all
            arguments, by leaf.
        given: structure of all arguments; None: no leaf is one.
        written: leaves that are written to in place after they were returned.
        reaches: whether it changed containers that hooks inside of it refer to, which then count after its arguments.
        changed: indices of the containers (lists, dicts, objects) among its arguments, and among what hooks inside of
            it refer to, whose contents it changed.
        uses_refs: whether containers among its arguments are part of its result, or were put into others.
        assigned: the attributes of its modules that it set to tensors.
        appended: the lists and dicts among the attributes of its modules to which it added tensors.
        checkpointed: whether container code calls it inside activation checkpointing, so that it is called in backward
            again.
        flops: floating-point operations of its forward; 0 if not counted.
        inner: the finest units that it called, in order; the unit itself if there are none inside it.
        others: other units that it called (a position table that is passed to every block).
        cache_entries_of: the calls whose tensors in a key-value cache it reads.
    """

    name: str
    occurrence: int
    sources: frozenset[Source]
    parameters: tuple[str, ...]
    tree: pytree.TreeSpec = field(repr=False)
    leaves: tuple[Any, ...] = ()
    arguments: dict[int, int] = field(default_factory=dict)
    given: pytree.TreeSpec | None = None
    written: frozenset[int] = frozenset()
    reaches: bool = False
    changed: tuple[int, ...] = ()
    uses_refs: bool = False
    assigned: tuple[AttributeKey, ...] = ()
    appended: tuple[AttributeKey, ...] = ()
    checkpointed: bool = False
    flops: int = 0
    inner: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    cache_entries_of: frozenset[int] = frozenset()

    @cached_property
    def is_simple(self) -> bool:
        """Whether its only effect was to return one new tensor, as for most blocks."""
        one = self.tree == _ONE_TENSOR and len(self.leaves) == 1 and isinstance(self.leaves[0], TensorSpec)
        return one and not self.arguments


@dataclass(frozen=True)
class Trace:
    """What is known of one forward.

    Attributes:
        calls: every unit call.
        result_sources: the sources of what it returns.
        resets: the attributes that are reset after each cut.
        hook_effects: what the hooks did that ran.
        derivatives: those that the forward computes.
        left: the attributes that it leaves changed for the next forward.
        left_by_containers: those of them that container code sets and that the next forward reads first; empty if the
            cuts were not known.
        replaced: those of these of which each stage of a rank can have a value of its own.
        written_buffers: the kinds of buffers to which units write.
    """

    calls: tuple[UnitCall, ...]
    result_sources: frozenset[Source]
    resets: tuple[tuple[AttributeReset, ...], ...] = ()
    hook_effects: HookEffects = field(default_factory=dict)
    derivatives: tuple[Derivative, ...] = ()
    left: tuple[LeftKey, ...] = ()
    left_by_containers: tuple[LeftKey, ...] = ()
    replaced: tuple[LeftKey, ...] = ()
    written_buffers: frozenset[BufferKind] = frozenset()
