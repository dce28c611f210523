"""Which keywords of torch.compile compile_blocks takes."""

import pytest
from refusals import refused

from hybridpp.config import CompileConfig

TEXT = "compile_blocks must be True, False, or a dict of torch.compile's backend, dynamic, fullgraph, mode, options"


@pytest.mark.parametrize("given", [None, 1, "inductor", {"model": None}, ["fullgraph"]])
def test_anything_else_is_refused(given):
    with refused(f"{TEXT}: got compile_blocks={given!r}."):
        CompileConfig(compile_blocks=given)


@pytest.mark.parametrize(
    ("given", "is_on", "keywords"),
    [
        (False, False, {"fullgraph": True}),
        (True, True, {"fullgraph": True}),
        ({}, True, {"fullgraph": True}),
        ({"mode": "max-autotune", "fullgraph": False}, True, {"fullgraph": False, "mode": "max-autotune"}),
    ],
)
def test_blocks_are_one_graph_unless_told_otherwise(given, is_on, keywords):
    config = CompileConfig(compile_blocks=given)
    assert (config.is_on, config.keywords()) == (is_on, keywords)
