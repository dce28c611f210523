"""What the search for plans makes of settings that count nothing, and of tries that raise."""

from enum import IntEnum
from types import SimpleNamespace

import pytest
import torch
from attention_blocks import HEADS, WIDTH, Attention, Block, Gated, infer
from torch import Tensor, nn

from hybridpp.plan_search import sequence_verify, verify
from hybridpp.plan_search.embeddings_and_heads import infer_embeddings_and_heads, large_tables, record_table_uses
from hybridpp.plan_search.sequence_search import infer_sequence
from hybridpp.sharding_plan import spec_of_styles
from hybridpp.tensor_parallel import shard


class Size(IntEnum):
    """A setting that happens to be a number."""

    LARGE = 2


@pytest.mark.covering
@pytest.mark.parametrize("holder", ["module", "configuration"])
@pytest.mark.parametrize("number", [0, -1, -6, True, 2.0, Size.LARGE, 10**30 + 1])
def test_a_setting_that_counts_no_heads_neither_ends_search_nor_is_sharded(number, holder):
    def with_setting(attention):
        settings = {"num_mem_kv": number, "extra_heads": number, "kv_heads_extra": number}
        if holder == "module":
            attention.__dict__ = {**settings, **vars(attention)}
        else:
            attention.config = SimpleNamespace(**settings)
        return Block(attention=attention)

    found = infer(with_setting(Attention()))
    assert found.spec.attributes == {("0.parts.attention", "num_heads"): 2, ("0.parts.attention", "kv_heads"): 2}
    # Where nothing fits, it is asked which number is to blame.
    left = infer(with_setting(Attention(num_heads=6, kv_heads=6)), 4)
    assert "num_heads=6 is not divisible by tp_size=4" in left.reasons["0.parts.attention.q"]


def ends_of(embedding: nn.Module, ids: Tensor):
    model = nn.Sequential(embedding, nn.Linear(8, 8))
    with record_table_uses(large_tables(model, ["1"])) as uses:
        embedding(ids)
    return infer_embeddings_and_heads(uses)


class Positions(nn.Embedding):
    """One row for each place, whatever the ids are: what comes back has not their shape."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[: ids.shape[1]]


class Listed(nn.Embedding):
    """Returns no tensor."""

    def forward(self, ids: Tensor) -> list[Tensor]:
        return list(super().forward(ids))


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [Positions, Listed])
def test_a_table_whose_rows_are_not_those_of_its_ids_stays_whole(kind, length):
    found = ends_of(kind(64, 8), torch.zeros(3, length, dtype=torch.long))
    assert not found.styles
    assert found.reasons["0"].startswith("in a trial with a few rows, it does not look up one row for each id")


def test_tables_that_look_up_a_row_for_each_id_are_still_divided():
    ids = torch.zeros(3, 2, dtype=torch.long)
    assert ends_of(nn.Embedding(64, 8), ids).styles == {"0": "vocab"}


class Fixed(nn.Module):
    """Insists on the width that it was built for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        if inner.shape[-1] != 24:
            raise ValueError("this layer is 24 wide")
        return self.down(inner.tanh())


def test_what_every_try_raised_is_the_reason_why_layers_stay_whole():
    found = infer(Block(mlp=Fixed(), attention=Attention()))
    assert found.reasons["0.parts.mlp.up"] == (
        "sharded with parts.mlp.down, the block raises ValueError: this layer is 24 wide"
    )
    assert found.styles["0.parts.attention.o"] == "row"
    assert found.spec.attributes == {
        ("0.parts.attention", "num_heads"): HEADS // 2,
        ("0.parts.attention", "kv_heads"): HEADS // 2,
    }


class Lengthy(nn.Module):
    """Insists on the length that sequences have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 4:
            raise ValueError("sequences are of 4")
        return x + self.down(self.up(x).tanh())


def _raising(error):
    def run(*args, **kwargs):
        raise error

    return run


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), torch.OutOfMemoryError("no room"), KeyboardInterrupt("stop")], ids=str
)
def test_what_a_try_is_not_to_blame_for_is_raised(monkeypatch, error):
    monkeypatch.setattr(verify, "shard", _raising(error))
    with pytest.raises(type(error), match=str(error)):
        infer(Block(mlp=Gated()))
    monkeypatch.setattr(sequence_verify, "shard", _raising(error))
    block = nn.Sequential(Lengthy())
    spec = spec_of_styles(block, {"0.up": "column", "0.down": "row"}, 2)
    with pytest.raises(type(error), match=str(error)):
        infer_sequence(block, ["0"], {"0": ((torch.randn(2, 4, WIDTH),), {})}, spec, 2)


def test_a_try_may_raise_anything_else(monkeypatch):
    def sharded(block, spec, group, share_memory):
        if len(spec.params) > 2:
            raise AssertionError("no such thing")
        return shard(block, spec, group, share_memory=share_memory)

    monkeypatch.setattr(verify, "shard", sharded)
    found = infer(Block(mlp=Gated()))
    assert not found.styles
    assert "raises AssertionError: no such thing" in found.reasons["0.parts.mlp.down"]


def test_so_is_what_blocks_raise_on_shards_of_sequences():
    block = nn.Sequential(Lengthy())
    spec = spec_of_styles(block, {"0.up": "column", "0.down": "row"}, 2)
    found = infer_sequence(block, ["0"], {"0": ((torch.randn(2, 4, WIDTH),), {})}, spec, 2)
    assert found.reasons == {"0": "on sequence shards, it raises ValueError: sequences are of 4"}
