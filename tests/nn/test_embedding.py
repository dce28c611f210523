"""Which embeddings only look up rows."""

import pytest
import torch
from torch import nn

from hybridpp.nn.embedding import is_lookup


class WithASpecialRow(nn.Embedding):
    """As T5Gemma2's: one id's row is a parameter of its own."""

    def __init__(self):
        super().__init__(8, 4)
        self.special = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(
    ("module", "is_one"),
    [(nn.Embedding(8, 4), True), (nn.Embedding(8, 4, max_norm=1.0), False), (WithASpecialRow(), False)],
)
def test_an_embedding_that_holds_more_than_rows_is_no_lookup(module, is_one):
    assert is_lookup(module) is is_one
