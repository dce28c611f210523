"""Attributes of a block's modules that count heads or give widths, and so change when it is sharded: found by value."""

import re
from collections.abc import Iterator
from itertools import combinations
from typing import TypeAlias

from torch import nn

from hybridpp.nn.linear import LinearShape
from hybridpp.nn.names import qualified
from hybridpp.plan_search.layer_groups import LayerGroup, common_module
from hybridpp.sharding_plan.style_spec import fitting_sizes

AttributeValues: TypeAlias = dict[tuple[str, str], int]
"""Values of attributes, by the module's and the attribute's name."""

# Names decide only the order of the trials; their results decide what is right.
_HEADS = re.compile(r"heads?$|^n_?heads?|^h$|heads_|_heads?_")
_SIZES = re.compile(r"dim|size|width|scale|groups|per_head|idx|index|^layer|drop")
_UNCHANGED = re.compile(r"idx|index|_id$|^layer|max_|position|window|vocab|epoch|seed")
_SHARED = re.compile(r"kv|key_value|query_groups")
_MAX_NAMES = 6
LIKELY = 6
"""How many of the choices are likely."""


def divisible_attributes(
    block: nn.Module, layers: dict[str, LinearShape], group: LayerGroup, tp_size: int
) -> AttributeValues:
    """The attributes around a group of layers that ``tp_size`` divides."""
    return {
        key: value
        for key, value in _numbers(block, layers, group).items()
        if value > 1 and value % tp_size == 0 and not _UNCHANGED.search(key[1])
    }


def shared_heads(
    block: nn.Module, layers: dict[str, LinearShape], group: LayerGroup, tp_size: int, copies: int
) -> AttributeValues:
    """New values of attributes that count heads of keys and values, where ``copies`` ranks share each."""
    changed: AttributeValues = {}
    for (name, key), value in _numbers(block, layers, group).items():
        if re.search(r"groups?$", key) and value % copies == 0:
            changed[name, key] = value // copies
        elif re.search(_SHARED, key) and _is_head_count(key) and value * copies % tp_size == 0:
            changed[name, key] = value * copies // tp_size
    return changed


def _numbers(block: nn.Module, layers: dict[str, LinearShape], group: LayerGroup) -> AttributeValues:
    found: AttributeValues = {}
    for name in _scope(block, layers, group):
        module = block.get_submodule(name)
        if not type(module).__module__.startswith("torch.nn."):
            found |= {(name, key): value for key, value in vars(module).items() if _is_number(key, value)}
            settings = vars(module).get("config")
            counts = vars(settings).items() if hasattr(settings, "__dict__") else ()
            found |= {(name, f"config.{k}"): v for k, v in counts if _is_number(k, v) and _is_head_count(k)}
    return found


def _is_number(key: str, value: object) -> bool:
    # Exactly this type: a flag or a member of an enumeration is no count. 0 (an option that is off) and negative
    # numbers (a dimension, "no limit") count nothing.
    return type(value) is int and value > 0 and not key.startswith("_")


def _is_head_count(key: str) -> bool:
    return bool(_HEADS.search(key)) and not _SIZES.search(key)


def _scope(block: nn.Module, layers: dict[str, LinearShape], group: LayerGroup) -> list[str]:
    """Modules that may compute with the group's activations: those around its layers that hold no other layers."""
    top = common_module(group.layers)
    paths = [name.split(".")[:-1] for name in group.layers]
    around = {".".join(path[:depth]) for path in paths for depth in range(len(path) + 1)}
    around = {name for name in around if _inside(name, top)}
    others = set(layers) - group.layers
    return [
        name
        for name, _ in block.named_modules()
        if name in around
        or (_inside(name, top) and name not in layers and not any(_inside(other, name) for other in others))
    ]


def _inside(name: str, top: str) -> bool:
    return not top or f"{name}.".startswith(f"{top}.")


def attribute_choices(found: AttributeValues, widths: set[int], tp_size: int) -> Iterator[AttributeValues]:
    """Choices of attributes to divide, the likeliest first: head counts and widths, head counts, none, other subsets.

    Args:
        found: attributes that ``tp_size`` divides.
        widths: numbers of outputs and inputs of the group's layers.
        tp_size: number of ranks.
    """
    heads = {key for _, key in found if _is_head_count(key)}
    own = {key for key in heads if "." not in key}
    wide = {key for (_, key), value in found.items() if value in widths and key not in heads}
    names = sorted({key for _, key in found}, key=lambda key: (key not in heads, key not in wide, key))[:_MAX_NAMES]
    seen: list[set[str]] = []
    for chosen in (own | wide, own, set[str](), wide, heads | wide, heads):
        if chosen not in seen:
            seen.append(chosen)
            yield _divided(found, chosen, tp_size)
    for number in range(1, len(names) + 1):
        for some in combinations(names, number):
            if set(some) not in seen:
                yield _divided(found, set(some), tp_size)


def _divided(found: AttributeValues, keys: set[str], tp_size: int) -> AttributeValues:
    return {key: value // tp_size for key, value in found.items() if key[1] in keys}


def head_counts(found: AttributeValues) -> set[int]:
    """Values of attributes with the name of a head count."""
    return {value for (_, key), value in found.items() if _is_head_count(key)}


def indivisible(block: nn.Module, layers: dict[str, LinearShape], group: LayerGroup, tp_size: int) -> str | None:
    """A head count or width of a group that ``tp_size`` does not divide, with sizes that work; None: none.

    Modules of any kind may hold the configuration, so its counts are read only from modules whose name contains
    attention.
    """
    rows = [layers[name].num_inputs for name in group.rows]
    for (name, key), value in _numbers(block, layers, group).items():
        of_group = _is_head_count(key.rpartition(".")[2]) and all(width % value == 0 for width in rows)
        is_relevant = "." not in key or re.search(
            r"attn|attention", f"{name} {type(block.get_submodule(name)).__name__}", re.I
        )
        shared = re.search(_SHARED, key) and tp_size % value == 0
        if of_group and is_relevant and not shared and value % tp_size:
            return _not_divisible(qualified(name, key), value, tp_size)
    return next((_not_divisible("its width", width, tp_size) for width in rows if width % tp_size), None)


def _not_divisible(what: str, value: int, tp_size: int) -> str:
    return f"{what}={value} is not divisible by tp_size={tp_size} (sizes that work: {fitting_sizes(value)})"
