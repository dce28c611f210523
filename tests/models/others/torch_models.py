"""Torch's own stacks of layers, in models as people write them around them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from models.batches import Batch
from models.others.recipe import SAMPLES, Foreign
from torch import Tensor, nn

LIBRARY = "torch"
TOKENS, LENGTH, WIDTH, HEADS, DEPTH = 64, 12, 32, 4, 4
_SMALL: dict[str, Any] = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 64, "dropout": 0.0}


class Language(nn.Module):
    """Token ids through an embedding, what lies in between, and a head."""

    def __init__(self, body: nn.Module, width: int = WIDTH):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.body = body
        self.head = nn.Linear(width, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        hidden = self.body(self.embedding(ids))
        return self.head(hidden[0] if isinstance(hidden, tuple) else hidden)


class Causal(Language):
    """An encoder's layers with a mask that hides what comes later."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.body(self.embedding(ids), mask=mask, is_causal=True))


class Padded(Language):
    """An encoder's layers that are told of padding."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.body(self.embedding(ids), src_key_padding_mask=ids == 0))


class LengthFirst(Language):
    """Layers that want the sequence's dimension first."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        hidden = self.body(self.embedding(ids).transpose(0, 1))
        return self.head((hidden[0] if isinstance(hidden, tuple) else hidden).transpose(0, 1))


class Translation(nn.Module):
    """Two sequences of ids through `torch.nn.Transformer`."""

    def __init__(self, **settings: Any):
        super().__init__()
        self.source, self.target = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        layers = {"num_encoder_layers": DEPTH, "num_decoder_layers": DEPTH}
        self.transformer = nn.Transformer(**_SMALL, **layers, batch_first=True, **settings)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Logits of the target."""
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        return self.head(self.transformer(self.source(src), self.target(tgt), tgt_mask=mask, tgt_is_causal=True))


class Decoding(nn.Module):
    """A decoder's layers that look at numbers."""

    def __init__(self, norm_first: bool):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerDecoderLayer(**_SMALL, batch_first=True, norm_first=norm_first)
        self.decoder = nn.TransformerDecoder(layer, DEPTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor, memory: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.decoder(self.embedding(ids), memory))


class Recurrent(nn.Module):
    """One-layer recurrences with a residual stream, in a list."""

    def __init__(self, kind: Callable[..., nn.Module], **settings: Any):
        super().__init__()
        width = WIDTH // 2 if settings.get("bidirectional") else WIDTH
        self.layers = nn.ModuleList(kind(WIDTH, width, batch_first=True, **settings) for _ in range(DEPTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(DEPTH))

    def forward(self, hidden: Tensor) -> Tensor:
        """Of the same shape."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            hidden = hidden + norm(layer(hidden)[0])
        return hidden


class Cells(nn.Module):
    """Cells that are stepped by hand."""

    def __init__(self, kind: Callable[..., nn.Module]):
        super().__init__()
        self.cells = nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, hidden: Tensor) -> Tensor:
        """Of the same shape."""
        for cell in self.cells:
            state, steps = None, []
            for place in range(hidden.shape[1]):
                state = cell(hidden[:, place], state)
                steps.append(state[0] if isinstance(state, tuple) else state)
            hidden = torch.stack(steps, 1)
        return hidden


class Attending(nn.Module):
    """Residual attention, in a list, with the weights that it gives back."""

    def __init__(self, **settings: Any):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **settings) for _ in range(DEPTH)
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The stream, and the mean of all weights."""
        weights = []
        for layer in self.layers:
            out, weight = layer(hidden, hidden, hidden)
            hidden = hidden + out
            weights.append(weight)
        return hidden, torch.stack(weights).mean(0)


def _encoder(**settings: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(**{**_SMALL, "batch_first": True, **settings})
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)


def _mlp(act: Callable[[], nn.Module]) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(DEPTH):
        parts += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), act()]
    return nn.Sequential(*parts)


def _convolutions(conv: Any, norm: Any, act: Callable[[], nn.Module]) -> nn.Module:
    parts: list[nn.Module] = []
    for place in range(DEPTH):
        parts += [conv(8 if place else 3, 8, 3, padding=1), norm(8), act()]
    return nn.Sequential(*parts)


_MAKERS: dict[str, Callable[[], nn.Module]] = {
    "TransformerEncoder": lambda: Language(_encoder()),
    "TransformerEncoder.norm_first": lambda: Language(_encoder(norm_first=True)),
    "TransformerEncoder.gelu": lambda: Language(_encoder(activation="gelu")),
    "TransformerEncoder.no_bias": lambda: Language(_encoder(bias=False)),
    "TransformerEncoder.causal": lambda: Causal(_encoder()),
    "TransformerEncoder.padding": lambda: Padded(_encoder()),
    "TransformerEncoder.length_first": lambda: LengthFirst(_encoder(batch_first=False)),
    "Transformer": Translation,
    "Transformer.norm_first": lambda: Translation(norm_first=True),
    "TransformerDecoder": lambda: Decoding(False),
    "TransformerDecoder.norm_first": lambda: Decoding(True),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "LSTM.bidirectional": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "LSTM.two_layers": lambda: Recurrent(nn.LSTM, num_layers=2),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
    "LSTM.length_first": lambda: LengthFirst(
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)], nn.LSTM(WIDTH, WIDTH))
    ),
    "LSTMCell": lambda: Cells(nn.LSTMCell),
    "GRUCell": lambda: Cells(nn.GRUCell),
    "MultiheadAttention": Attending,
    "MultiheadAttention.add_bias_kv": lambda: Attending(add_bias_kv=True, add_zero_attn=True),
    "Sequential.mlp": lambda: _mlp(nn.GELU),
    "Sequential.in_place": lambda: _mlp(lambda: nn.ReLU(inplace=True)),
    "Sequential.conv1d": lambda: _convolutions(nn.Conv1d, nn.BatchNorm1d, nn.ReLU),
    "Sequential.conv2d": lambda: _convolutions(nn.Conv2d, nn.BatchNorm2d, lambda: nn.ReLU(inplace=True)),
    "Sequential.conv3d": lambda: _convolutions(nn.Conv3d, nn.InstanceNorm3d, nn.SiLU),
    "Sequential.deconv2d": lambda: _convolutions(nn.ConvTranspose2d, nn.BatchNorm2d, nn.PReLU),
}


def models() -> Iterator[Foreign]:
    """All of them."""
    for name, make in _MAKERS.items():
        yield Foreign(f"{LIBRARY}.{name}", lambda make=make: [make], _batches)  # type: ignore[misc]


def _batches(model: nn.Module) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(TOKENS, (SAMPLES, LENGTH), generator=generator)
    numbers = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator)
    if isinstance(model, Translation):
        yield {"src": ids, "tgt": ids.flip(0)}
    elif isinstance(model, Decoding):
        yield {"ids": ids, "memory": numbers}
    elif isinstance(model, Language):
        yield {"ids": ids}
    elif isinstance(model, Recurrent | Cells | Attending):
        yield {"hidden": numbers}
    else:
        yield {"input": numbers}
        for dimensions in (1, 2, 3):
            yield {"input": torch.randn(SAMPLES, 3, *[6] * dimensions, generator=generator)}
