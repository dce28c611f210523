"""Apply a plan to a model: divide its parameters and set the forwards of the layers that hold them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from math import gcd
from typing import Any, NamedTuple

from torch import nn

from hybridpp.cluster import Group
from hybridpp.errors import ConfigError
from hybridpp.tensor_parallel.crossings import Crossings
from hybridpp.tensor_parallel.layers import (
    ColumnParallel,
    GatheredColumnParallel,
    RowParallel,
    ShardedLayer,
    VocabParallel,
)
from hybridpp.tensor_parallel.placement import Placement, divide, placement_of
from hybridpp.tensor_parallel.plan import Kind, Layout, Plan, Style, parse_style
from hybridpp.tensor_parallel.regions import added_once, apply_rest, holders, place_parts


class Sharding(NamedTuple):
    """A model that was divided.

    Attributes:
        crossings: what its layers share.
        layers: its divided layers, by module.
        summed: names of parameters that every rank has whole and uses on its part: their gradients are to be summed.
    """

    crossings: Crossings
    layers: Mapping[nn.Module, ShardedLayer]
    summed: frozenset[str]


def shard(model: nn.Module, plan: Plan, group: Group) -> Sharding:
    """Let this rank hold its part of what ``plan`` divides; parameters stay the same objects.

    Nothing is communicated: every rank of ``group`` must call it with the same model and plan.

    Raises:
        ConfigError: the plan does not fit the model.
    """
    styles = {name: parse_style(text) for name, text in plan.styles.items()}
    styles = {name: style for name, style in styles.items() if style.kind is not Kind.WHOLE}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, style in styles.items():
        _check_module(name, style, model.get_submodule(name))
    placements = place_parts(model, plan.rest.parts, names, group.size, _placements(model, styles, names, group.size))
    styles |= _tied(model, {*styles, *holders(plan.rest)}, placements)
    for name, values in plan.attributes.items():
        for attribute, value in values.items():
            _set(model.get_submodule(name), attribute, value)
    for parameter in list(model.parameters()):
        if id(parameter) in placements:
            divide(parameter, placements[id(parameter)], group.rank)
    crossings = Crossings(group)
    summed = frozenset(
        names[id(parameter)]
        for name, style in styles.items()
        if style.kind is Kind.SUMMED
        for parameter in model.get_submodule(name).parameters()
    )
    layers: dict[nn.Module, ShardedLayer] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style.kind is not Kind.SUMMED and module not in layers:
            _set_sizes(module)
            layers[module] = _layer(module, style, crossings)
    for module, layer in apply_rest(model, plan.rest, crossings).items():
        _set_sizes(module)
        layers[module] = layer
    aliases = dict(model.named_parameters(remove_duplicate=False))
    sums = plan.summed | added_once(model, plan.rest)
    return Sharding(crossings, layers, summed | {names[id(aliases[name])] for name in sums})


def _set(module: Any, attribute: str, value: int) -> None:
    if "." in attribute:  # a configuration is everyone's: this module gets its own
        holder, _, attribute = attribute.partition(".")
        setattr(module, holder, copy.copy(getattr(module, holder)))
        module = getattr(module, holder)
    setattr(module, attribute, value)


def outputs_dim(module: nn.Module) -> int:
    """Along which dimension of its weight a linear layer's outputs lie."""
    return 0 if isinstance(module, nn.Linear) else 1


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that can be divided: torch's, or transformers' ``Conv1D``."""
    # transformers' own; known by name, so that it need not be there.
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
    return isinstance(module, nn.Linear) or "transformers.pytorch_utils.Conv1D" in names


def is_lookup(module: nn.Module) -> bool:
    """Whether a module is an embedding whose rows do not depend on each other, and that holds nothing else."""
    # A further parameter (T5Gemma2 puts one in the place of a row) would be masked and summed like the rows.
    if not isinstance(module, nn.Embedding) or [name for name, _ in module.named_parameters()] != ["weight"]:
        return False
    return not (module.max_norm or module.sparse or module.scale_grad_by_freq)


def _check_module(name: str, style: Style, module: nn.Module) -> None:
    if style.kind is Kind.SUMMED:
        return
    if style.kind is Kind.VOCAB:
        plain = is_lookup(module)
        wanted = "an nn.Embedding without max_norm, sparse, scale_grad_by_freq and parameters beside its weight"
    else:
        plain, wanted = is_linear(module), "an nn.Linear or transformers' Conv1D"
    if not plain:
        raise ConfigError(
            f"tensor-parallel style {style.kind} needs {wanted}: {name!r} is {type(module).__name__}. "
            "Leave it out of tensor_parallel_plan, or name the layers in it."
        )


def _placements(
    model: nn.Module, styles: Mapping[str, Style], names: Mapping[int, str], size: int
) -> dict[int, Placement]:
    """By the parameter's ``id``."""
    placements: dict[int, Placement] = {}
    for name, style in styles.items():
        for parameter, dim in _divided(model.get_submodule(name), style):
            width = parameter.shape[dim]
            parts, copies = _parts(name, style, width, size)
            placement = Placement(
                name=names[id(parameter)],
                full_shape=tuple(parameter.shape),
                dim=dim,
                size=size,
                parts=parts,
                copies=(copies,) if copies > 1 else (),
            )
            if placements.setdefault(id(parameter), placement) != placement:
                raise ConfigError(
                    f"{names[id(parameter)]!r} is shared by several modules, and tensor_parallel_plan divides it in "
                    f"two ways: {name!r} as {style.kind}. Divide it in one way: an embedding's vocab fits a head's "
                    "gathered_column."
                )
    return placements


