"""Compare a plan with the one that a transformers model brings along."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn


def differences(model: nn.Module, blocks: Iterable[str], styles: Mapping[str, str]) -> tuple[str, ...]:
    """Layers inside blocks that the model's own ``_tp_plan`` divides otherwise than ``styles``, in words."""
    own: Any = getattr(model, "_tp_plan", None)
    if not isinstance(own, Mapping) or not own:
        return ()
    prefixes = tuple(f"{block}." for block in blocks)
    found = []
    for name, module in model.named_modules():
        if not name.startswith(prefixes) or not isinstance(module, nn.Linear):
            continue
        theirs = next((style for pattern, style in own.items() if _matches(pattern, name)), None)
        ours = styles.get(name, "whole")
        if theirs is not None and _kind(str(theirs)) not in (None, ours.partition(":")[0].removeprefix("fused_")):
            found.append(f"{name}: {theirs} in the model's own plan, {ours} here")
    return tuple(found)


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _kind(style: str) -> str | None:
    """The style here that one of transformers' corresponds to."""
    if "rowwise" in style:
        return "row"
    return "column" if "colwise" in style else None
