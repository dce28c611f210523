"""One rule that makes any transformers configuration tiny, from the names and values of its fields alone."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

HEADS, HEAD_WIDTH, VOCAB, POSITIONS, IMAGE, PATCH, LAYERS = 4, 16, 160, 128, 32, 8, 4
# Token ids below this stay; larger ones are numbered from here, so that they stay distinct inside the tiny vocabulary.
_FIRST_SPECIAL = 100

# Set aside: attributes of every configuration that say nothing of a size.
_COMMON = {field.name for field in dataclasses.fields(PreTrainedConfig)}

_ZEROED = re.compile(r"drop|stochastic_depth|noise|jitter|mask_(time|feature)_prob")
_SWITCHED_OFF = {"use_cache", "apply_spec_augment", "router_jitter_noise"}
_TOKEN = re.compile(r"token_(id|index)$|_token$|_id$|_ids$")
_LAYERS = re.compile(r"(^|_)(n_layers?|layers?|depths?|num_blocks|num_(\w+_)?(layers|blocks))$")
_STACKS = {"num_hidden_layers", "encoder_layers", "decoder_layers"}
_NOT_LAYERS = re.compile(r"conv|feat_extract|predict|shared")
_POSITIONS = re.compile(r"position|max_len|seq_len|context_len|n_ctx|max_source|max_target|max_seq")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How hard to shrink.

    Attributes:
        proportional: widths keep their ratios; else all of one kind become equal.
        widths: whether widths and heads shrink at all.
        image: side of the images.
        num_heads: of an attention.
        head_width: of one of them.
        num_layers: of a stack.
    """

    proportional: bool = False
    widths: bool = True
    image: int = IMAGE
    num_heads: int = HEADS
    head_width: int = HEAD_WIDTH
    num_layers: int = LAYERS

    @property
    def width(self) -> int:
        """Of the stream between blocks."""
        return self.num_heads * self.head_width


RECIPES = (
    Recipe(),
    Recipe(proportional=True),
    Recipe(image=2 * IMAGE),
    Recipe(proportional=True, image=2 * IMAGE),
    Recipe(num_heads=2, head_width=64),
    Recipe(num_heads=2, head_width=128),
    Recipe(widths=False, image=2 * IMAGE),
    Recipe(widths=False, image=0),
)
"""Tried in order, until a model can be built and run."""


def tiny(default: PreTrainedConfig, recipe: Recipe) -> PreTrainedConfig:
    """A configuration of the same class with few, narrow layers and no randomness."""
    ids = sorted({v for v in _token_ids(default) if v >= _FIRST_SPECIAL})
    return _Shrinker(recipe, {v: _FIRST_SPECIAL + n for n, v in enumerate(ids)}).config(default)


def fields(config: PreTrainedConfig) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and declared default of each field that the configuration's class adds."""
    for field in dataclasses.fields(config):
        if field.name not in _COMMON and field.init:
            declared = None if field.default is dataclasses.MISSING else field.default
            try:
                value = getattr(config, field.name, None)
            except Exception:  # one value per layer: there is no access to the common one but this
                value = vars(config).get(field.name)
            yield field.name, value, declared


