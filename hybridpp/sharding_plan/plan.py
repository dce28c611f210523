"""Tensor-parallel plans, and the styles of layers as users write them."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from hybridpp.errors import ConfigError
from hybridpp.sharding_plan.sharding_spec import ShardingSpec


class ShardKind(StrEnum):
    """How a module's weights are divided over the ranks.

    Attributes:
        COLUMN: a linear layer by its outputs: replicated input, sharded output.
        GATHERED_COLUMN: the same; the output is gathered where it is read in full (a head).
        ROW: a linear layer by its inputs: sharded input; the ranks' outputs are summands and are all-reduced.
        VOCAB: an embedding by its rows: each rank looks up its own; the outputs are all-reduced.
        FUSED_COLUMN: several column layers in one weight (queries, keys and values).
        PARTIAL_GRAD: replicated, and used on sharded activations (a norm of each head): gradients are all-reduced.
        REPLICATED: every rank holds it.
    """

    COLUMN = "column"
    GATHERED_COLUMN = "gathered_column"
    ROW = "row"
    VOCAB = "vocab"
    FUSED_COLUMN = "fused_column"
    PARTIAL_GRAD = "partial_grad"
    REPLICATED = "replicated"


class FusedLayout(StrEnum):
    """The order of several layers' outputs in a fused layer.

    Attributes:
        CONCATENATED: all queries, then all keys, then all values.
        INTERLEAVED: head by head: queries, keys and values of the first head, then of the second.
        GROUPED: group by group: all queries of a group of heads, then the key and the value that they share.
    """

    CONCATENATED = "concatenated"
    INTERLEAVED = "interleaved"
    GROUPED = "grouped"


class LayerStyle(NamedTuple):
    """A parsed style.

    Attributes:
        kind: how the weights are divided.
        layout: of a fused layer; None for others.
        parts: of a column layer: its number of heads, if it is given; fewer heads than ranks are copied. Of a
            concatenated layer: one number is the number of equal layers, several are their widths. Of an interleaved or
            grouped layer: the number of heads or groups, if it is given.
        copies: of a column layer: how many neighbouring ranks hold the same shard, if that is given instead.
    """

    kind: ShardKind
    layout: FusedLayout | None = None
    parts: tuple[int, ...] = ()
    copies: int = 1


class Plan(NamedTuple):
    """How a model is sharded, with what users read about it.

    Attributes:
        spec: how it is sharded.
        styles: the same as text, by the module's name: see :func:`parse_style`.
        reasons: why modules stay replicated that could be expected to be divided, by name.
        differences: layers that the model's own plan (transformers' ``_tp_plan``) divides in another way, as text.
        ways: the ways that blocks took in the call that was tried, by name; see
            :class:`~hybridpp.plan_search.block_ways.WayRecorder`.
    """

    spec: ShardingSpec = ShardingSpec()
    styles: Mapping[str, str] = {}
    reasons: Mapping[str, str] = {}
    differences: tuple[str, ...] = ()
    ways: Mapping[str, frozenset[int]] = {}


def parse_style(text: str) -> LayerStyle:
    """A style as users write it, parsed.

    ``"column"``, ``"column:2"`` (of 2 heads, which are copied where there are more ranks), ``"column:x2"`` (each shard
    on 2 neighbouring ranks), ``"row"``, ``"vocab"``, ``"gathered_column"``, ``"fused_column:concatenated:3"`` (equal
    layers), ``"fused_column:concatenated:64,16,16"`` (their widths), ``"fused_column:interleaved:12"`` (heads),
    ``"fused_column:grouped:4"`` (groups), ``"partial_grad"``, ``"replicated"``.

    Raises:
        ConfigError: the text is no style.

    Example:
        >>> parse_style("fused_column:concatenated:3").parts
        (3,)
    """
    kind, *rest = str(text).split(":")
    layout = rest.pop(0) if kind == ShardKind.FUSED_COLUMN and rest else None
    numbers = rest[0].split(",") if rest else []
    copies = kind == ShardKind.COLUMN and len(numbers) == 1 and numbers[0].startswith("x")
    if copies:
        numbers = [numbers[0].removeprefix("x")]
    if not _fits(kind, layout, numbers) or len(rest) > 1:
        raise ConfigError(
            "a tensor-parallel style is one of column[:<heads>], gathered_column, row, vocab, partial_grad, "
            "replicated, fused_column:concatenated:<number of parts or their widths>, "
            f"fused_column:interleaved[:<heads>], fused_column:grouped[:<groups>]: got {text!r}."
        )
    if copies:
        return LayerStyle(ShardKind.COLUMN, copies=int(numbers[0]))
    return LayerStyle(ShardKind(kind), FusedLayout(layout) if layout else None, tuple(map(int, numbers)))


def _fits(kind: str, layout: str | None, numbers: list[str]) -> bool:
    if kind not in [*ShardKind] or not all(number.isdecimal() and int(number) for number in numbers):
        return False
    if kind == ShardKind.FUSED_COLUMN:
        return bool(numbers) if layout == FusedLayout.CONCATENATED else layout in [*FusedLayout] and len(numbers) < 2
    return len(numbers) < (2 if kind == ShardKind.COLUMN else 1)
