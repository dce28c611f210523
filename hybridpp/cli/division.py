"""How a model's layers would be divided over ranks, as text."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from hybridpp.cli.columns import table
from hybridpp.config import ParallelConfig
from hybridpp.errors import ConfigError
from hybridpp.partition import dissect
from hybridpp.plugin import DividesLayers, LayerDivision
from hybridpp.registry import plugin_class

_PLUGIN = "hybrid_parallel"
_WHOLE = "whole"
_NUMBER = re.compile(r"(?<=\.)\d+(?=[.':]|$)")


def divide(model: nn.Module, config: ParallelConfig) -> LayerDivision:
    """How the plugin would divide the model.

    Raises:
        ConfigError: nothing of it can be divided.
    """
    tp_size = config.tp_size
    plugin = plugin_class(_PLUGIN)
    assert issubclass(plugin, DividesLayers), "it comes with hybridpp"
    division = plugin.preview_division(model, config)
    if all(division.shapes[name] == parameter.shape for name, parameter in model.named_parameters()):
        named: dict[str, list[str]] = {}
        for name, reason in division.reasons.items():
            named.setdefault(_NUMBER.sub("*", reason), []).append(name)
        told = [f"{', '.join(_starred(names))}: {reason}" for reason, names in named.items()]
        raise ConfigError(
            f"tensor parallelism divides pairs of linear layers: none of {type(model).__name__} can be divided over "
            f"{tp_size} ranks ({'; '.join(told) or 'its blocks have none'}). Leave out --tp-size, or take another size."
        )
    return division


class _Row(NamedTuple):
    """Modules that differ in numbers only."""

    owners: dict[str, None]
    sizes: list[tuple[int, int]]


def render_division(model: nn.Module, division: LayerDivision, tp_size: int) -> str:
    """A line per kind of module, then why the rest is whole on every rank.

    Args:
        model: whole.
        division: of it.
        tp_size: number of ranks.
    """
    rows: dict[tuple[str, str], _Row] = {}
    for name, parameter in model.named_parameters():
        owner, shape = name.rpartition(".")[0], division.shapes[name]
        told = division.styles.get(owner, _WHOLE if shape == parameter.shape else "in parts")
        row = rows.setdefault((_NUMBER.sub("*", owner), told), _Row({}, []))
        row.owners[owner] = None
        row.sizes.append((parameter.numel(), math.prod(shape)))
    cells = [
        (
            (pattern or "(model)") + (f" x{len(row.owners)}" if len(row.owners) > 1 else ""),
            told,
            *(f"{sum(sizes):,}" for sizes in zip(*row.sizes, strict=True)),
        )
        for (pattern, told), row in rows.items()
    ]
    whole = [owner for (_, told), row in rows.items() if told == _WHOLE for owner in row.owners]
    text = table(("layer", "style", "parameters", "per rank"), cells)
    lines = [f"each stage's layers over {tp_size} ranks", "", text, *_reasons(model, whole, division.reasons)]
    return "\n".join([*lines, *_sequences(division, tp_size)])


def _sequences(division: LayerDivision, tp_size: int) -> list[str]:
    """Which blocks have shards of sequences, and where they do not; then which blocks have none, and why."""
    lines: dict[str, list[str]] = {}
    for name, block in division.on_shards.items():
        told = f"joined before {_listed(block.joined)}; summed and scattered behind {_listed(block.scattered)}"
        if block.wholes:
            told += f"; whole in {_listed(block.wholes)}"
        lines.setdefault(told, []).append(name)
    wholes: dict[str, list[str]] = {}
    for name, reason in division.on_wholes.items():
        wholes.setdefault(f"{_NUMBER.sub('*', reason)}.", []).append(name)
    if not lines:
        return []
    wholes.setdefault("outside of the blocks.", []).append("the rest")
    return [
        "",
        f"sequences over {tp_size} ranks, in shards from block to block and from stage to stage:",
        *(f"  {_counted(names)}: {told}." for told, names in lines.items()),
        "",
        "whole sequences on every rank:",
        *(f"  {_counted(names)}: {reason}" for reason, names in wholes.items()),
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(_starred(names))


def _counted(names: list[str]) -> str:
    return _listed(names) + (f" x{len(names)}" if len(names) > 1 else "")


def _reasons(model: nn.Module, whole: list[str], reasons: Mapping[str, str]) -> list[str]:
    blocks = dissect(model, 1).blocks
    lines: dict[str, list[str]] = {}
    for owner in whole:
        above = [name for name in reasons if _within(owner, name)]
        if above:
            reason = reasons[max(above, key=len)]
        elif any(_within(owner, block) for block in blocks):
            reason = "used on whole activations."
        else:
            reason = "outside of the blocks."
        lines.setdefault(_NUMBER.sub("*", reason), []).append(owner)
    told = [f"  {', '.join(_starred(owners))}: {reason}" for reason, owners in lines.items()]
    return ["", "whole on every rank:", *told] if told else []


def _within(inner: str, outer: str) -> bool:
    return not outer or f"{inner}.".startswith(f"{outer}.")


def _starred(names: Iterable[str]) -> list[str]:
    """With a star for each number, each once."""
    return list(dict.fromkeys(_NUMBER.sub("*", name) or "(model)" for name in names))