def _divided(module: nn.Module, style: Style) -> Iterator[tuple[nn.Parameter, int]]:
    """The parameters that a style divides, each with the dimension."""
    if style.kind is Kind.SUMMED:
        return
    weight: Any = module._parameters["weight"]
    bias = module._parameters.get("bias")
    if style.kind is Kind.VOCAB:
        yield weight, 0
        return
    dim = outputs_dim(module)
    yield weight, 1 - dim if style.kind is Kind.ROW else dim
    if bias is not None and style.kind in (Kind.COLUMN, Kind.FUSED_COLUMN):
        yield bias, 0


def _parts(name: str, style: Style, width: int, size: int) -> tuple[tuple[int, ...], int]:
    """Widths of what is divided one by one, and how often each share is there."""
    parts: tuple[int, ...] = (width,)
    if style.kind in (Kind.VOCAB, Kind.GATHERED_COLUMN):
        return parts, 1  # filled up
    if style.layout is Layout.CONCATENATED:
        parts = style.parts if len(style.parts) > 1 else (width // style.parts[0],) * style.parts[0]
        if sum(parts) != width:
            raise ConfigError(
                f"a fused layer's parts make up its outputs: {name!r} has {width}, and tensor_parallel_plan says "
                f"{','.join(map(str, style.parts))}. Give one number of equal parts, or widths with that sum."
            )
    if style.copies > 1 and size % style.copies == 0 and width % (size // style.copies) == 0:
        return parts, style.copies
    units = style.parts[0] if style.parts and style.layout is not Layout.CONCATENATED else gcd(*parts)
    if style.kind is Kind.COLUMN and units < size and size % units == 0 and style.parts:
        return parts, size // units
    if units % size or width % units:
        raise ConfigError(
            f"tensor parallelism divides {name!r} into equal shares: it has {units} "
            f"{'heads or groups' if style.parts and len(parts) == 1 else 'columns or rows'}, tp_size={size}. "
            f"Use tp_size={fitting_sizes(units)}, or leave it out of tensor_parallel_plan."
        )
    return parts, 1


def fitting_sizes(count: int) -> str:
    """The numbers of ranks that ``count`` can be divided over, for a message.

    Example:
        >>> fitting_sizes(12)
        '1, 2, 3, 4, 6 or 12'
    """
    sizes = [str(size) for size in range(1, min(count, 64) + 1) if count % size == 0]
    return " or ".join([", ".join(sizes[:-1]), sizes[-1]]) if len(sizes) > 1 else sizes[0]


def _tied(model: nn.Module, planned: set[str], placements: Mapping[int, Placement]) -> dict[str, Style]:
    """Styles of modules outside of the plan that hold divided parameters of others: heads tied to an embedding.

    And embeddings: an encoder's and a decoder's may be two modules of one weight.
    """
    found: dict[str, Style] = {}
    named = {id(model.get_submodule(name)) for name in planned}
    for name, module in model.named_modules():
        held = [key for key, parameter in module._parameters.items() if id(parameter) in placements]
        if not held or id(module) in named:
            continue
        weight = module._parameters.get("weight")
        if held == ["weight"] and isinstance(module, nn.Embedding) and placements[id(weight)].dim == 0:
            found[name] = Style(Kind.VOCAB)
            _check_module(name, found[name], module)
            continue
        by_rows = held == ["weight"] and is_linear(module) and placements[id(weight)].dim == outputs_dim(module)
        if not by_rows:
            raise ConfigError(
                f"{name!r} ({type(module).__name__}) holds {held[0]!r}, which tensor_parallel_plan divides for another "
                "module, and cannot use a part of it. Leave that out of the plan."
            )
        found[name] = Style(Kind.GATHERED_COLUMN)
    return found


def _set_sizes(module: nn.Module) -> None:
    """Let a layer's own record of its sizes, which its forward may read, be that of its part."""
    weight: Any = module._parameters["weight"]
    sizes = (
        [("num_embeddings",)] if isinstance(module, nn.Embedding) else [("out_features", "nf"), ("in_features", "nx")]
    )
    first = 0 if isinstance(module, nn.Embedding) else outputs_dim(module)
    for names, dim in zip(sizes, (first, 1 - first), strict=False):
        for name in names:
            if name in vars(module):
                setattr(module, name, weight.shape[dim])


def _layer(module: nn.Module, style: Style, crossings: Crossings) -> ShardedLayer:
    weight: Any = module._parameters["weight"]
    placement = placement_of(weight)
    assert placement is not None, "it was divided"
    if style.kind is Kind.VOCAB:
        return VocabParallel(module, crossings, placement.local_shape[0])
    if style.kind is Kind.GATHERED_COLUMN:
        return GatheredColumnParallel(module, crossings, placement.full_shape[placement.dim])
    kinds: dict[Kind, Callable[[nn.Module, Crossings], ShardedLayer]] = {
        Kind.COLUMN: ColumnParallel,
        Kind.FUSED_COLUMN: ColumnParallel,
        Kind.ROW: RowParallel,
    }
    return kinds[style.kind](module, crossings)
