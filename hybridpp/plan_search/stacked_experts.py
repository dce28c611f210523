"""Modules that hold the weights of all experts in three-dimensional tensors."""

from collections.abc import Iterator
from itertools import product

from torch import nn

from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import parameters_of
from hybridpp.sharding_plan.sharding_spec import DimShard, ShardingSpec


def expert_modules(block: nn.Module) -> list[str]:
    """The modules that hold at least two such tensors with equal numbers of experts."""
    found = []
    for name, module in block.named_modules():
        tensors = [p for p in parameters_of(module).values() if p is not None and p.dim() == 3]
        if len(tensors) > 1 and len({tensor.shape[0] for tensor in tensors}) == 1:
            found.append(name)
    return found


def expert_specs(block: nn.Module, name: str, tp_size: int) -> Iterator[ShardingSpec]:
    """Specs that divide the experts' inner width: one tensor sums over it, the others compute it.

    A tensor that computes it may hold two layers, concatenated or with alternating columns (gpt-oss).
    """
    module = block.get_submodule(name)
    weights = {key: p for key, p in parameters_of(module).items() if p is not None and p.dim() == 3}
    biases = {key: p for key, p in parameters_of(module).items() if p is not None and p.dim() == 2}
    for last, dim in product(reversed(weights), (2, 1)):
        width = weights[last].shape[dim]
        layouts = [list(_expert_input_layouts(weights[key].shape, width)) for key in weights if key != last]
        for chosen in product(*layouts):
            parts = dict(zip((key for key in weights if key != last), chosen, strict=True))
            pieces = {sum(part.widths): part.widths for part in parts.values()}
            parts[last] = DimShard(dim, (width,))
            parts |= {key: DimShard(1, pieces[b.shape[1]]) for key, b in biases.items() if b.shape[1] in pieces}
            only = {key for key, bias in biases.items() if bias.shape[1] not in pieces}
            if not all(part.divides(tp_size) for part in parts.values()):
                continue
            sizes = {
                (name, key): value // tp_size
                for key, value in vars(module).items()
                if type(value) is int and value in {width, *pieces}
            }
            for attributes in (sizes, {}) if sizes else ({},):
                yield ShardingSpec(
                    params={qualified(name, key): part for key, part in parts.items()},
                    copy_inputs=frozenset({name}),
                    reduce_outputs=frozenset({name}),
                    rank0_only=frozenset(qualified(name, key) for key in only),
                    attributes=attributes,
                )


def _expert_input_layouts(shape: tuple[int, ...], width: int) -> Iterator[DimShard]:
    for dim in (1, 2):
        if shape[dim] == width:
            yield DimShard(dim, (width,))
        elif shape[dim] == 2 * width:
            yield DimShard(dim, (width, width))
            yield DimShard(dim, (2 * width,))
