"""A batch for a model of transformers or diffusers, made from its configuration."""

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError

_DEFAULT_LENGTH = 128
_TEXT = "input_ids"
# Sides of images, in pixels, where the configuration does not fix them.
_IMAGE_SIDE = 448
# What a model may take beside its main input, by the arguments that hold it.
_MODALITIES = {
    "images": ("pixel_values",),
    "videos": ("pixel_values_videos",),
    "sound": ("input_features", "input_values"),
}


def make_samples(
    model: nn.Module, batch_size: int, sequence_length: int | None, dtype: torch.dtype, images: int = 1
) -> list[dict[str, Tensor]]:
    """Sample batches with the sizes of the model's configuration; all elements of a tensor are equal.

    The first sample has the model's main input only. For a model of text and images, others have both, with as many
    tokens of images as the configuration says, or may say; for a model of videos, one has frames. The caller tries
    which of them the forward runs on: the last ones first, if it wants all that the model takes.

    Args:
        model: of the transformers library, or of diffusers.
        batch_size: number of samples.
        sequence_length: tokens of a text, those of images included; None takes 128 beside images, or as many as the
            model has positions.
        dtype: of images and sound.
        images: of each text; 0: none.

    Raises:
        ConfigError: the inputs of such a model are unknown, or take more memory than there is.
    """
    config = getattr(model, "config", None)
    try:
        if isinstance(config, Mapping):
            return [_denoiser_sample(model, config, batch_size, sequence_length, dtype)]
        maker = _Maker(model, batch_size, sequence_length, dtype)
        return [maker.main(), *(maker.with_images(images) if images else ()), *maker.with_frames()]
    except (RuntimeError, TypeError) as error:  # torch has no type for it
        if not re.search("allocate memory|overflow", str(error), re.IGNORECASE):
            raise
        raise ConfigError(
            f"the batch on which the model is tried needs more memory than this process gets: got {batch_size} samples"
            f"{f' of length {sequence_length}' if sequence_length else ''}. Use fewer samples, or shorter ones."
        ) from error


def has_samples(model: nn.Module) -> bool:
    """Whether batches can be made from a model's configuration: that of transformers, or of diffusers."""
    config = getattr(model, "config", None)
    return hasattr(config, "sub_configs") or isinstance(config, Mapping)


def describe_sample(model: nn.Module, sample: Any, images: int = 0, sequence_length: int | None = None) -> list[str]:
    """What a sample has of images, and what it lacks that the model takes: a line each, for people.

    Args:
        model: of transformers; of others nothing is said.
        sample: of :func:`make_samples`.
        images: that were asked for.
        sequence_length: as given to :func:`make_samples`.
    """
    if not isinstance(sample, dict) or not hasattr(getattr(model, "config", None), "sub_configs"):
        return []
    takes = inspect.signature(model.forward).parameters
    lines = []
    for modality, names in _MODALITIES.items():
        taken = [name for name in names if name in takes]
        if taken and not any(name in sample for name in names) and not (_TEXT not in takes or _has_main(model, names)):
            why, way_out = "", ""
            if modality == "images":
                why, way_out = _why_none(model, images, sequence_length), " (see --images, --sequence-length)"
            names_taken = " and ".join(taken)
            lines.append(
                f"{modality}: none in the sample{why}, so what the model computes of {names_taken} is left out{way_out}"
            )
    texts, token = sample.get(_TEXT), _image_token(model.config)
    limit = _Maker(model, 1, None, torch.float32).named_limit
    if isinstance(texts, Tensor) and limit is not None and texts.shape[1] > limit:
        lines.append(f"tokens: {texts.shape[1]:,} of each sample, and the configuration is for {limit:,}")
    if isinstance(texts, Tensor) and "pixel_values" in sample and token is not None:
        count = int((texts[0] == token).sum())
        lines.append(f"images: {count:,} of {texts.shape[1]:,} tokens of each sample, pixels {_shape_of(sample)}")
    return lines


def _why_none(model: nn.Module, images: int, sequence_length: int | None) -> str:
    """Why a sample has none of the images that were asked for."""
    if not images:
        return ""
    of_each = "the image of each text" if images == 1 else f"the {images:,} images of each text"
    if any("pixel_values" in one for one in make_samples(model, 1, sequence_length, torch.float32, images)[1:]):
        return f" (the model does not run on {of_each} that were made from its configuration)"
    return f" (the tokens of {of_each} leave no room for text)"


def _has_main(model: nn.Module, names: tuple[str, ...]) -> bool:
    return getattr(model, "main_input_name", _TEXT) in names


def _shape_of(sample: Mapping[str, Tensor]) -> str:
    return " x ".join(map(str, sample["pixel_values"].shape))


def _image_token(config: Any) -> int | None:
    found = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((token for token in found if isinstance(token, int)), None)


