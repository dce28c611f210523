"""Every model of diffusers, made tiny by the names and defaults of its constructor's parameters.

All widths become one, so that whatever a forward wants of a text or an image has that width.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from models.batches import Batch
from models.others.recipe import SAMPLES, Attempt, Foreign, first_input, takes
from torch import Tensor, nn

LIBRARY = "diffusers"
HEADS, TEXT, SIDE, FRAMES = 4, 6, 8, 5
_FOLDERS = re.compile(r"^(autoencoders|transformers|unets|controlnets|condition_embedders)[./]")
_KEPT = re.compile(
    r"kernel|ratio|stride|factor|groups|theta|scale|rate|freq_shift|multipl|padding|_id$|_ids$|fps|len_|length_|"
    r"num_class_embeds|num_embeds|patch|latents?_(mean|std)|compress|z_(dim|channels)|experts|eps|clip"
)
_LAYERS = re.compile(r"layers?$|blocks$|depths?$|layers_per_block$|num_\w*layers_|layers_\w*block")
_WIDTH = re.compile(r"dim|channels?|hidden|width|size|features|^ch$|inner|embed|model|filters")
_SAMPLE = re.compile(
    r"sample_(size|height|width)|image_size|resolution|^(height|width)$|input_size|pos_embed_max|max_size"
)


@dataclass(frozen=True)
class _Sizes:
    """How wide and deep to make a model.

    Attributes:
        head: width of an attention's head.
        depth: layers of each kind.
        side: of a sample.
        channels: of the first level of those that have several.
        growth: from that to the others.
    """

    head: int = 16
    depth: int = 4
    side: int = SIDE
    channels: int = 16
    growth: int = 2

    @property
    def width(self) -> int:
        """Of everything."""
        return HEADS * self.head


_TRIED = (
    _Sizes(),
    _Sizes(side=4 * SIDE),
    _Sizes(channels=32, depth=2, side=2 * SIDE),
    _Sizes(channels=32, growth=1),
    _Sizes(head=32),
)
# The defaults of these do not fit together.
_FITTING: dict[str, dict[str, Any]] = {
    # What embeds the time is twice as wide as the first level.
    "UNet1DModel": {"block_out_channels": (16, 32, 32), "extra_in_channels": 32},
    "PRXTransformer2DModel": {"axes_dim": [8, 8]},
    "Kandinsky3UNet": {"groups": 8, "block_out_channels": (32, 64, 64, 64)},
    "LuminaNextDiT2DModel": {"num_kv_heads": 2},
    "LatteTransformer3DModel": {"caption_channels": 64, "cross_attention_dim": 64},
    "Transformer2DModel": {"patch_size": None, "norm_num_groups": 4},
    "DualTransformer2DModel": {"norm_num_groups": 4, "cross_attention_dim": 64},
    "UNetMotionModel": {"motion_max_seq_length": 8},
}


def models() -> Iterator[Foreign]:
    """Every class in the library's folders of models."""
    import diffusers.models as library

    for name in sorted(n for file, kinds in library._import_structure.items() if _FOLDERS.match(file) for n in kinds):
        yield Foreign(f"{LIBRARY}.{name}", partial(_attempts, name), _batches)


def _attempts(name: str) -> Iterator[Attempt]:
    import diffusers.models as library

    for sizes in _TRIED:
        yield partial(_make, getattr(library, name), sizes)


