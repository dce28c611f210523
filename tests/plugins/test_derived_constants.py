"""Half-precision models whose own tables are in fp32: of sines, of slopes, of places."""

import functools
import math

import pytest
import torch
from support import assert_near, assert_same, boosted, sgd, train
from torch import nn
from torch.nn import functional

from hybridpp.cluster import Loopback

WIDTH, HEADS, HEAD, LENGTH, VOCAB = 16, 2, 8, 6, 40


def angles():
    frequencies = 100.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    return torch.outer(torch.arange(LENGTH).float(), frequencies)


def turned(x, cos, sin):
    """Pairs of channels, turned; torch promotes where the tables are in fp32."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class Attention(nn.Module):
    """With the positions in one of many styles; ``exact`` says by hand what is to be rounded where."""

    def __init__(self, style, exact):
        super().__init__()
        self.style, self.exact = style, exact
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        keep = functools.partial(self.register_buffer, persistent="in state" in style)
        if style.startswith("rotary tables"):
            keep("cos", angles().cos())
            keep("sin", angles().sin())
        elif style == "rotary attributes":
            self.cos, self.sin = angles().cos(), angles().sin()
        elif style == "rotary frequencies":
            keep("frequencies", angles()[1])
        elif style == "rotary complex":
            keep("turns", torch.polar(torch.ones(LENGTH, HEAD // 2), angles()))
        elif "slopes" in style:
            distance = (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]).float()
            keep("bias", distance.tril() * torch.tensor([0.5, 0.1])[:, None, None])

    def placed(self, x, tables):
        if self.style.startswith("rotary tables") or self.style == "rotary attributes":
            return turned(x, self.cos[: x.shape[2]], self.sin[: x.shape[2]])
        if self.style == "rotary frequencies":
            table = torch.outer(torch.arange(x.shape[2]).float(), self.frequencies)
            return turned(x, table.cos(), table.sin())
        if self.style == "rotary complex":
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * self.turns[: x.shape[2]]).flatten(-2)
        return turned(x, *tables) if self.style == "tables from container code" else x

    def forward(self, x, tables):
        x = self.round(x, self.qkv.weight)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        q, k = (self.round(self.placed(part, tables), v) for part in (q, k))
        if self.style == "slopes by hand":
            scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD) + self.bias
            y = self.round(scores.softmax(-1), v) @ v
        else:
            mask = self.bias if self.style == "slopes as a mask" else None
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(y.transpose(1, 2).flatten(2))

    def round(self, x, like):
        return x.to(like.dtype) if self.exact else x


class Block(nn.Module):
    def __init__(self, style, exact):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(style, exact)

    def forward(self, x, tables):
        return x + self.attention(self.norm(x), tables)


class Model(nn.Module):
    def __init__(self, style, exact=False):
        super().__init__()
        torch.manual_seed(0)
        self.style = style
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(style, exact) for _ in range(4))
        self.head, self.exact = nn.Linear(WIDTH, VOCAB), exact
        self.register_buffer("places", angles().repeat(1, 4).sin(), persistent=False)
        self.register_buffer("cos", angles().cos(), persistent=False)
        self.register_buffer("sin", angles().sin(), persistent=False)

    def forward(self, ids):
        x = self.embedding(ids)
        if self.style == "places in container code":
            x = x + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        return self.head(x.to(self.head.weight.dtype) if self.exact else x)


STYLES = [
    "rotary tables",
    "rotary tables in state",
    "rotary attributes",
    "rotary frequencies",
    "rotary complex",
    "tables from container code",
    "slopes by hand",
    "slopes as a mask",
    "places in container code",
]
IDS = torch.randint(0, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(0))


def loss(logits, ids):
    return functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def run_of(style, exact=False, **options):
    options = {"precision": "bf16", "num_microbatches": 2, "criterion": loss, **options}
    return train(functools.partial(Model, style, exact), [IDS, IDS.flip(0)], **options)


@pytest.mark.covering
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("style", STYLES)
def test_tables_in_fp32_are_rounded_where_torch_stops_to_promote(style, precision):
    found, expected = (run_of(style, exact, precision=precision) for exact in (False, True))
    assert found["losses"] == expected["losses"]
    assert_same(found["weights"], expected["weights"])
    # And it is the model that trains in fp32, but for rounding.
    assert found["losses"][0] == pytest.approx(run_of(style, precision="fp32")["losses"][0], abs=0.02)


@pytest.mark.covering
@pytest.mark.parametrize(
    "layout",
    [
        {"pp_size": 2},
        {"pp_size": 2, "schedule": "zb-h1"},
        {"pp_size": 2, "schedule": "zb-v"},
        {"gradient_checkpoint_config": {}},
        {"fp32_losses": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("style", ["rotary tables", "tables from container code", "places in container code"])
def test_so_they_are_whatever_the_layout(style, layout):
    found, expected = run_of(style, **layout), run_of(style)
    assert set(map(tuple, found["losses"])) == set(map(tuple, expected["losses"]))
    assert_same(found["weights"], expected["weights"])


@pytest.mark.parametrize("style", ["rotary tables", "places in container code"])
def test_so_they_are_on_ranks_that_share_layers(style):
    assert_near(run_of(style, tp_size=2)["weights"], run_of(style)["weights"], 2e-2)


class Torchs(nn.Module):
    """Torch's own encoder, behind places in fp32; recurrent layers check formats themselves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.register_buffer("places", angles().repeat(1, 4).sin(), persistent=False)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids) + self.places))


def test_so_they_are_in_layers_of_torch():
    options = {"precision": "bf16", "num_microbatches": 2, "criterion": loss}
    whole, cut = (train(Torchs, [IDS, IDS.flip(0)], pp_size=pp_size, **options) for pp_size in (1, 2))
    assert_same(cut["weights"], whole["weights"])
    full = train(Torchs, [IDS, IDS.flip(0)], **{**options, "precision": "fp32"})
    assert whole["losses"][0] == pytest.approx(full["losses"][0], abs=0.02)

    def evaluated():
        _, model, _ = boosted(Torchs(), sgd, IDS, precision="bf16")
        model.eval()
        with torch.no_grad():
            return model(IDS).dtype, model(IDS).dtype

    assert Loopback(1).run(evaluated) == [(torch.bfloat16, torch.bfloat16)]


def test_tables_that_are_no_part_of_the_state_stay_in_fp32():
    def run():
        _, model, _ = boosted(Model("rotary tables"), sgd, IDS, precision="bf16")
        attention = model.blocks[0].attention
        return attention.cos.dtype, attention.qkv.weight.dtype

    assert Loopback(1).run(run) == [(torch.float32, torch.bfloat16)]
