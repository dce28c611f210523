"""What may be tried of a group of layers, the likeliest first."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product

import torch
from torch import nn

from hybridpp.tensor_parallel.division import Division, Part
from hybridpp.tensor_parallel.inference.attributes import (
    LIKELY,
    Attributes,
    choices,
    head_counts,
    settings,
    shared_heads,
)
from hybridpp.tensor_parallel.inference.flow import Flow
from hybridpp.tensor_parallel.inference.groups import Group, common_module
from hybridpp.tensor_parallel.inference.layouts import layouts_of
from hybridpp.tensor_parallel.inference.run import Call, copy_of
from hybridpp.tensor_parallel.inference.tables import (
    Sizes,
    fused_channels,
    joins_of,
    row_heads,
    tables_of,
    tables_with,
)
from hybridpp.tensor_parallel.linear import Layer
from hybridpp.tensor_parallel.narrowed import arguments_of_layers

# How many layouts are tried so: nearly all such modules have one of the first.
_NARROWED = 4


@dataclass(frozen=True)
class Found:
    """A division, with the styles that stand for it.

    Attributes:
        styles: of layers, by name.
        division: the same, by parameters.
        summed: parameters that stay whole and whose gradients are sums of the ranks'; known once it was tried.
    """

    styles: dict[str, str]
    division: Division
    summed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Way:
    """A layout of a group's layers.

    Attributes:
        styles: of the layers.
        division: the same, by parameters.
        shared: what becomes of counts of heads that several ranks share.
    """

    styles: dict[str, str]
    division: Division
    shared: Attributes

    def with_attributes(self, some: Iterable[Attributes], more: Division | None = None) -> Iterator[Found]:
        """One try for each choice of attributes, with ``more`` besides."""
        for attributes in some:
            division = self.division | Division(attributes=attributes | self.shared)
            yield Found(self.styles, division | more if more else division)


class Tries:
    """Lists how the groups of one block might be divided.

    Args:
        block: whose layers they are.
        call: with its arguments.
        layers: of the block, by name.
        flow: what they read.
        tp_size: by how much they are divided.
    """

    def __init__(self, block: nn.Module, call: Call, layers: dict[str, Layer], flow: Flow, tp_size: int):
        self._block, self._call, self._layers, self._flow, self._tp_size = block, call, layers, flow, tp_size

    def of(self, group: Group) -> Iterator[Found]:
        """Divisions of a group: of every layout the likely attributes, then what is around it, then all others."""
        ways = self._ways(group)
        found = settings(self._block, self._layers, group, self._tp_size)
        widths, likely = self._widths(group), self._likely(group)
        for way in ways:
            yield from way.with_attributes(likely)
        narrow = self._narrowed(group)
        for way in ways[:_NARROWED] if narrow.narrows else ():
            yield from way.with_attributes((*likely[:2], *likely[4:]), narrow)
        yield from self._around(group, ways, found, widths)
        for way in ways:
            yield from replace(way, shared={}).with_attributes(
                islice(choices(found, widths, self._tp_size), LIKELY, None)
            )

    def _around(self, group: Group, ways: list[_Way], found: Attributes, widths: set[int]) -> Iterator[Found]:
        """With fused channels, with tables and arguments, with modules that need all channels."""
        block, tp_size = self._block, self._tp_size
        likely = self._likely(group)
        reads = frozenset[str | int]().union(*(self._flow.reads[name] for name in group.rows))
        width = max(self._layers[name].num_inputs for name in group.rows)
        told = tuple(sorted(head_counts(found)))
        sizes = Sizes(told, tuple(dict.fromkeys((*told, *sorted(row_heads(block, reads, width))))), width)
        for way in ways:
            fused = fused_channels(block, reads, width, way.division)
            wider = list(islice(choices(found, widths.union(*fused.values()), tp_size), LIKELY)) if fused else []
            for table in tables_with(block, reads, fused, sizes, tp_size) if fused else ():
                yield from way.with_attributes((*wider[:2], *wider[4:]), table)
        every = list(tables_of(block, self._call, reads, sizes, tp_size))
        for some in (ways[:2], [way for way in ways[2:] if way.shared]):
            for table, way in product(every, some):
                yield from way.with_attributes((*likely[:2], *likely[4:]), table)

    def with_joins(self, group: Group) -> Iterator[Found]:
        """Divisions in which a module between a group's layers is given the ranks' parts put together.

        To be tried when no group has another: what is put together is communicated, and the group may have taken
        layers from one that is divided without.
        """
        reads = frozenset[str | int]().union(*(self._flow.reads[name] for name in group.rows))
        likely = self._likely(group)
        for way in self._ways(group):
            joins = joins_of(self._block, reads, self._parts_by_width(group, way.division))
            if joins.joins:
                yield from way.with_attributes(likely, joins)

    def _ways(self, group: Group) -> list[_Way]:
        return [
            _Way(styles, division, self._of_shared_heads(group, division))
            for styles, division in layouts_of(self._block, self._layers, self._flow, group, self._tp_size)
        ]

    def _widths(self, group: Group) -> set[int]:
        widths = {self._layers[name].num_outputs for name in group.columns}
        return widths | {self._layers[name].num_inputs for name in group.rows}

    def _likely(self, group: Group) -> list[Attributes]:
        found = settings(self._block, self._layers, group, self._tp_size)
        return list(islice(choices(found, self._widths(group), self._tp_size), LIKELY))

    def _narrowed(self, group: Group) -> Division:
        """For a module that takes the width of its heads from what it is given: that, as narrow as a rank's part."""
        name = common_module(group.columns)
        if not name:
            return Division()
        block, call = copy_of(self._block), self._call
        with torch.no_grad():
            # Copies: a block may write to what it is given.
            own = [tensor.clone() for tensor in call.tensors]
            found = arguments_of_layers(block, name, group.columns, lambda: call.run(block, own))
        return Division(
            narrows={(name, number): width for number, width in found.items() if width % self._tp_size == 0}
        )

    def _parts_by_width(self, group: Group, division: Division) -> dict[int, Part]:
        """How what a group's layers make and read lies on the ranks, in the last dimension."""
        parts = {self._layers[name].num_inputs: Part(-1, (self._layers[name].num_inputs,)) for name in group.rows}
        made = {self._layers[name].num_outputs: division.parts[f"{name}.weight"] for name in group.columns}
        return parts | {width: replace(part, dim=-1) for width, part in made.items()}

    def _of_shared_heads(self, group: Group, division: Division) -> Attributes:
        copies = max((number for part in division.parts.values() for number in part.copies), default=1)
        return shared_heads(self._block, self._layers, group, self._tp_size, copies) if copies > 1 else {}
