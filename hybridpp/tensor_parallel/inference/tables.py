"""What else a block indexes by head: tables of biases, sinks, temperatures, masks that come as arguments."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from hybridpp.tensor_parallel.division import Division, Part
from hybridpp.tensor_parallel.inference.run import Call
from hybridpp.tensor_parallel.linear import layer_of


class Sizes(NamedTuple):
    """What dimensions are compared with.

    Attributes:
        told: numbers of heads that attributes tell.
        heads: these, and others that there may be.
        width: of what the rows read.
    """

    told: tuple[int, ...]
    heads: tuple[int, ...]
    width: int

    def by_head(self, tp_size: int) -> Iterator[tuple[int, ...]]:
        """Numbers of heads that can be divided: those that are told, then all."""
        for heads in (self.told, self.heads):
            yield tuple(number for number in heads if number % tp_size == 0)


def tables_of(
    block: nn.Module, call: Call, reads: frozenset[str | int], sizes: Sizes, tp_size: int
) -> Iterator[Division]:
    """Divisions of the tables and arguments around a group of layers that have a dimension as long as there are heads.

    Then of whatever has one as long as what the rows read: convolutions of each channel by itself, scales.

    Args:
        block: whose layers the group is of.
        call: with the arguments.
        reads: the sources of what the group's rows read.
        sizes: of the group.
        tp_size: by how much they are divided.
    """
    heads = list(sizes.by_head(tp_size))
    tables = [_tables(block, reads, {size: (size,) for size in some}, tp_size) for some in heads]
    tables += [_tables(block, reads, {size: (size,) for size in (*some, sizes.width)}, tp_size) for some in heads]
    arguments = [*_arguments(call, heads[-1]), *_gates(call, reads, sizes.width)]
    seen = [Division()]
    for table in (Division(), *tables):
        for some in ({}, *arguments):
            division = table | Division(arguments=some)
            if division not in seen:
                seen.append(division)
                yield division


def tables_with(
    block: nn.Module, reads: frozenset[str | int], fused: Mapping[int, tuple[int, ...]], sizes: Sizes, tp_size: int
) -> Iterator[Division]:
    """The tables around a group of layers by head and by channel, with some that are fused (:func:`fused_channels`)."""
    for heads in dict.fromkeys(sizes.by_head(tp_size)):
        yield _tables(block, reads, {**fused, **{size: (size,) for size in (*heads, sizes.width)}}, tp_size)


def fused_channels(
    block: nn.Module, reads: frozenset[str | int], width: int, division: Division
) -> dict[int, tuple[int, ...]]:
    """Of convolutions of each channel by itself, on more than what the rows read: widths of what is fused there.

    That is what is fused in a layer of as many outputs, or else queries, keys and values, of which only the latter are
    as wide as what the rows read.
    """
    known = {sum(part.widths): part.widths for part in division.parts.values()}
    fused = {}
    for name, module in block.named_modules():
        channels = _single_channels(module)
        if channels > width and f"{name}.weight" in reads:
            rest = (channels - width) // 2
            fused[channels] = known.get(channels, (rest, rest, width) if 2 * rest == channels - width else (channels,))
    return fused


def _single_channels(module: nn.Module) -> int:
    """How many channels a convolution treats each by itself; 0 of any other module."""
    if isinstance(module, nn.Conv1d | nn.Conv2d) and module.groups == module.in_channels == module.out_channels:
        return module.groups
    return 0


def _tables(
    block: nn.Module, reads: frozenset[str | int], wanted: Mapping[int, tuple[int, ...]], tp_size: int
) -> Division:
    """Everything with a dimension of a wanted size; of what is fused along it, the widths are wanted's."""
    parts: dict[str, Part] = {}
    attributes: dict[tuple[str, str], int] = {}
    for name, parameter in block.named_parameters():
        owner = name.rpartition(".")[0]
        module = block.get_submodule(owner)
        channels = _single_channels(module)
        dims = parameter.shape[:1] if channels else parameter.shape
        dim = next((dims.index(size) for size in wanted if size in dims), None)
        if name not in reads or layer_of(module) is not None or dim is None:
            continue
        parts[name] = Part(dim, wanted[parameter.shape[dim]])
        if channels:
            counts = ("groups", "in_channels", "out_channels")
            attributes |= {(owner, key): channels // tp_size for key in counts}
    if not all(part.divides(tp_size) for part in parts.values()):
        return Division()
    return Division(parts=parts, attributes=attributes)


def _arguments(call: Call, heads: tuple[int, ...]) -> Iterator[dict[tuple[str, int], Part]]:
    """Arguments that may be divided, dimension by dimension: all with that dimension, then one alone."""
    found: dict[int, dict[tuple[str, int], Part]] = {}
    samples = call.tensors[0].shape[0] if call.tensors and call.tensors[0].dim() else 1
    for number, tensor in zip(call.numbers, call.tensors, strict=True):
        if tensor.dim() < 3 or tensor is call.tensors[0]:
            continue
        for dim, size in enumerate(tensor.shape[:-1]):
            if size in heads:
                found.setdefault(dim, {})["", number] = Part(dim, (size,))
        for count in heads:
            if tensor.shape[0] == samples * count:
                found.setdefault(-1, {})["", number] = Part(0, (count,), repeated=True)
    for dim in (1, -1, *sorted(found.keys() - {1, -1})):
        if dim in found:
            yield found[dim]
            if len(found[dim]) > 1:
                for place, part in found[dim].items():
                    yield {place: part}


def _gates(call: Call, reads: frozenset[str | int], width: int) -> Iterator[dict[tuple[str, int], Part]]:
    """Arguments that what the rows read is made of, channel by channel (an embedding of each layer's own)."""
    gates = {
        ("", number): Part(tensor.dim() - 1, (width,))
        for number, tensor in zip(call.numbers[1:], call.tensors[1:], strict=True)
        if number in reads and tensor.dim() > 1 and tensor.shape[-1] == width
    }
    if gates:
        yield gates


def row_heads(block: nn.Module, reads: frozenset[str | int], width: int) -> set[int]:
    """Numbers of heads that tables may tell: sizes of their dimensions that divide what the rows read."""
    tables = [
        parameter
        for name, parameter in block.named_parameters()
        if name in reads and layer_of(block.get_submodule(name.rpartition(".")[0])) is None
    ]
    return {size for table in tables for size in table.shape if 1 < size < width and width % size == 0}


def joins_of(block: nn.Module, reads: frozenset[str | int], parts: Mapping[int, Part]) -> Division:
    """The modules around a group of layers that hold a number per channel, as those that need all channels (norms).

    Args:
        block: whose layers the group is of.
        reads: the sources of what the group's rows read.
        parts: of the last dimension, by its width.
    """
    joins: dict[str, Part] = {}
    for name, module in block.named_modules():
        held = {f"{name}.{key}" if name else key: p for key, p in module._parameters.items() if p is not None}
        widths = {
            parameter.numel() if parameter.shape[-1:] == (parameter.numel(),) else 0 for parameter in held.values()
        }
        width = widths.pop() if len(widths) == 1 else 0
        if width in parts and reads.issuperset(held) and not any(module.children()):
            joins[name] = parts[width]
    return Division(joins=joins)
