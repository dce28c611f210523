"""Parameters and arguments beside linear layers that are indexed by head or channel: biases, sinks, masks, scales."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from hybridpp.nn import walk
from hybridpp.nn.linear import linear_shape
from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import parameters_of
from hybridpp.plan_search.block_run import BlockCall
from hybridpp.sharding_plan.sharding_spec import DimShard, ShardingSpec


class GroupSizes(NamedTuple):
    """Sizes that dimensions of parameters and arguments are compared with.

    Attributes:
        known_heads: numbers of heads in attributes.
        heads: these, and other possible numbers of heads.
        width: number of inputs of the group's row layers.
    """

    known_heads: tuple[int, ...]
    heads: tuple[int, ...]
    width: int

    def by_head(self, tp_size: int) -> Iterator[tuple[int, ...]]:
        """Numbers of heads that ``tp_size`` divides: those in attributes, then all."""
        for heads in (self.known_heads, self.heads):
            yield tuple(number for number in heads if number % tp_size == 0)


def auxiliary_specs(
    block: nn.Module, call: BlockCall, reads: frozenset[str | int], sizes: GroupSizes, tp_size: int
) -> Iterator[ShardingSpec]:
    """Specs for parameters and arguments around a group that have a dimension of the size of a number of heads.

    Then specs for those with a dimension of the width of the row layers' inputs: depthwise convolutions, scales.

    Args:
        block: that holds the group.
        call: arguments of the block.
        reads: the sources of the row layers' inputs.
        sizes: of the group.
        tp_size: number of ranks.
    """
    heads = list(sizes.by_head(tp_size))
    tables = [_tables(block, reads, {size: (size,) for size in some}, tp_size) for some in heads]
    tables += [_tables(block, reads, {size: (size,) for size in (*some, sizes.width)}, tp_size) for some in heads]
    arguments = [*_per_head_arguments(call, heads[-1]), *_per_channel_gates(call, reads, sizes.width)]
    seen = [ShardingSpec()]
    for table in (ShardingSpec(), *tables):
        for some in ({}, *arguments):
            spec = table | ShardingSpec(arguments=some)
            if spec not in seen:
                seen.append(spec)
                yield spec


def specs_with_fused_channels(
    block: nn.Module, reads: frozenset[str | int], fused: Mapping[int, tuple[int, ...]], sizes: GroupSizes, tp_size: int
) -> Iterator[ShardingSpec]:
    """Specs for the parameters around a group, by head and by channel, with :func:`fused_conv_channels`."""
    for heads in dict.fromkeys(sizes.by_head(tp_size)):
        yield _tables(block, reads, {**fused, **{size: (size,) for size in (*heads, sizes.width)}}, tp_size)


def fused_conv_channels(
    block: nn.Module, reads: frozenset[str | int], width: int, spec: ShardingSpec
) -> dict[int, tuple[int, ...]]:
    """Widths of the pieces fused in depthwise convolutions wider than the row layers' inputs, by channels.

    Exists for linear attention (Qwen3.5, Kimi Linear): queries, keys and values pass one convolution. The pieces are
    those of a layer with as many outputs, or else queries, keys and values, of which only the values have the row
    layers' width.
    """
    known = {sum(part.widths): part.widths for part in spec.params.values()}
    fused = {}
    for name, module in walk.named_modules(block):
        channels = _single_channels(module)
        if channels > width and f"{name}.weight" in reads:
            rest = (channels - width) // 2
            fused[channels] = known.get(channels, (rest, rest, width) if 2 * rest == channels - width else (channels,))
    return fused


def _single_channels(module: nn.Module) -> int:
    """Number of channels of a depthwise convolution; 0 for other modules."""
    if isinstance(module, nn.Conv1d | nn.Conv2d) and module.groups == module.in_channels == module.out_channels:
        return module.groups
    return 0


def _tables(
    block: nn.Module, reads: frozenset[str | int], wanted: Mapping[int, tuple[int, ...]], tp_size: int
) -> ShardingSpec:
    """Shards of everything with a dimension of a wanted size, in pieces of the wanted widths."""
    parts: dict[str, DimShard] = {}
    attributes: dict[tuple[str, str], int] = {}
    for name, parameter in walk.named_parameters(block):
        owner = name.rpartition(".")[0]
        module = block.get_submodule(owner)
        channels = _single_channels(module)
        dims = parameter.shape[:1] if channels else parameter.shape
        dim = next((dims.index(size) for size in wanted if size in dims), None)
        if name not in reads or linear_shape(module) is not None or dim is None:
            continue
        parts[name] = DimShard(dim, wanted[parameter.shape[dim]])
        if channels:
            counts = ("groups", "in_channels", "out_channels")
            attributes |= {(owner, key): channels // tp_size for key in counts}
    if not all(part.divides(tp_size) for part in parts.values()):
        return ShardingSpec()
    return ShardingSpec(params=parts, attributes=attributes)


def _per_head_arguments(call: BlockCall, heads: tuple[int, ...]) -> Iterator[dict[tuple[str, int], DimShard]]:
    """Arguments that may be sharded, by dimension: all with that dimension, then each alone.

    Biases of attention may have the heads in a dimension of their own, or flattened with the batch (ALiBi in Bloom).
    """
    found: dict[int, dict[tuple[str, int], DimShard]] = {}
    samples = call.tensors[0].shape[0] if call.tensors and call.tensors[0].dim() else 1
    for number, tensor in zip(call.numbers, call.tensors, strict=True):
        if tensor.dim() < 3 or tensor is call.tensors[0]:
            continue
        for dim, size in enumerate(tensor.shape[:-1]):
            if size in heads:
                found.setdefault(dim, {})["", number] = DimShard(dim, (size,))
        for count in heads:
            if tensor.shape[0] == samples * count:
                found.setdefault(-1, {})["", number] = DimShard(0, (count,), repeated=True)
    for dim in (1, -1, *sorted(found.keys() - {1, -1})):
        if dim in found:
            yield found[dim]
            if len(found[dim]) > 1:
                for key, part in found[dim].items():
                    yield {key: part}


def _per_channel_gates(
    call: BlockCall, reads: frozenset[str | int], width: int
) -> Iterator[dict[tuple[str, int], DimShard]]:
    """Arguments that gate the row layers' inputs channel by channel (Gemma 4's per-layer embeddings)."""
    gates = {
        ("", number): DimShard(tensor.dim() - 1, (width,))
        for number, tensor in zip(call.numbers[1:], call.tensors[1:], strict=True)
        if number in reads and tensor.dim() > 1 and tensor.shape[-1] == width
    }
    if gates:
        yield gates


def row_heads(block: nn.Module, reads: frozenset[str | int], width: int) -> set[int]:
    """Possible numbers of heads: sizes of parameters' dimensions that divide the width of the row layers' inputs."""
    tables = [
        parameter
        for name, parameter in walk.named_parameters(block)
        if name in reads and linear_shape(block.get_submodule(name.rpartition(".")[0])) is None
    ]
    return {size for table in tables for size in table.shape if 1 < size < width and width % size == 0}


def gathered_norms(block: nn.Module, reads: frozenset[str | int], parts: Mapping[int, DimShard]) -> ShardingSpec:
    """Replicated modules with one number per channel, whose inputs are gathered: norms over the width of all heads.

    Exists for OLMo 2, MiniMax M2 and BitNet (norms over all heads or wide layers) and ConvNeXt V2.

    Args:
        block: that holds the group.
        reads: the sources of the row layers' inputs.
        parts: how the last dimension of activations is divided, by its width.
    """
    gather_inputs: dict[str, DimShard] = {}
    for name, module in walk.named_modules(block):
        held = {qualified(name, key): p for key, p in parameters_of(module).items() if p is not None}
        widths = {
            parameter.numel() if parameter.shape[-1:] == (parameter.numel(),) else 0 for parameter in held.values()
        }
        width = widths.pop() if len(widths) == 1 else 0
        if width in parts and reads.issuperset(held) and not any(module.children()):
            gather_inputs[name] = parts[width]
    return ShardingSpec(gather_inputs=gather_inputs)
