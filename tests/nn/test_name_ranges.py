import pytest

from hybridpp.nn.name_ranges import name_ranges


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ("embed norm", "embed norm"),
        ("layers.0", "layers.0"),
        ("layers.0 layers.1 layers.2", "layers.0-2"),
        ("layers.9 layers.10 layers.12", "layers.9-10 layers.12"),
        ("layer0 layer1 fc", "layer0-1 fc"),
        # What runs in between does not break a range.
        ("h.0 drop h.1 drop h.2", "h.0-2 drop x2"),
        ("l.0.attn l.0.mlp l.1.attn l.1.mlp", "l.0-1.attn l.0-1.mlp"),
        ("b.0.blocks.0 b.0.blocks.1 b.1.blocks.0", "b.0.blocks.0-1 b.1.blocks.0"),
        ("same same same", "same x3"),
        ("2 1", "2 1"),
    ],
)
def test_names_are_drawn_together(calls, text):
    assert " ".join(name_ranges(calls.split())) == text
