"""The tensor-parallel plan of a transformers model (``_tp_plan``): read it, and compare it with the plan found."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from hybridpp.nn.linear import is_linear
from hybridpp.sharding_plan.plan import ShardKind


class OwnPlan(NamedTuple):
    """What a model's own plan says about its linear layers.

    Attributes:
        styles: transformers' style of each layer that it names.
        kinds: the kind of layer that each of these styles means; styles without such a kind are left out.
    """

    styles: Mapping[str, str] = {}
    kinds: Mapping[str, ShardKind] = {}

    def of_block(self, block: str) -> dict[str, ShardKind]:
        """The kinds of layers in a block, by their names in it."""
        prefix = f"{block}." if block else ""
        return {name.removeprefix(prefix): kind for name, kind in self.kinds.items() if name.startswith(prefix)}


def hf_tp_plan(model: nn.Module) -> OwnPlan:
    """The model's own plan; an empty one where it has none.

    ``_tp_plan`` maps patterns of module names, in which ``*`` stands for a number, to styles such as ``colwise``,
    ``rowwise`` and ``colwise_gather_output``.
    """
    patterns: Any = getattr(model, "_tp_plan", None)
    if not isinstance(patterns, Mapping) or not patterns:
        return OwnPlan()
    styles: dict[str, str] = {}
    layers = [name for name, module in model.named_modules() if is_linear(module)]
    for pattern, style in patterns.items():
        expression = re.compile(re.escape(str(pattern)).replace(r"\*", r"\d+"))
        styles |= {name: str(style) for name in layers if name not in styles and expression.fullmatch(name)}
    kinds = {name: kind for name, style in styles.items() if (kind := _kind(style)) is not None}
    return OwnPlan(styles, kinds)


def differences(own: OwnPlan, blocks: Iterable[str], styles: Mapping[str, str]) -> tuple[str, ...]:
    """Layers inside blocks that the model's own plan divides in another way than ``styles``, as text."""
    inside = tuple(f"{block}." for block in blocks)
    found = []
    for name, kind in own.kinds.items():
        ours = styles.get(name, ShardKind.REPLICATED.value)
        if name.startswith(inside) and ours.partition(":")[0].removeprefix("fused_") != kind:
            found.append(f"{name}: {own.styles[name]} in the model's own plan, {ours} here")
    return tuple(found)


def _kind(style: str) -> ShardKind | None:
    """The kind of layer that one of transformers' styles means."""
    if "rowwise" in style:
        return ShardKind.ROW
    return ShardKind.COLUMN if "colwise" in style else None
