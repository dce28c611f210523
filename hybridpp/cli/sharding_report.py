"""How a model's layers would be sharded over ranks, as text."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from hybridpp.config import ParallelConfig, Precision
from hybridpp.errors import ConfigError
from hybridpp.partition import find_units
from hybridpp.plugin import PreviewsTensorParallel, TensorParallelPreview, plugin_class
from hybridpp.text_table import TextTable

_PLUGIN = "hybrid_parallel"
_REPLICATED = "replicated"
_NUMBER = re.compile(r"(?<=\.)\d+(?=[.':]|$)")


def preview_sharding(model: nn.Module, config: ParallelConfig, precision: Precision) -> TensorParallelPreview:
    """How the plugin would shard the model.

    Raises:
        ConfigError: nothing of it can be sharded.
    """
    tp_size = config.tp_size
    plugin = plugin_class(_PLUGIN)
    assert issubclass(plugin, PreviewsTensorParallel), "it comes with hybridpp"
    division = plugin.preview_tensor_parallel(model, config, precision)
    if all(division.shapes[name] == parameter.shape for name, parameter in model.named_parameters()):
        named: dict[str, list[str]] = {}
        for name, reason in division.reasons.items():
            named.setdefault(_NUMBER.sub("*", reason), []).append(name)
        listed = [f"{', '.join(_starred(names))}: {reason}" for reason, names in named.items()]
        raise ConfigError(
            f"tensor parallelism shards pairs of linear layers: none of {type(model).__name__} can be sharded over "
            f"{tp_size} ranks ({'; '.join(listed) or 'its blocks have none'}). Remove --tp-size, or pass another size."
        )
    return division


class _Row(NamedTuple):
    """Modules whose names differ only in numbers."""

    owners: dict[str, None]
    sizes: list[tuple[int, int]]


def render_sharding(model: nn.Module, division: TensorParallelPreview, tp_size: int) -> list[str | TextTable]:
    """A line per kind of module, then the reasons why the others are replicated on every rank.

    Args:
        model: the unsharded model.
        division: the preview of it.
        tp_size: number of ranks.
    """
    rows: dict[tuple[str, str], _Row] = {}
    for name, parameter in model.named_parameters():
        owner, shape = name.rpartition(".")[0], division.shapes[name]
        style = division.styles.get(owner, _REPLICATED if shape == parameter.shape else "sharded")
        row = rows.setdefault((_NUMBER.sub("*", owner), style), _Row({}, []))
        row.owners[owner] = None
        row.sizes.append((parameter.numel(), math.prod(shape)))
    cells = [
        (
            (pattern or "(model)") + (f" x{len(row.owners)}" if len(row.owners) > 1 else ""),
            style,
            *(f"{sum(sizes):,}" for sizes in zip(*row.sizes, strict=True)),
        )
        for (pattern, style), row in rows.items()
    ]
    replicated = [owner for (_, style), row in rows.items() if style == _REPLICATED for owner in row.owners]
    return [
        f"each stage's layers over {tp_size} ranks",
        "",
        TextTable(("layer", "style", "parameters", "per rank"), cells),
        *_reasons(model, replicated, division.reasons),
        *_differences(division.differences),
        *_sequences(division, tp_size),
    ]


def _differences(differences: Iterable[str]) -> list[str]:
    """Layers that the model's own plan divides in another way, a line for each kind."""
    lines = dict.fromkeys(f"  {_NUMBER.sub('*', line)}" for line in differences)
    return ["", "the model's own plan (_tp_plan) differs:", *lines] if lines else []


def _sequences(division: TensorParallelPreview, tp_size: int) -> list[str]:
    """Blocks on sequence shards, with their gathers and scatters; then blocks on unsharded sequences, with the
    reasons."""
    lines: dict[str, list[str]] = {}
    for name, block in division.sequence_parallel.items():
        text = f"gathered before {_listed(block.gathered)}; reduce-scattered after {_listed(block.scattered)}"
        if block.replicated:
            text += f"; unsharded in {_listed(block.replicated)}"
        lines.setdefault(text, []).append(name)
    unsharded: dict[str, list[str]] = {}
    for name, reason in division.sequence_replicated.items():
        unsharded.setdefault(f"{_NUMBER.sub('*', reason)}.", []).append(name)
    if not lines:
        return []
    unsharded.setdefault("outside of the blocks.", []).append("the rest")
    return [
        "",
        f"sequences sharded over {tp_size} ranks, from block to block and from stage to stage:",
        *(f"  {_counted(names)}: {text}." for text, names in lines.items()),
        "",
        "unsharded sequences on every rank:",
        *(f"  {_counted(names)}: {reason}" for reason, names in unsharded.items()),
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(_starred(names))


def _counted(names: list[str]) -> str:
    return _listed(names) + (f" x{len(names)}" if len(names) > 1 else "")


def _reasons(model: nn.Module, replicated: list[str], reasons: Mapping[str, str]) -> list[str]:
    blocks = find_units(model, 1).blocks
    lines: dict[str, list[str]] = {}
    for owner in replicated:
        above = [name for name in reasons if _within(owner, name)]
        if above:
            reason = reasons[max(above, key=len)]
        elif any(_within(owner, block) for block in blocks):
            reason = "used on replicated activations."
        else:
            reason = "outside of the blocks."
        lines.setdefault(_NUMBER.sub("*", reason), []).append(owner)
    text = [f"  {', '.join(_starred(owners))}: {reason}" for reason, owners in lines.items()]
    return ["", "replicated on every rank:", *text] if text else []


def _within(inner: str, outer: str) -> bool:
    return not outer or f"{inner}.".startswith(f"{outer}.")


def _starred(names: Iterable[str]) -> list[str]:
    """The distinct names with a star for each number."""
    return list(dict.fromkeys(_NUMBER.sub("*", name) or "(model)" for name in names))
