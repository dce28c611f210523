"""What else a block indexes by head: tables of biases, sinks, temperatures, masks that come as arguments."""

from collections.abc import Iterator

from torch import nn

from hybridpp.tensor_parallel.infer_division import Division
from hybridpp.tensor_parallel.infer_layers import Part, layer_of
from hybridpp.tensor_parallel.infer_run import Call


def tables_of(
    block: nn.Module, call: Call, reads: frozenset[str | int], heads: set[int], tp_size: int
) -> Iterator[Division]:
    """Divisions of the tables and arguments around a group of layers that have a dimension as long as there are heads.

    Args:
        block: whose layers the group is of.
        call: with the arguments.
        reads: the sources of what the group's rows read.
        heads: numbers of heads.
        tp_size: by how much they are divided.
    """
    heads = {number for number in heads if number % tp_size == 0}
    parameters: dict[str, Part] = {}
    for name, parameter in block.named_parameters():
        owner = block.get_submodule(name.rpartition(".")[0])
        dim = next((dim for dim, size in enumerate(parameter.shape) if size in heads), None)
        if name in reads and layer_of(owner) is None and dim is not None:
            parameters[name] = Part(dim, (parameter.shape[dim],))
    arguments = list(_arguments(call, heads))
    for chosen in ({}, parameters):
        for some in ({}, *arguments):
            if chosen or some:
                yield Division(parts=chosen, arguments=some)
        if not parameters:
            return


def _arguments(call: Call, heads: set[int]) -> Iterator[dict[tuple[str, int], Part]]:
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


def row_heads(block: nn.Module, reads: frozenset[str | int], width: int) -> set[int]:
    """Numbers of heads that tables may tell: sizes of their dimensions that divide what the rows read."""
    tables = [
        parameter
        for name, parameter in block.named_parameters()
        if name in reads and layer_of(block.get_submodule(name.rpartition(".")[0])) is None
    ]
    return {size for table in tables for size in table.shape if 1 < size < width and width % size == 0}
