"""Small models on whose modules layers of the adapter meet."""

import torch
from copies import copied
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, Olmo2Config, Olmo2ForCausalLM

WIDTH, LENGTH = 16, 8


class Attention(nn.Module):
    """Reads the width of its heads from its input; with a table of positions, it needs the whole sequence."""

    def __init__(self, has_table: bool):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.num_heads = 4
        self.table = nn.Parameter(torch.randn(LENGTH, LENGTH)) if has_table else None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (layer(x).view(heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.mT if self.table is None else q @ k.mT + self.table
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))


class Experts(nn.Module):
    """All experts of a layer, with their router: every token goes through all of them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, WIDTH, 32) / 4)
        self.down = nn.Parameter(torch.randn(4, 32, WIDTH) / 4)

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        hidden = torch.einsum("bsh,ehf->bsef", x, self.up).relu()
        return torch.einsum("bsef,efh,bse->bsh", hidden, self.down, shares)


class Router(nn.Module):
    """A matrix, in a class of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight).softmax(-1)


class Routed(nn.Module):
    """Experts, and how much of each a token gets."""

    def __init__(self):
        super().__init__()
        self.experts, self.router = Experts(), Router()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.router(x))


def feed_forward() -> nn.Module:
    """With a norm over the width of all ranks."""
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.RMSNorm(32), nn.Linear(32, WIDTH))


class Block(nn.Module):
    """Its parts are units of their own: attention as in BLIP, experts, and a norm as in OLMo 2."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Attention(True), Attention(False), Routed(), feed_forward()])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return x


class Mixed(nn.Module):
    """One such block: layers meet on modules inside of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([Block()]), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mlp() -> nn.Module:
    """Whose blocks are layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))


@copied
def olmo2() -> nn.Module:
    """With norms over all heads, and a large head and embedding, which are units and are sharded."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    return Olmo2ForCausalLM(Olmo2Config(vocab_size=512, max_position_embeddings=16, pad_token_id=None, **sizes))


@copied
def bloom() -> nn.Module:
    """Whose blocks get a bias for each head."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=32, hidden_size=WIDTH, n_layer=1, n_head=4, hidden_dropout=0, attention_dropout=0)
    return BloomForCausalLM(config)
