"""What a trace writes down: every unit call of one forward."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hybridpp.partition.attributes import Key
from hybridpp.partition.taint import Source


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it is computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


# What was returned, and nothing of the rest (see ``UnitCall.tree``).
_ONE_TENSOR = pytree.tree_structure((0, [], {}, {}))


@dataclass(frozen=True)
class Same:
    """A leaf that is the very tensor that another leaf is."""

    leaf: int


@dataclass
class UnitCall:
    """One call of a unit.

    Attributes:
        name: the unit.
        occurrence: how often it had been called before in this forward.
        sources: what its arguments stem from.
        parameters: names of the parameters it holds.
        tree: structure of what it returned, of the changes to containers, and of what it left on its modules.
        leaves: per leaf of it a :class:`TensorSpec`, :class:`Same`, or the leaf itself where it is no tensor; behind
            them, the arguments that it wrote to in place without returning them.
        arguments: which leaves are an argument itself (returned or written to): the argument's place, by leaf.
        written: leaves that are written to in place after they were returned.
        changed: the containers (lists, dicts, objects) among its arguments that it put something else into, by place.
        refers: whether containers among its arguments are part of what it returned, or put into others.
        left: the attributes of its modules that it set to tensors.
        added: the lists and dicts among the attributes of its modules that it added tensors to.
        checkpointed: whether glue calls it inside activation checkpointing, so that it is called in backward again.
        flops: floating-point operations of its forward; 0 where they were not counted.
        inner: the finest units that it called, in order; itself where there is none inside it.
    """

    name: str
    occurrence: int
    sources: frozenset[Source]
    parameters: tuple[str, ...]
    tree: pytree.TreeSpec = field(repr=False)
    leaves: tuple[Any, ...] = ()
    arguments: dict[int, int] = field(default_factory=dict)
    written: frozenset[int] = frozenset()
    changed: tuple[int, ...] = ()
    refers: bool = False
    left: tuple[Key, ...] = ()
    added: tuple[Key, ...] = ()
    checkpointed: bool = False
    flops: int = 0
    inner: tuple[str, ...] = ()

    @cached_property
    def is_simple(self) -> bool:
        """Whether all that it did for others was to return one tensor of its own, as most blocks do."""
        one = self.tree == _ONE_TENSOR and len(self.leaves) == 1 and isinstance(self.leaves[0], TensorSpec)
        return one and not self.arguments


@dataclass(frozen=True)
class Trace:
    """Every unit call of one forward, and what the result stems from."""

    calls: tuple[UnitCall, ...]
    result_sources: frozenset[Source]
