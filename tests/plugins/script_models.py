"""Models, batches and losses of the random scripts, as people write them: a style is one way to write all three."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

WIDTH, VOCABULARY, LENGTH, NUM_CLASSES, NUM_LAYERS = 16, 40, 10, 5, 4
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One way to write the loss: what ``boost`` and ``execute_pipeline`` are given, and what a plain script writes."""

    criterion: Any
    of: Callable[[Any, Any], Tensor]
    adds_up: bool = False
    is_coupled: bool = False


@dataclass(frozen=True, kw_only=True)
class Style:
    """A model, its batches and the losses that go with it.

    Attributes:
        make: the model, with the same weights at each call.
        batch: of so many samples, from a generator.
        call: the plain call of the model with a batch.
        losses: by name.
        is_hub: whether it is a model of transformers, whose forward takes any names.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Any]
    call: Callable[[nn.Module, Any], Any]
    losses: Mapping[str, Loss]
    is_hub: bool = False


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 2 * WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).movedim(-3, 0).transpose(-3, -2)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.out(mixed.transpose(-3, -2).flatten(-2))


class NoisyBlock(Block):
    """A trained change of a weight, put in its place for the call."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional_call(self.up, {"weight": self.up.weight + self.delta}, (self.norm(x),))
        return x + self.down(F.gelu(hidden))


def normed_block() -> nn.Module:
    block = Block()
    parametrizations.weight_norm(block.up)
    return block


class Classifier(nn.Module):
    """``forward(x, mask=None)``: the label of a pair is no mask."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block, num_outputs: int = NUM_CLASSES):
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, num_outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.stem(x)
        if mask is not None:
            x = x * mask
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TwoInputs(Classifier):
    """Takes images and a condition, both required."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(3, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        x = self.stem(x) + self.condition(condition)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.Sequential(
            *(nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(NUM_LAYERS))
        )
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((-2, -1)))