def _make(kind: Any, sizes: _Sizes) -> nn.Module:
    settings = {}
    for name, parameter in takes(kind.__init__).items():
        if name != "self":
            value = _smaller(name, parameter.default, sizes)
            if value is not parameter.empty:
                settings[name] = value
    heads = settings.get("attention_head_dim") or settings.get("head_dim") or sizes.head
    for name, value in settings.items():
        if re.search(r"rope_(axes_)?dim|axes_dims?(_rope)?$|rope_dim_list|mrope_section", name) and value:
            settings[name] = type(value)(_shares(heads // (2 if "section" in name else 1), len(value)))
    made: nn.Module = kind(**settings | _FITTING.get(kind.__name__, {}))
    made.made_for = sizes
    return made


def _shares(whole: int, number: int) -> list[int]:
    """Even parts that add up."""
    part = max(2, whole // number // 2 * 2)
    return [whole - (number - 1) * part, *[part] * (number - 1)]


# Where there is no default.
_WANTED: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "latent_channels": 4,
    "layers_per_block": 1,
    "spatial_compression_ratio": 2,
    "sample_size": SIDE,
    "block_out_channels": (16, 32),
}
_DERIVED = {"out_channels"}


def _smaller(name: str, value: Any, sizes: _Sizes) -> Any:
    if value is None:
        return None if name in _DERIVED else _WANTED.get(name)
    if isinstance(value, type):
        return _WANTED.get(name, value)
    if isinstance(value, list | tuple):
        wide = [v for v in value if type(v) is int]
        if len(wide) != len(value) or not value:
            return value
        if "channels" in name or max(wide) >= 64:
            return type(value)([sizes.channels, *[sizes.growth * sizes.channels] * (len(value) - 1)])
        return type(value)(min(v, 2) for v in value) if _LAYERS.search(name) else value
    return _less(name, value, sizes) if type(value) is int else value


def _less(name: str, value: int, sizes: _Sizes) -> int:
    if name.endswith("norm_num_groups"):
        return 8
    if re.search(r"head_dim|dim_head|head_width", name):
        return min(value, sizes.head)
    if re.search(r"text\w*len|num_embeddings", name):
        return TEXT
    if re.search(r"kv_heads|key_value_heads", name):
        return min(value, 2)
    if name.endswith("heads"):
        return min(value, HEADS)
    if _SAMPLE.search(name):
        return min(value, sizes.side)
    if re.search(r"(frames|sample_frames)$", name):
        return min(value, FRAMES)
    if _KEPT.search(name):
        return value
    if _LAYERS.search(name):
        return min(value, 1 if "per_block" in name else sizes.depth)
    if "vocab" in name or "codebook_size" in name:
        return min(value, 128)
    if _WIDTH.search(name) and value >= 48:
        return sizes.width
    if re.search(r"len|max_", name):
        return min(value, 64)
    return value


def _batches(model: nn.Module) -> Iterator[Batch]:
    sizes: Any = model.made_for
    config: Any = model.config
    known = takes(model.forward)
    channels = _channels(config)
    for sample, whole in product(_samples(first_input(model), channels, sizes.side), (True, False)):
        batch: Batch = {}
        for name, parameter in list(known.items())[1:]:
            wanted = parameter.default is parameter.empty
            made = _input(name, sample, sizes, config, whole)
            if made is not None and (wanted or name in _GIVEN):
                batch[name] = made
        yield {first_input(model): sample} | batch


def _channels(config: Any) -> int:
    names = ("in_channels", "embedding_dim", "in_visual_dim", "num_channels", "input_channels", "audio_channels")
    for name in (*names, "channels"):
        value = config.get(name)
        if isinstance(value, int):
            return value
    return 3


def _samples(name: str, channels: int, side: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [
        (channels, side, side),
        (channels, FRAMES, side, side),
        (side * 2, channels),
        (FRAMES, channels, side, side),
        (channels, side * 8),
        (channels,),
        (FRAMES, side, side, channels),
    ]
    for shape in shapes:
        yield torch.randn(SAMPLES, *shape, generator=generator)


# What has a default, and is given nevertheless.
_GIVEN = {
    "timestep",
    "timesteps",
    "guidance",
    "encoder_hidden_states",
    "pooled_projections",
    "pooled_embeds",
    "img_ids",
    "txt_ids",
    "class_labels",
    "encoder_attention_mask",
    "encoder_hidden_states_mask",
    "encoder_hidden_states_t5",
    "text_embedding_mask",
    "text_embedding_mask_t5",
    "image_meta_size",
    "style",
}


def _input(name: str, sample: Tensor, sizes: _Sizes, config: Any, whole: bool) -> Tensor | None:
    """What a forward calls so; numbers of times are whole, or not."""
    generator = torch.Generator().manual_seed(len(name))
    if "timestep" in name or name in {"time", "fps", "t"}:
        times = torch.arange(1, SAMPLES + 1) * 50
        return times if whole else times / 1000
    if "guidance" in name:
        return torch.linspace(1, 2, SAMPLES) if config.get("guidance_embeds") else None
    if name in {"controlnet_cond", "conditioning"}:
        channels, scale = config.get("conditioning_channels"), 8
        return torch.randn(SAMPLES, channels, *[scale * sizes.side] * 2, generator=generator) if channels else sample
    if name == "class_labels":
        return torch.arange(SAMPLES) if config.get("num_embeds_ada_norm") or config.get("num_class_embeds") else None
    if name.endswith("_ids"):
        axes = next((len(v) for n, v in config.items() if "axes_dim" in n and isinstance(v, list | tuple)), 3)
        length = sample.shape[1] if "img" in name else TEXT
        return torch.arange(float(length))[None, :, None].expand(SAMPLES, length, axes).clone()
    if "mask" in name and name != "padding_mask":
        return torch.ones(SAMPLES, TEXT, dtype=torch.bool if not whole else torch.long)
    if name == "style":
        return torch.zeros(SAMPLES, dtype=torch.long)
    if name == "image_meta_size":
        return torch.full((SAMPLES, 6), float(sizes.side))
    if re.search(r"size|coords", name):
        return torch.full((SAMPLES, 2), sizes.side)
    if re.search(r"pooled|^text_embeds$|proj_embedding|clip_text", name):
        return torch.randn(SAMPLES, sizes.width, generator=generator)
    if re.search(r"hidden_states|image_embeds|text|caption|embeddings", name):
        return torch.randn(SAMPLES, TEXT, sizes.width, generator=generator)
    if re.search(r"cond|latents|image", name):
        return torch.randn(sample.shape, generator=generator)
    return None
