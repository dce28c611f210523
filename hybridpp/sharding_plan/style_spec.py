"""Styles of layers, as users write them, to a sharding spec; and back, for messages."""

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

from torch import nn

from hybridpp.errors import ConfigError
from hybridpp.nn import walk
from hybridpp.nn.embedding import is_lookup
from hybridpp.nn.linear import is_linear, output_dim
from hybridpp.nn.names import qualified
from hybridpp.nn.torch_private import parameters_of
from hybridpp.sharding_plan.plan import FusedLayout, LayerStyle, ShardKind, parse_style
from hybridpp.sharding_plan.sharding_spec import DimShard, ShardingSpec

_COLUMNS = (ShardKind.COLUMN, ShardKind.FUSED_COLUMN)


def spec_of_styles(model: nn.Module, styles: Mapping[str, str], size: int) -> ShardingSpec:
    """The spec that styles of modules stand for.

    Args:
        model: with full parameters.
        styles: see :func:`parse_style`, by the module's name.
        size: number of ranks.

    Raises:
        ConfigError: a style does not fit its module or the number of ranks, or a shared parameter has two styles.
    """
    spec = ShardingSpec()
    shards: dict[int, DimShard] = {}
    names = {id(parameter): name for name, parameter in walk.named_parameters(model)}
    parsed = {name: parse_style(text) for name, text in styles.items()}
    for name, style in parsed.items():
        _check_module(name, style, model.get_submodule(name))
    for name, style in parsed.items():
        module = model.get_submodule(name)
        of_layer = _spec_of_layer(name, style, module, size)
        for key, shard in of_layer.params.items():
            parameter: Any = model.get_parameter(key)
            if shards.setdefault(id(parameter), shard) != shard:
                raise ConfigError(
                    f"{names[id(parameter)]!r} is shared by several modules, and tensor_parallel_plan divides it in "
                    f"two ways: {name!r} as {style.kind}. Divide it in one way: an embedding's vocab fits a head's "
                    "gathered_column."
                )
        spec |= of_layer
    return spec


def _check_module(name: str, style: LayerStyle, module: nn.Module) -> None:
    if style.kind in (ShardKind.PARTIAL_GRAD, ShardKind.REPLICATED):
        return
    if style.kind is ShardKind.VOCAB:
        fits = is_lookup(module)
        wanted = "an nn.Embedding without max_norm, sparse, scale_grad_by_freq and parameters beside its weight"
    else:
        fits, wanted = is_linear(module), "an nn.Linear or transformers' Conv1D"
    if not fits:
        raise ConfigError(
            f"tensor-parallel style {style.kind} needs {wanted}: {name!r} is {type(module).__name__}. "
            "Leave it out of tensor_parallel_plan, or name the layers in it."
        )


def _spec_of_layer(name: str, style: LayerStyle, module: nn.Module, size: int) -> ShardingSpec:
    itself = frozenset({name})
    if style.kind is ShardKind.REPLICATED:
        return ShardingSpec()
    if style.kind is ShardKind.PARTIAL_GRAD:
        return ShardingSpec(partial_grad=frozenset(qualified(name, key) for key, _ in walk.named_parameters(module)))
    params = {qualified(name, key): shard for key, shard in _shards(name, style, module, size)}
    return ShardingSpec(
        params=params,
        copy_inputs=itself if style.kind in _COLUMNS else frozenset(),
        reduce_outputs=itself if style.kind in (ShardKind.ROW, ShardKind.VOCAB) else frozenset(),
        gather_outputs=itself if style.kind is ShardKind.GATHERED_COLUMN else frozenset(),
    )


def _shards(name: str, style: LayerStyle, module: nn.Module, size: int) -> Iterator[tuple[str, DimShard]]:
    """How the parameters of a module are divided, by their names in it."""
    weight: Any = parameters_of(module)["weight"]
    dim = 0 if style.kind is ShardKind.VOCAB else output_dim(module)
    dim = 1 - dim if style.kind is ShardKind.ROW else dim
    widths, copies = _widths(name, style, weight.shape[dim], size)
    copied = (copies,) * len(widths) if copies > 1 else ()
    yield "weight", DimShard(dim, widths, copied)
    if parameters_of(module).get("bias") is not None and style.kind in _COLUMNS:
        yield "bias", DimShard(0, widths, copied)