class Towers(nn.Module):
    """Two towers whose outputs are compared over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Classifier(num_outputs=WIDTH), Classifier(num_outputs=WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)], 1)


class Gpt(nn.Module):
    """A language model with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(Attention(), Block()) for _ in range(NUM_LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * math.sqrt(WIDTH)


class GptWithLoss(Gpt):
    """Returns ``(logits, loss)``; its embedding has a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = ScaledEmbedding(VOCABULARY, WIDTH)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = super().forward(ids)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Experts(nn.Module):
    """Each token goes to its best expert; the router's loss is on the balance of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        chosen = F.one_hot(best, 3).to(x.dtype)
        out = sum(
            chosen[..., number, None] * weights[..., number, None] * expert(x)
            for number, expert in enumerate(self.experts)
        )
        balance = 3 * (chosen.flatten(0, -2).mean(0) * weights.flatten(0, -2).mean(0)).sum()
        return x + out, balance


class ExpertGpt(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(NUM_LAYERS))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.tokens(ids)
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        logits = self.head(self.norm(x))
        found = {"logits": logits, "balance": torch.stack(balances).mean()}
        if labels is not None:
            found["loss"] = shifted(logits, labels) + 0.01 * found["balance"]
        return found


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels that count, each compared with the logits before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def masked_mean(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """The usual own function: a loss of each token, times a mask, by the sum of the mask."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (losses * mask).sum() / mask.sum()


def mean_of_samples(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """The mean over samples of the means over their tokens."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def contrast(outputs: Tensor, inputs: Any = None) -> Tensor:
    left, right = outputs.unbind(1)
    return F.cross_entropy(left @ right.T * 5, torch.arange(len(left), device=left.device))


class ModuleLoss(nn.Module):
    def forward(self, logit: Tensor, label: Tensor) -> Tensor:
        return -(logit.log_softmax(-1) * F.one_hot(label, logit.shape[-1])).sum(-1).mean()


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


def _randn(number: int, *shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(number, *shape, generator=generator)


def _classes(number: int, generator: torch.Generator, *, some_missing: bool = False) -> Tensor:
    classes = torch.randint(NUM_CLASSES, (number,), generator=generator)
    if some_missing:
        classes[torch.rand(number, generator=generator) < 0.4] = IGNORED
    return classes


def _ragged(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token numbers from 3 on, and a mask of those that are no padding: at least 3 of each sample."""
    ids = torch.randint(3, VOCABULARY, (number, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (number, 1), generator=generator)
    return ids, torch.arange(LENGTH) < lengths


def _token_batch(number: int, generator: torch.Generator, *, names: tuple[str, ...]) -> dict[str, Tensor]:
    ids, mask = _ragged(number, generator)
    labels = ids.masked_fill(~mask, IGNORED)
    all_of_it = {
        "ids": ids, "input_ids": ids, "labels": labels, "attention_mask": mask.long(), "mask": mask.float(),
        "targets": labels.clamp(min=-1), "next": ids.roll(-1, 1),
    }  # fmt: skip
    return {name: all_of_it[name] for name in names}


def _hub_batch(number: int, generator: torch.Generator, *, few: bool = False) -> dict[str, Tensor]:
    batch = _token_batch(number, generator, names=("input_ids", "attention_mask", "labels"))
    if few:  # of masked language models: a label here and there
        hidden = torch.rand(batch["labels"].shape, generator=generator) < 0.6
        batch["labels"] = batch["labels"].masked_fill(hidden, IGNORED)
        batch["labels"][:, 1] = batch["input_ids"][:, 1]
    return batch


def _tagged(number: int, generator: torch.Generator) -> dict[str, Tensor]:
    batch = _hub_batch(number, generator)
    counts = batch["labels"] != IGNORED
    return {**batch, "labels": (batch["labels"] % NUM_CLASSES).masked_fill(~counts, IGNORED)}


def _by_name(model: nn.Module, batch: Any) -> Any:
    return model(**batch)


def _first(model: nn.Module, batch: Any) -> Any:
    return model(batch[0])


def _pairs(make: Callable[[], nn.Module], *inputs: int, some_missing: bool = False) -> Style:
    def batch(number: int, generator: torch.Generator) -> Any:
        return _randn(number, *inputs, generator=generator), _classes(number, generator, some_missing=some_missing)

    weight = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])

    def total(outputs: Tensor, inputs: Any) -> Tensor:
        return F.cross_entropy(outputs, inputs[1], reduction="sum") / 8

    total.reduction = "sum"  # type: ignore[attr-defined]
    pairs = {
        "torch's": nn.CrossEntropyLoss(),
        "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
        "weighted classes": nn.CrossEntropyLoss(weight=weight),
    }
    losses = {name: Loss(criterion=one, of=lambda o, b, one=one: one(o, b[1])) for name, one in pairs.items()}

    def own(outputs: Tensor, inputs: Any) -> Tensor:
        return F.cross_entropy(outputs, inputs[1])

    losses["own function"] = Loss(criterion=own, of=own)
    losses["sum"] = Loss(criterion=total, of=total, adds_up=True)
    if not some_missing:
        module = ModuleLoss()
        losses["own module"] = Loss(criterion=module, of=lambda o, b: module(o, b[1]))
    return Style(make=partial(_seeded, make), batch=batch, call=_first, losses=losses)


def _regression() -> Style:
    def batch(number: int, generator: torch.Generator) -> Any:
        x = _randn(number, 6, 8, generator=generator)
        mask = (torch.rand(number, 6, generator=generator) < 0.6).float()
        mask[:, 0] = 1
        return {"x": x, "target": _randn(number, 6, 2, generator=generator), "weight": mask}

    def masked(outputs: Tensor, inputs: Any) -> Tensor:
        errors = (outputs - inputs["target"]).square().mean(-1)
        return (errors * inputs["weight"]).sum() / inputs["weight"].sum()

    def elements(outputs: Tensor, inputs: Any) -> Tensor:
        return F.smooth_l1_loss(outputs, inputs["target"])

    def logits(outputs: Tensor, inputs: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, (inputs["target"] > 0).float())

    losses = {name: Loss(criterion=f, of=f) for name, f in (("masked", masked), ("l1", elements), ("bce", logits))}
    return Style(
        make=partial(_seeded, partial(Classifier, num_outputs=2)),
        batch=batch,
        call=lambda model, batch: model(batch["x"]),
        losses=losses,
    )


def _two_inputs() -> Style:
    def batch(number: int, generator: torch.Generator) -> Any:
        parts = _randn(number, 8, generator=generator), _randn(number, 3, generator=generator)
        return *parts, _classes(number, generator)

    one = nn.CrossEntropyLoss()
    return Style(
        make=partial(_seeded, TwoInputs),
        batch=batch,
        call=lambda model, batch: model(*batch[:2]),
        losses={"torch's": Loss(criterion=one, of=lambda o, b: one(o, b[2]))},
    )


def _towers() -> Style:
    def coupled(outputs: Tensor, inputs: Any) -> Tensor:
        return contrast(outputs)

    coupled.coupled = True  # type: ignore[attr-defined]
    return Style(
        make=partial(_seeded, Towers),
        batch=lambda n, g: {"a": _randn(n, 8, generator=g), "b": _randn(n, 8, generator=g)},
        call=_by_name,
        losses={
            "contrast": Loss(criterion=contrast, of=contrast),
            "contrast, coupled": Loss(criterion=coupled, of=coupled, is_coupled=True),
        },
    )


def _own_gpt() -> Style:
    names = ("ids", "labels", "mask", "next")
    of = {
        "shifted": lambda o, b: shifted(o, b["labels"]),
        "masked mean": lambda o, b: masked_mean(o, b["next"], b["mask"]),
        "mean of samples": lambda o, b: mean_of_samples(o, b["next"], b["mask"]),
        "all tokens": lambda o, b: F.cross_entropy(o.flatten(0, 1), b["next"].flatten()),
    }
    return Style(
        make=partial(_seeded, Gpt),
        batch=partial(_token_batch, names=names),
        call=lambda model, batch: model(batch["ids"]),
        losses={name: Loss(criterion=function, of=function) for name, function in of.items()},
    )


def _with_loss(make: Callable[[], nn.Module], names: tuple[str, ...], read: Callable[[Any], Tensor]) -> Style:
    def loss(outputs: Any, inputs: Any) -> Tensor:
        return read(outputs)

    return Style(
        make=partial(_seeded, make),
        batch=partial(_token_batch, names=names),
        call=_by_name,
        losses={"its own": Loss(criterion=loss, of=loss)},
    )


def _hub(make: Callable[[], nn.Module], batch: Callable[[int, torch.Generator], Any] = _hub_batch) -> Style:
    def loss(outputs: Any, inputs: Any) -> Tensor:
        return outputs.loss

    def alone(outputs: Any) -> Tensor:
        return outputs.loss

    return Style(
        make=partial(_seeded, make),
        batch=batch,
        call=_by_name,
        losses={
            "outputs.loss": Loss(criterion=loss, of=loss),
            "outputs.loss, alone": Loss(criterion=alone, of=lambda o, b: alone(o)),
        },
        is_hub=True,
    )


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=NUM_LAYERS, n_head=2,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=NUM_LAYERS,
            num_attention_heads=2, num_key_value_heads=2, use_cache=False,
        )
    )  # fmt: skip


def _bert(kind: Any) -> nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=NUM_LAYERS, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=LENGTH, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        num_labels=NUM_CLASSES,
    )  # fmt: skip
    model: nn.Module = kind(config)
    return model


def _t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0,
            use_cache=False, decoder_start_token_id=0,
        )
    )  # fmt: skip


def _vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            image_size=8, patch_size=4, hidden_size=WIDTH, num_hidden_layers=NUM_LAYERS, num_attention_heads=2,
            intermediate_size=24, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=NUM_CLASSES,
        )
    )  # fmt: skip


def _images(number: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": _randn(number, 3, 8, 8, generator=generator), "labels": _classes(number, generator)}


STYLES: dict[str, Style] = {
    "classifier": _pairs(Classifier, 8),
    "classifier, labels missing": _pairs(Classifier, 8, some_missing=True),
    "noisy weights": _pairs(partial(Classifier, NoisyBlock), 8),
    "weight norm": _pairs(partial(Classifier, normed_block), 8),
    "convolutions": _pairs(ConvNet, 3, 6, 6),
    "regression": _regression(),
    "two inputs": _two_inputs(),
    "towers": _towers(),
    "own gpt": _own_gpt(),
    "gpt with loss": _with_loss(GptWithLoss, ("ids", "targets"), lambda outputs: outputs[1]),
    "experts": _with_loss(ExpertGpt, ("ids", "labels"), lambda outputs: outputs["loss"]),
    "gpt2": _hub(_gpt2),
    "llama": _hub(_llama),
    "bert masked": _hub(partial(_bert, BertForMaskedLM), partial(_hub_batch, few=True)),
    "bert tags": _hub(partial(_bert, BertForTokenClassification), _tagged),
    "t5": _hub(_t5),
    "vit": _hub(_vit, _images),
}
