"""A plan from the user's dict: patterns of module names, and the styles of the modules that match."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hybridpp.errors import ConfigError
from hybridpp.nn.linear import is_linear, output_dim
from hybridpp.sharding_plan.plan import FusedLayout, LayerStyle, Plan, ShardKind, parse_style
from hybridpp.sharding_plan.sharding_spec import ShardingSpec
from hybridpp.sharding_plan.style_spec import fitting_sizes, spec_of_styles

# Attributes by which attention splits its activations, in any model: numbers of heads, and the width of all heads.
_HEADS = re.compile(r"^(num|n)_?((attention|attn|query|key_value|kv|q|k|v)_?)*heads?(_kv)?$|^nhead$|^heads$")
_WIDTHS = re.compile(r"^(split_size|all_head_size|inner_dim)$")
_HEAD_WIDTH = ("head_dim", "attention_head_size", "head_size", "d_kv", "key_value_proj_dim")


def plan_from_patterns(model: nn.Module, patterns: Mapping[str, str], size: int) -> Plan:
    """The plan that patterns stand for, with new values of the attributes that count heads.

    A pattern is a module's name in which ``*`` stands for anything, dots too; ``*.q_proj`` also matches a ``q_proj`` of
    the model itself. Where several patterns match a module, the first one counts.

    Args:
        model: with full parameters.
        patterns: styles (see :func:`parse_style`) by pattern.
        size: number of ranks.

    Raises:
        ConfigError: a style is unknown, a pattern matches nothing, or heads cannot be divided.

    Example:
        >>> plan_from_patterns(nn.Sequential(nn.Linear(2, 4)), {"*": "replicated"}, 2).styles
        {'0': 'replicated'}
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    styles: dict[str, str] = {}
    for pattern, style in patterns.items():
        parse_style(style)
        found = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)]
        if not found:
            known = ", ".join(_generalised(name for name in names if is_linear(model.get_submodule(name))))
            raise ConfigError(
                f"tensor_parallel_plan names modules: none of {type(model).__name__} matches {pattern!r}. "
                f"Use names of its linear layers, with * as a wildcard: {known}."
            )
        for name in found:
            styles.setdefault(name, style)
    attributes: dict[tuple[str, str], int] = {}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in styles):
        children = {name: style for name, style in styles.items() if name.rpartition(".")[0] == parent}
        changed, counted = _divide_heads(model, parent, children, size)
        styles |= counted
        attributes |= {(parent, key): value for key, value in changed.items()}
    return Plan(spec_of_styles(model, styles, size) | ShardingSpec(attributes=attributes), styles)


def _generalised(names: Iterable[str]) -> list[str]:
    """Names in which a star replaces each number, without duplicates."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))


def _divide_heads(
    model: nn.Module, parent: str, children: Mapping[str, str], size: int
) -> tuple[dict[str, int], dict[str, str]]:
    """New values of a module's attributes where its column layers are divided, and styles with heads counted."""
    holder = model.get_submodule(parent)
    columns = {
        name: style for name, style in children.items() if _kind(style) in (ShardKind.COLUMN, ShardKind.FUSED_COLUMN)
    }
    numbers = {key: value for key, value in vars(holder).items() if type(value) is int and value > 0}
    if not columns or not any(_HEADS.match(key) or key in _HEAD_WIDTH for key in numbers):
        return {}, {}
    layers = {
        name: _num_heads(model.get_submodule(name), parse_style(style), numbers) for name, style in columns.items()
    }
    heads = {key: value for key, value in numbers.items() if _HEADS.match(key)}
    # Keys and values may have fewer heads, which are copied.
    most = max([number for number in (*layers.values(), *heads.values()) if number], default=1)
    counted = {}
    for name, number in layers.items():
        if number is not None:
            _check_heads(name, f"{number}", number, most, size)
            counted[name] = f"column:{number}" if columns[name] == ShardKind.COLUMN else columns[name]
    changed = {key: value // size for key, value in numbers.items() if _WIDTHS.match(key)}
    for key, value in heads.items():
        _check_heads(parent, f"{key}={value}", value, most, size)
        changed[key] = max(1, value // size)
    # Where heads of keys and values are copied, each serves fewer heads of queries.
    local = [max(1, parse_style(style).parts[0] // size) for style in counted.values() if parse_style(style).parts]
    if "num_key_value_groups" in numbers and local:
        changed["num_key_value_groups"] = max(local) // min(local)
    return {key: value for key, value in changed.items() if value != numbers[key]}, counted


def _kind(style: str) -> ShardKind:
    return parse_style(style).kind


def _num_heads(module: nn.Module, style: LayerStyle, numbers: Mapping[str, int]) -> int | None:
    """The number of heads in a layer's output, if its parent has the width of one."""
    if style.kind is ShardKind.COLUMN and style.parts:
        return style.parts[0]
    if not is_linear(module) or style.layout in (FusedLayout.INTERLEAVED, FusedLayout.GROUPED):
        return None
    weight: Any = module.weight
    width = weight.shape[output_dim(module)]
    if style.layout is FusedLayout.CONCATENATED:
        width = width // style.parts[0] if len(style.parts) == 1 else min(style.parts)
    head = next((numbers[key] for key in _HEAD_WIDTH if key in numbers), None)
    return width // head if head is not None and width % head == 0 else None


def _check_heads(name: str, what: str, number: int, most: int, size: int) -> None:
    if number % size and (number == most or size % number):
        raise ConfigError(
            f"tensor parallelism divides the heads of attention: {name!r} has {what}, tp_size={size}. "
            f"Use tp_size={fitting_sizes(number)}, or leave it out of tensor_parallel_plan."
        )
