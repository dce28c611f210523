"""What of a model is divided over the ranks of a tensor-parallel group: a plan, as plain text by module name."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from hybridpp.errors import ConfigError
from hybridpp.tensor_parallel.division import Division


class Kind(StrEnum):
    """How a module's weights are divided over the ranks.

    Attributes:
        COLUMN: a linear layer by its outputs: from a whole input each rank makes its part of the output.
        GATHERED_COLUMN: the same, and every rank can have the whole output (a head that others read).
        ROW: a linear layer by its inputs: from its part of the input each rank makes a summand of the output; all get
            the sum.
        VOCAB: an embedding by its rows: each rank looks up what it has; all get the sum.
        FUSED_COLUMN: several column layers in one weight (queries, keys and values).
        SUMMED: every rank has all of it and uses it on its part of an activation (a norm of each head): its gradient
            is the sum over the ranks.
        WHOLE: every rank has all of it.
    """

    COLUMN = "column"
    GATHERED_COLUMN = "gathered_column"
    ROW = "row"
    VOCAB = "vocab"
    FUSED_COLUMN = "fused_column"
    SUMMED = "summed"
    WHOLE = "whole"


class Layout(StrEnum):
    """How the layers of a fused one lie along its outputs.

    Attributes:
        CONCATENATED: one behind the other: all queries, all keys, all values.
        INTERLEAVED: head by head: queries, keys and values of the first head, then of the second.
        GROUPED: group by group: all queries of a group of heads, and the keys and values they share.
    """

    CONCATENATED = "concatenated"
    INTERLEAVED = "interleaved"
    GROUPED = "grouped"


class Style(NamedTuple):
    """A style, read.

    Attributes:
        kind: how the weights are divided.
        layout: of a fused layer; None for others.
        parts: of a column layer: how many heads its output is, if that is given; fewer heads than ranks are copied. Of
            a fused one, concatenated: one number says how many equal layers there are, several say their widths.
            Interleaved and grouped: how many heads or groups there are, if it is given.
        copies: of a column layer: how many neighbouring ranks have the same part, where that is given instead.
    """

    kind: Kind
    layout: Layout | None = None
    parts: tuple[int, ...] = ()
    copies: int = 1


class Plan(NamedTuple):
    """What is done to a model.

    Attributes:
        styles: a style for each divided module, by its name: ``"column"``, ``"column:2"`` (of 2 heads, which are
            copied where there are more ranks), ``"column:x2"`` (every part on 2 ranks), ``"row"``, ``"vocab"``,
            ``"fused_column:concatenated:3"`` (equal parts), ``"fused_column:concatenated:64,16,16"`` (their widths),
            ``"fused_column:interleaved:12"`` (heads), ``"fused_column:grouped:4"`` (groups), ``"gathered_column"``,
            ``"summed"``, ``"whole"``.
        attributes: what attributes of modules (head counts, widths) become on every rank: by the module's name and
            the attribute's.
        reasons: why a module stays whole, where someone could expect it to be divided; by its name.
        summed: parameters that every rank has whole and uses on its part of an activation, by name.
        rest: what styles cannot say; its attributes are not looked at.
    """

    styles: Mapping[str, str]
    attributes: Mapping[str, Mapping[str, int]] = {}
    reasons: Mapping[str, str] = {}
    summed: frozenset[str] = frozenset()
    rest: Division = Division()


def parse_style(text: str) -> Style:
    """The style that a text stands for.

    Raises:
        ConfigError: it stands for none.

    Example:
        >>> parse_style("fused_column:concatenated:3").parts
        (3,)
    """
    kind, *rest = str(text).split(":")
    layout = rest.pop(0) if kind == Kind.FUSED_COLUMN and rest else None
    numbers = rest[0].split(",") if rest else []
    copies = kind == Kind.COLUMN and len(numbers) == 1 and numbers[0].startswith("x")
    if copies:
        numbers = [numbers[0].removeprefix("x")]
    if not _fits(kind, layout, numbers) or len(rest) > 1:
        raise ConfigError(
            "a tensor-parallel style is one of column[:<heads>], gathered_column, row, vocab, summed, whole, "
            "fused_column:concatenated:<number of parts or their widths>, fused_column:interleaved[:<heads>], "
            f"fused_column:grouped[:<groups>]: got {text!r}."
        )
    if copies:
        return Style(Kind.COLUMN, copies=int(numbers[0]))
    return Style(Kind(kind), Layout(layout) if layout else None, tuple(map(int, numbers)))


def _fits(kind: str, layout: str | None, numbers: list[str]) -> bool:
    if kind not in [*Kind] or not all(number.isdecimal() and int(number) for number in numbers):
        return False
    if kind == Kind.FUSED_COLUMN:
        return bool(numbers) if layout == Layout.CONCATENATED else layout in [*Layout] and len(numbers) < 2
    return len(numbers) < (2 if kind == Kind.COLUMN else 1)
