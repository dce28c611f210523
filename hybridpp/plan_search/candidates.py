"""Candidates: sharding specs that are worth a trial for a group of layers, the likeliest first."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product

import torch
from torch import nn

from hybridpp.nn.linear import LinearShape
from hybridpp.plan_search.auxiliary_params import (
    GroupSizes,
    auxiliary_specs,
    fused_conv_channels,
    gathered_norms,
    row_heads,
    specs_with_fused_channels,
)
from hybridpp.plan_search.block_run import BlockCall, copy_block
from hybridpp.plan_search.dataflow import LayerDataflow
from hybridpp.plan_search.fused_layouts import fused_layouts
from hybridpp.plan_search.layer_groups import LayerGroup, common_module
from hybridpp.plan_search.narrowed_arguments import arguments_of_layers
from hybridpp.plan_search.size_attributes import (
    LIKELY,
    AttributeValues,
    attribute_choices,
    divisible_attributes,
    head_counts,
    shared_heads,
)
from hybridpp.sharding_plan.sharding_spec import DimShard, ShardingSpec

# Number of layouts tried with narrowed arguments: nearly all such modules have one of the first.
_NUM_LOCAL_WIDTH_LAYOUTS = 4


@dataclass(frozen=True)
class _LayerLayout:
    """One way to shard a group's layers.

    Attributes:
        spec: of the layers.
        shared: new values of attributes that count heads that several ranks share.
    """

    spec: ShardingSpec
    shared: AttributeValues

    def with_attributes(
        self, choices: Iterable[AttributeValues], more: ShardingSpec | None = None
    ) -> Iterator[ShardingSpec]:
        """One candidate for each choice of attributes, with ``more`` added."""
        for attributes in choices:
            spec = self.spec | ShardingSpec(attributes=attributes | self.shared)
            yield spec | more if more else spec


class CandidateGenerator:
    """Lists candidates for the groups of one block.

    Args:
        block: that holds the groups.
        call: arguments of the block.
        layers: the linear layers of the block, by name.
        flow: what the layers read.
        tp_size: number of ranks.
    """

    def __init__(
        self, block: nn.Module, call: BlockCall, layers: dict[str, LinearShape], flow: LayerDataflow, tp_size: int
    ):
        self._block, self._call, self._layers, self._flow, self._tp_size = block, call, layers, flow, tp_size

    def of(self, group: LayerGroup) -> Iterator[ShardingSpec]:
        """Each layout with the likely attributes, then with parameters around the group, then with other attributes."""
        layouts = self._layouts(group)
        found = divisible_attributes(self._block, self._layers, group, self._tp_size)
        widths, likely = self._widths(group), self._likely(group)
        for layout in layouts:
            yield from layout.with_attributes(likely)
        narrow = self._local_width_arguments(group)
        for layout in layouts[:_NUM_LOCAL_WIDTH_LAYOUTS] if narrow.local_width_args else ():
            yield from layout.with_attributes((*likely[:2], *likely[4:]), narrow)
        yield from self._around(group, layouts, found, widths)
        for layout in layouts:
            yield from replace(layout, shared={}).with_attributes(
                islice(attribute_choices(found, widths, self._tp_size), LIKELY, None)
            )

    def _around(
        self, group: LayerGroup, layouts: list[_LayerLayout], found: AttributeValues, widths: set[int]
    ) -> Iterator[ShardingSpec]:
        """With fused convolution channels, then with parameters and arguments by head and channel."""
        block, tp_size = self._block, self._tp_size
        likely = self._likely(group)
        reads = frozenset[str | int]().union(*(self._flow.reads[name] for name in group.rows))
        width = max(self._layers[name].num_inputs for name in group.rows)
        known_heads = tuple(sorted(head_counts(found)))
        sizes = GroupSizes(
            known_heads, tuple(dict.fromkeys((*known_heads, *sorted(row_heads(block, reads, width))))), width
        )
        for layout in layouts:
            fused = fused_conv_channels(block, reads, width, layout.spec)
            wider = (
                list(islice(attribute_choices(found, widths.union(*fused.values()), tp_size), LIKELY)) if fused else []
            )
            for table in specs_with_fused_channels(block, reads, fused, sizes, tp_size) if fused else ():
                yield from layout.with_attributes((*wider[:2], *wider[4:]), table)
        every = list(auxiliary_specs(block, self._call, reads, sizes, tp_size))
        for some in (layouts[:2], [layout for layout in layouts[2:] if layout.shared]):
            for table, layout in product(every, some):
                yield from layout.with_attributes((*likely[:2], *likely[4:]), table)

    def with_gathered_norms(self, group: LayerGroup) -> Iterator[ShardingSpec]:
        """Candidates in which the inputs of norms between a group's layers are gathered.

        To be tried when no group has another candidate: a gather costs communication, and the group may have taken
        layers from one that is sharded without a gather.
        """
        reads = frozenset[str | int]().union(*(self._flow.reads[name] for name in group.rows))
        likely = self._likely(group)
        for layout in self._layouts(group):
            gather_inputs = gathered_norms(self._block, reads, self._parts_by_width(group, layout.spec))
            if gather_inputs.gather_inputs:
                yield from layout.with_attributes(likely, gather_inputs)

    def _layouts(self, group: LayerGroup) -> list[_LayerLayout]:
        return [
            _LayerLayout(spec, self._of_shared_heads(group, spec))
            for spec in fused_layouts(self._block, self._layers, self._flow, group, self._tp_size)
        ]

    def _widths(self, group: LayerGroup) -> set[int]:
        widths = {self._layers[name].num_outputs for name in group.columns}
        return widths | {self._layers[name].num_inputs for name in group.rows}

    def _likely(self, group: LayerGroup) -> list[AttributeValues]:
        found = divisible_attributes(self._block, self._layers, group, self._tp_size)
        return list(islice(attribute_choices(found, self._widths(group), self._tp_size), LIKELY))

    def _local_width_arguments(self, group: LayerGroup) -> ShardingSpec:
        """For modules that read the width of heads from an argument's shape (BLIP): its local width."""
        name = common_module(group.columns)
        if not name:
            return ShardingSpec()
        block, call = copy_block(self._block), self._call
        with torch.no_grad():
            # Copies: a block may write to its arguments.
            tensors = [tensor.clone() for tensor in call.tensors]
            widths = arguments_of_layers(block, name, group.columns, lambda: call.run(block, tensors))
        return ShardingSpec(
            local_width_args={(name, index): width for index, width in widths.items() if width % self._tp_size == 0}
        )

    def _parts_by_width(self, group: LayerGroup, spec: ShardingSpec) -> dict[int, DimShard]:
        """How the last dimension of the outputs and inputs of a group's layers is divided, by its width."""
        parts = {self._layers[name].num_inputs: DimShard(-1, (self._layers[name].num_inputs,)) for name in group.rows}
        outputs = {self._layers[name].num_outputs: spec.params[f"{name}.weight"] for name in group.columns}
        return parts | {width: replace(part, dim=-1) for width, part in outputs.items()}

    def _of_shared_heads(self, group: LayerGroup, spec: ShardingSpec) -> AttributeValues:
        copies = max((number for part in spec.params.values() for number in part.copies), default=1)
        return shared_heads(self._block, self._layers, group, self._tp_size, copies) if copies > 1 else {}