class _Maker:
    def __init__(self, model: nn.Module, batch_size: int, length: int | None, dtype: torch.dtype):
        self._main = getattr(model, "main_input_name", _TEXT)
        self._takes = set(inspect.signature(model.forward).parameters)
        self._submodules = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        self._config: Any = model.config
        self._batch_size = batch_size
        self._dtype = dtype
        names = ("max_position_embeddings", "n_positions", "max_target_positions")
        # Of a model with relative positions, XLNet, the configuration says -1.
        named = self._number(*names, default=0)
        self.named_limit = named if named > 0 else None
        limit = self.named_limit or _DEFAULT_LENGTH
        self._given_length, self._limit = length, limit
        self._length = length or min(_DEFAULT_LENGTH, limit)
        if _TEXT in self._takes and self._length > limit and _has_learned_positions(model, limit):
            raise ConfigError(
                f"{type(model).__name__} has {limit:,} learned positions: got a sequence_length of {length:,}. Use at "
                f"most {limit:,}."
            )

    def main(self) -> dict[str, Tensor]:
        kinds = {
            _TEXT: self._text,
            "pixel_values": self._image,
            "pixel_values_videos": self._video,
            "input_features": self._spectrum,
            "input_values": self._sound,
        }
        # If there are several inputs, only the text.
        named = (_TEXT, self._main, *kinds)
        name = next((name for name in named if name in self._takes), self._main)
        if name not in kinds:
            raise ConfigError(
                f"no sample can be generated for a model whose main input is {name!r}: only {', '.join(kinds)} are "
                "supported. Pass a sample to boost."
            )
        batch = {name: kinds[name]()}
        if name == _TEXT and "attention_mask" in self._takes:
            batch["attention_mask"] = torch.ones_like(batch[_TEXT])
        if "decoder_input_ids" in self._takes:
            batch["decoder_input_ids"] = self._text()
        return batch

    def with_images(self, images: int) -> Iterator[dict[str, Tensor]]:
        """Texts with images, the likeliest last: as many tokens of an image as the configuration may mean."""
        if not {_TEXT, "pixel_values"} <= self._takes:
            return
        token = _image_token(self._config)
        if token is None:
            yield {**self.main(), "pixel_values": self._image()}
            return
        for pixels, tokens, more in reversed(list(self._pixels(images))):
            if self._given_length is not None and tokens >= self._given_length:
                continue
            batch = self.main()
            length = self._given_length or min(tokens + self._length, max(self._limit, tokens + 1))
            text = self._text(length)
            text[:, :tokens] = token
            batch |= {_TEXT: text, "pixel_values": pixels, **more}
            if "attention_mask" in batch:
                batch["attention_mask"] = torch.ones_like(text)
            for name in {"token_type_ids", "mm_token_type_ids"} & self._takes:
                batch[name] = (text == token).long()
            yield batch

    def _pixels(self, images: int) -> Iterator[tuple[Tensor, int, dict[str, Tensor]]]:
        """Pixels of all samples, the tokens of each sample, and what goes with them; the likeliest first."""
        count = self._batch_size * images
        patch = self._number("patch_size", default=16)
        merged = self._merged()
        if "image_grid_thw" in self._takes:
            # Patches of all images in a row, whose sides are whole numbers of tokens.
            most = max(1, math.isqrt((self._given_length or 2 * self._length + 512) // (2 * images)))
            side = int(merged) * min(most, max(1, _IMAGE_SIDE // (patch * int(merged))))
            width = self._number("in_channels", "in_chans", "num_channels", default=3)
            width *= self._number("temporal_patch_size", default=1) * patch**2
            grids = torch.tensor([[1, side, side]]).repeat(count, 1)
            pixels = torch.ones(count * side**2, width, dtype=self._dtype)
            yield pixels, images * int(side // merged) ** 2, {"image_grid_thw": grids}
            return
        height, width = self._sides()
        channels = self._number("num_channels", "in_channels", "in_chans", default=3)
        # Of ones: models drop images of zeros, which pad.
        pixels = torch.ones(count, channels, height, width, dtype=self._dtype)
        sizes = {"image_sizes": torch.tensor([[height, width]]).repeat(count, 1)}
        patches = (height // patch) * (width // patch)
        known = ("mm_tokens_per_image", "vision_soft_tokens_per_image", "image_seq_length", "num_image_tokens")
        for tokens in dict.fromkeys([self._find(*known), round(patches / merged**2), patches, patches + 1]):
            for more in ({}, sizes) if "image_sizes" in self._takes else ({},):
                if tokens:
                    yield pixels, images * int(tokens), more
                    yield pixels.view(self._batch_size, images, *pixels.shape[1:]), images * int(tokens), more

    def _merged(self) -> float:
        """The patches along each side of an image that become one token."""
        side = self._find("spatial_merge_size", "scale_factor", "downsample_factor")
        share = self._find("downsample_ratio", "pixel_shuffle_ratio")
        return float(side or (1 / share if share else 1))

    def with_frames(self) -> list[dict[str, Tensor]]:
        """Videos, if their input has the name of images."""
        frames = self._find("num_frames", "frames_per_clip") if "pixel_values" in self._takes else None
        return [{"pixel_values": self._video()}] if frames else []

    def _text(self, length: int | None = None) -> Tensor:
        # Without padding and special tokens, which many vocabularies begin with.
        return torch.full((self._batch_size, length or self._length), 3)

    def _image(self) -> Tensor:
        return self._zeros(self._number("num_channels", "in_channels", "in_chans", default=3), *self._sides())

    def _video(self) -> Tensor:
        frames = self._number("num_frames", "frames_per_clip", default=16)
        return self._zeros(frames, self._number("num_channels", "in_channels", default=3), *self._sides())

    def _sides(self) -> tuple[int, int]:
        size = self._find("image_size", "img_size", "input_size") or 224
        if isinstance(size, Mapping):
            size = list(size.values())
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return height, width

    def _spectrum(self) -> Tensor:
        bins = self._number("num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
        frames = 2 * self._number("max_source_positions", default=512)
        # Convolutions over time need the bins first.
        return self._zeros(bins, frames) if "conv1" in self._submodules else self._zeros(frames, bins)

    def _sound(self) -> Tensor:
        if self._find("num_mel_bins"):
            return self._zeros(self._number("max_length", default=1024), self._number("num_mel_bins", default=128))
        return self._zeros(16000)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(self._batch_size, *shape, dtype=self._dtype)

    def _find(self, *names: str) -> Any:
        """The first of these settings that the configuration, or one nested in it, has."""
        nested = [getattr(self._config, name, None) for name in self._config.sub_configs]
        values = (getattr(part, name, None) for part in (self._config, *nested) for name in names)
        return next((value for value in values if value), None)

    def _number(self, *names: str, default: int) -> int:
        found = self._find(*names) or default
        return int(found[0] if isinstance(found, list | tuple) else found)


def _has_learned_positions(model: nn.Module, count: int) -> bool:
    """Whether a model looks up so many positions in a table, to which some add a row or two for padding."""
    return any(
        isinstance(module, nn.Embedding)
        and any(part in name.rpartition(".")[2] for part in ("pos", "wpe"))
        and count <= module.num_embeddings <= count + 2
        for name, module in model.named_modules()
    )


# Arguments of diffusers' models that are as wide as a setting of theirs says.
_WIDTHS = {
    "encoder_hidden_states": (
        *("joint_attention_dim", "cross_attention_dim", "caption_channels", "text_embed_dim", "text_dim"),
        "caption_projection_dim",
    ),
    "pooled_projections": ("pooled_projection_dim",),
}
# Tokens of a prompt at most, and of an image of 1024 x 1024 pixels.
_PROMPT, _IMAGE_TOKENS = 512, 4096


def _denoiser_sample(
    model: nn.Module, config: Mapping[str, Any], size: int, length: int | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A batch of latent images, or of their tokens, with prompts, steps of noise and positions, as far as it is taken.

    Raises:
        ConfigError: the model takes no latent images.
    """
    takes = set(inspect.signature(model.forward).parameters)
    latents = next((name for name in ("hidden_states", "sample") if name in takes), None)
    channels = config.get("in_channels")
    if latents is None or not isinstance(channels, int):
        raise ConfigError(
            f"no sample can be generated for {type(model).__name__}: its forward takes no hidden_states or sample of "
            "in_channels channels. Pass sample=batch."
        )
    tokens = length or _IMAGE_TOKENS
    prompt_tokens = min(_PROMPT, tokens)
    sides = config.get("sample_size")
    if "img_ids" in takes or not sides:
        shape: tuple[int, ...] = (tokens, channels)
    else:
        shape = (channels, *(sides if isinstance(sides, list | tuple) else (sides, sides)))
    batch: dict[str, Tensor] = {str(latents): torch.zeros(size, *shape, dtype=dtype)}
    for name, settings in _WIDTHS.items():
        width = next((config[setting] for setting in settings if isinstance(config.get(setting), int)), None)
        if name in takes and width is not None:
            prompt = (prompt_tokens,) if name == "encoder_hidden_states" else ()
            batch[name] = torch.zeros(size, *prompt, width, dtype=dtype)
    if "timestep" in takes:
        batch["timestep"] = torch.ones(size, dtype=dtype)
    if "guidance" in takes and config.get("guidance_embeds"):
        batch["guidance"] = torch.ones(size, dtype=dtype)
    if "class_labels" in takes:
        batch["class_labels"] = torch.zeros(size, dtype=torch.long)
    axes = len(config.get("axes_dims_rope") or (0, 0, 0))
    # All samples share the positions.
    for name, count in (("img_ids", tokens), ("txt_ids", prompt_tokens)):
        if name in takes:
            batch[name] = torch.zeros(count, axes, dtype=dtype)
    return batch
