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
        heads: numbers of heads that there may be, the likeliest first.
        width: of what the rows read.
    """

    heads: tuple[int, ...]
    width: int


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
    heads = tuple(number for number in sizes.heads if number % tp_size == 0)
    by_head, by_channel = (_tables(block, reads, wanted, tp_size) for wanted in (heads, (*heads, sizes.width)))
    arguments = [*_arguments(call, heads), *_gates(call, reads, sizes.width)]
    seen = []
    for tables in (Division(), by_head, by_channel):
        for some in ({}, *arguments):
            division = tables | Division(arguments=some)
            if division not in seen and division != Division():
                seen.append(division)
                yield division


def _tables(block: nn.Module, reads: frozenset[str | int], sizes: tuple[int, ...], tp_size: int) -> Division:
    parts: dict[str, Part] = {}
    attributes: dict[tuple[str, str], int] = {}
    for name, parameter in block.named_parameters():
        owner = name.rpartition(".")[0]
        module = block.get_submodule(owner)
        dim = next((parameter.shape.index(size) for size in sizes if size in parameter.shape), None)
        if name not in reads or layer_of(module) is not None or dim is None:
            continue
        parts[name] = Part(dim, (parameter.shape[dim],))
        if isinstance(module, nn.Conv1d | nn.Conv2d) and module.groups == module.in_channels == module.out_channels:
            counts = ("groups", "in_channels", "out_channels")
            attributes |= {(owner, key): module.groups // tp_size for key in counts}
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