def walk(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and everything nested in it."""
    yield config
    for _, value, _ in fields(config):
        if isinstance(value, PreTrainedConfig):
            yield from walk(value)


def _token_ids(config: PreTrainedConfig) -> Iterator[int]:
    for part in walk(config):
        for name, value, _ in fields(part):
            if _TOKEN.search(name):
                yield from (v for v in (value if isinstance(value, list | tuple) else [value]) if _is_int(v))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Shrinker:
    def __init__(self, recipe: Recipe, ids: dict[int, int]):
        self._recipe = recipe
        self._ids = ids

    def config(self, default: PreTrainedConfig) -> PreTrainedConfig:
        plain = _default_of(type(default))
        old_layers = _number_of_layers(default)
        meanings = {own: meaning for meaning, own in type(default).attribute_map.items()}
        self._hidden = _hidden(default)
        # Sizes that some classes leave to the checkpoint.
        filled = {"head_dim": self._recipe.head_width, "vocab_size": VOCAB, "num_experts_per_tok": 2}
        changed: dict[str, Any] = {}
        for name, value, declared in fields(default):
            if isinstance(value, PreTrainedConfig):
                changed[name] = value
            elif value is None and name in filled:
                changed[name] = filled[name]
            elif declared is None and (value is None or (plain is not None and getattr(plain, name, None) == value)):
                continue  # derived from others
            else:
                changed[name] = self._value(meanings.get(name, name), value, self._recipe.num_layers, old_layers)
        self._match_expansion(default, changed)
        hidden = self._hidden
        for name, value in changed.items():
            if isinstance(value, PreTrainedConfig):
                changed[name] = self.config(value)
                self._hidden = hidden
        return type(default)(**changed, **_kept(default))

    def _match_expansion(self, default: PreTrainedConfig, changed: dict[str, Any]) -> None:
        """State-space mixers have as many heads as the expanded stream is wide."""
        expand = next((value for name, value, _ in fields(default) if name.endswith("expand")), None)
        heads = next((name for name in changed if re.search(r"(mamba|ssm)\w*heads$", name)), "num_heads")
        width = next((changed[name] for name in changed if re.search(r"(mamba|ssm)\w*(d_head|head_?dim)$", name)), None)
        width = width or changed.get("head_dim")
        if _is_int(expand) and heads in changed and _is_int(width):
            changed[heads] = expand * changed.get("hidden_size", self._recipe.width) // width

    def _value(self, name: str, value: Any, layers: int, old_layers: int) -> Any:
        if isinstance(value, bool):
            return False if name in _SWITCHED_OFF else value
        if isinstance(value, float):
            return 0.0 if _ZEROED.search(name) else value
        if isinstance(value, int):
            return self._int(name, value, layers)
        if isinstance(value, list | tuple) and value:
            items = list(value)
            if re.search(r"layers$|ind(ices|exes)$|idxs?$", name) and all(map(_is_int, items)) and len(items) > 1:
                if items == sorted(items) and max(items) >= layers:
                    items = [item for item in items if item < layers] or [layers - 1]
                return type(value)(items)
            if len(items) == old_layers and len(items) > layers:
                items = items[:layers]
            per_stage = max(1, layers // 2) if _LAYERS.search(name) else layers
            return type(value)(self._value(name, item, per_stage, old_layers) for item in items)
        if isinstance(value, dict):
            return {key: self._entry(str(key), item) for key, item in value.items()}
        return value

    def _entry(self, name: str, value: Any) -> Any:
        """Of a dictionary, as those that describe rotary positions."""
        if name.endswith("_section") and isinstance(value, list) and self._recipe.widths:
            half = self._recipe.head_width // 2
            unit = half / sum(value)
            sizes = [max(1, int(size * unit)) for size in value]
            sizes[0] += half - sum(sizes)
            return sizes
        if name.endswith("_factor") and isinstance(value, list) and self._recipe.widths:
            return value[: self._recipe.head_width // 2]
        if isinstance(value, dict):
            return {key: self._entry(str(key), item) for key, item in value.items()}
        return value

    def _int(self, name: str, value: int, layers: int) -> int:
        if _ZEROED.search(name):
            return 0
        if _TOKEN.search(name):
            return self._ids.get(value, value)
        if "vocab" in name or name == "num_embeddings":
            return min(value, VOCAB)
        if name == "codebook_size":
            return min(value, 128)
        if _LAYERS.search(name) and not _NOT_LAYERS.search(name):
            return layers if name in _STACKS else min(value, layers)
        if _POSITIONS.search(name):
            return min(value, POSITIONS)
        if re.search(r"(image|img|input|crop)_size$|image_(height|width)$", name):
            return min(value, self._recipe.image) if self._recipe.image else value
        if name == "window_size":
            return min(value, 2)
        if "patch" in name and "size" in name and "temporal" not in name:
            return PATCH if value > PATCH else value
        if re.search(r"expert", name):
            return self._experts(name, value)
        if name in {"n_group", "topk_group", "n_groups"} or name.startswith("first_k_dense"):
            return min(value, 1)
        if re.search(r"sliding_window|chunk|block_size|attention_window|local_window|bucket_size", name):
            return min(value, 8) if not value % 8 else value
        return self._width(name, value) if self._recipe.widths else value

    def _experts(self, name: str, value: int) -> int:
        if re.search(r"per_tok|top_?k|selected", name):
            return min(value, 2)
        if re.search(r"size|dim", name):
            return self._width("intermediate_size", value)
        return min(value, 1 if "shared" in name else 4)

    def _width(self, name: str, value: int) -> int:
        if re.search(r"heads?$|n_head_kv", name) and not re.search(r"dim|size", name):
            if re.search(r"key_value|kv|query_groups", name):
                return min(value, 2)
            return self._recipe.num_heads if value > 2 else value
        if re.search(r"head_(dim|size|width)|(dim|size)_per_head|dim_head|d_kv|d_head|kv_channels", name):
            return min(value, self._recipe.head_width)
        if not re.search(
            r"hidden|d_model|dim|width|channels|size|intermediate|ffn|rank|features|embe?d|inner|filters|units|proj|"
            r"state|d_ff|pos_feats",
            name,
        ):
            return value
        if re.search(r"kernel|conv_size|window|stride|mel|temporal|spatial|merge|factor|batch|type_", name):
            return value
        if value < 48:
            return value
        if self._recipe.proportional:
            return max(8, round(value * self._recipe.width / max(self._hidden, 1) / 8) * 8)
        width = self._recipe.width
        return 2 * width if re.search(r"intermediate|ffn|inner|d_ff|mlp", name) else width


def _default_of(kind: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    try:
        return kind()
    except Exception:
        return None


def _kept(config: PreTrainedConfig) -> dict[str, Any]:
    """What a model type sets among the attributes that all have."""
    return {"is_encoder_decoder": True} if getattr(config, "is_encoder_decoder", False) else {}


def _number_of_layers(config: PreTrainedConfig) -> int:
    found = getattr(config, "num_hidden_layers", None)
    return found if _is_int(found) else 0


def _hidden(config: PreTrainedConfig) -> int:
    for name in ("hidden_size", "d_model", "embed_dim", "dim"):
        found = getattr(config, name, None)
        if _is_int(found):
            return found
    return HEADS * HEAD_WIDTH