def _widths(name: str, style: LayerStyle, width: int, size: int) -> tuple[tuple[int, ...], int]:
    """Widths of the pieces that are divided one by one, and how many ranks hold the same shard."""
    widths: tuple[int, ...] = (width,)
    if style.kind in (ShardKind.VOCAB, ShardKind.GATHERED_COLUMN):
        return widths, 1  # padded
    if style.layout is FusedLayout.CONCATENATED:
        widths = style.parts if len(style.parts) > 1 else (width // style.parts[0],) * style.parts[0]
        if sum(widths) != width:
            raise ConfigError(
                f"a fused layer's parts make up its outputs: {name!r} has {width}, and tensor_parallel_plan says "
                f"{','.join(map(str, style.parts))}. Give one number of equal parts, or widths with that sum."
            )
    if style.copies > 1 and size % style.copies == 0 and width % (size // style.copies) == 0:
        return widths, style.copies
    units = style.parts[0] if style.parts and style.layout is not FusedLayout.CONCATENATED else gcd(*widths)
    if style.kind is ShardKind.COLUMN and units < size and size % units == 0 and style.parts:
        return widths, size // units
    if units % size or width % units:
        raise ConfigError(
            f"tensor parallelism divides {name!r} into equal shares: it has {units} "
            f"{'heads or groups' if style.parts and len(widths) == 1 else 'columns or rows'}, tp_size={size}. "
            f"Use tp_size={fitting_sizes(units)}, or leave it out of tensor_parallel_plan."
        )
    return widths, 1


def fitting_sizes(count: int) -> str:
    """The numbers of ranks that ``count`` can be divided over, for a message.

    Example:
        >>> fitting_sizes(12)
        '1, 2, 3, 4, 6 or 12'
    """
    sizes = [str(size) for size in range(1, min(count, 64) + 1) if count % size == 0]
    return " or ".join([", ".join(sizes[:-1]), sizes[-1]]) if len(sizes) > 1 else sizes[0]


def styles_of_spec(model: nn.Module, spec: ShardingSpec, size: int) -> dict[str, str]:
    """What a spec does to each module, by name: a style, or "experts", for which there is no style.

    Args:
        model: with full parameters.
        spec: how it is sharded.
        size: number of ranks.
    """
    styles: dict[str, str] = {}
    for name in spec.holders():
        module = model.get_submodule(name)
        if is_linear(module):
            styles[name] = _style_of_linear(name, spec, size)
        elif name in spec.reduce_outputs:
            styles[name] = ShardKind.VOCAB.value if isinstance(module, nn.Embedding) else "experts"
    for name, module in walk.named_modules(model):
        held = [qualified(name, key) for key, parameter in parameters_of(module).items() if parameter is not None]
        if held and spec.partial_grad.issuperset(held) and not any(module.children()):
            styles[name] = ShardKind.PARTIAL_GRAD.value
    return styles


def _style_of_linear(name: str, spec: ShardingSpec, size: int) -> str:
    if name in spec.reduce_outputs:
        return ShardKind.ROW.value
    if name in spec.gather_outputs:
        return ShardKind.GATHERED_COLUMN.value
    _, widths, copies, _ = vars(spec.params[qualified(name, "weight")]).values()
    if len(widths) == 1:
        return f"column:{size // copies[0]}" if copies else "column"
    if copies:
        # As in "64x2": a piece of width 64 that 2 ranks share.
        pieces = zip(widths, copies, strict=True)
        shared = (f"{width}x{number}" if number > 1 else f"{width}" for width, number in pieces)
        return f"fused_column:concatenated:{','.join(shared)}"
    equal = len(set(widths)) == 1
    return f"fused_column:concatenated:{len(widths) if equal else ','.join(map(str, widths))}"
