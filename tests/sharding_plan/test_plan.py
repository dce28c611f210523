"""Styles of a tensor-parallel plan are read from text."""

import re

import pytest

from hybridpp.errors import ConfigError
from hybridpp.sharding_plan import FusedLayout, LayerStyle, ShardKind, parse_style


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ("column", LayerStyle(ShardKind.COLUMN)),
        ("column:2", LayerStyle(ShardKind.COLUMN, None, (2,))),
        ("column:x2", LayerStyle(ShardKind.COLUMN, copies=2)),
        ("row", LayerStyle(ShardKind.ROW)),
        ("partial_grad", LayerStyle(ShardKind.PARTIAL_GRAD)),
        ("vocab", LayerStyle(ShardKind.VOCAB)),
        ("replicated", LayerStyle(ShardKind.REPLICATED)),
        ("gathered_column", LayerStyle(ShardKind.GATHERED_COLUMN)),
        ("fused_column:concatenated:3", LayerStyle(ShardKind.FUSED_COLUMN, FusedLayout.CONCATENATED, (3,))),
        (
            "fused_column:concatenated:64,16,16",
            LayerStyle(ShardKind.FUSED_COLUMN, FusedLayout.CONCATENATED, (64, 16, 16)),
        ),
        ("fused_column:interleaved", LayerStyle(ShardKind.FUSED_COLUMN, FusedLayout.INTERLEAVED)),
        ("fused_column:interleaved:12", LayerStyle(ShardKind.FUSED_COLUMN, FusedLayout.INTERLEAVED, (12,))),
        ("fused_column:grouped:4", LayerStyle(ShardKind.FUSED_COLUMN, FusedLayout.GROUPED, (4,))),
    ],
)
def test_a_style_is_read_from_text(text, style):
    assert parse_style(text) == style


@pytest.mark.parametrize(
    "text",
    [
        "colwise",
        "",
        "row:3",
        "row:x2",
        "column:x",
        "column:x2,x2",
        "column:3:4",
        "column:3,4",
        "column:",
        "fused_column",
        "fused_column:concatenated",
        "fused_column:concatenated:0",
        "fused_column:concatenated:a",
        "fused_column:grouped:1,2",
        "fused_column:stacked:3",
        None,
        7,
    ],
)
def test_what_is_no_style_is_refused_with_those_that_are(text):
    message = (
        "a tensor-parallel style is one of column[:<heads>], gathered_column, row, vocab, partial_grad, replicated, "
        "fused_column:concatenated:<number of parts or their widths>, fused_column:interleaved[:<heads>], "
        f"fused_column:grouped[:<groups>]: got {text!r}."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        parse_style(text)
