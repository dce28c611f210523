"""Modules that hold the weights of several layers for all experts at once, in tensors of three dimensions."""

from collections.abc import Iterator
from itertools import product

from torch import nn

from hybridpp.tensor_parallel.division import Division, Part


def expert_modules(block: nn.Module) -> list[str]:
    """Names of the modules that hold at least two such tensors, of as many experts each."""
    found = []
    for name, module in block.named_modules():
        tensors = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
        if len(tensors) > 1 and len({tensor.shape[0] for tensor in tensors}) == 1:
            found.append(name)
    return found


def divisions_of(block: nn.Module, name: str, tp_size: int) -> Iterator[Division]:
    """Divisions of the experts' inner width: one tensor sums over it, the others make it.

    A tensor that makes it may hold two layers, one behind the other or column by column in turn.
    """
    module = block.get_submodule(name)
    weights = {key: p for key, p in module._parameters.items() if p is not None and p.dim() == 3}
    biases = {key: p for key, p in module._parameters.items() if p is not None and p.dim() == 2}
    for last, dim in product(reversed(weights), (2, 1)):
        width = weights[last].shape[dim]
        ways = [list(_ways(weights[key].shape, width)) for key in weights if key != last]
        for chosen in product(*ways):
            parts = dict(zip((key for key in weights if key != last), chosen, strict=True))
            pieces = {sum(part.widths): part.widths for part in parts.values()}
            parts[last] = Part(dim, (width,))
            parts |= {key: Part(1, pieces[b.shape[1]]) for key, b in biases.items() if b.shape[1] in pieces}
            only = {key for key, bias in biases.items() if bias.shape[1] not in pieces}
            if not all(part.divides(tp_size) for part in parts.values()):
                continue
            sizes = {
                (name, key): value // tp_size
                for key, value in vars(module).items()
                if isinstance(value, int) and not isinstance(value, bool) and value in {width, *pieces}
            }
            for attributes in (sizes, {}) if sizes else ({},):
                yield Division(
                    parts={f"{name}.{key}" if name else key: part for key, part in parts.items()},
                    enters=frozenset({name}),
                    sums=frozenset({name}),
                    first_only=frozenset(f"{name}.{key}" if name else key for key in only),
                    attributes=attributes,
                )


def _ways(shape: tuple[int, ...], width: int) -> Iterator[Part]:
    for dim in (1, 2):
        if shape[dim] == width:
            yield Part(dim, (width,))
        elif shape[dim] == 2 * width:
            yield Part(dim, (width, width))
            yield Part(dim, (2 * width,))
