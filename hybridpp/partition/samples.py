"""A batch for a Hugging Face model, made from its configuration."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.errors import ConfigError

_DEFAULT_LENGTH = 128
_TEXT = "input_ids"


def make_samples(
    model: nn.Module, batch_size: int, sequence_length: int | None, dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """Sample batches with the sizes of the model's configuration; all elements of a tensor are equal.

    The first sample has the model's main input only. For a model of text and images, a second one has both; for a model
    of videos, a second one has frames. The caller tries which of them the forward runs on.

    Args:
        model: of the transformers library.
        batch_size: number of samples.
        sequence_length: tokens of a text; None takes 128, or as many as the model has positions.
        dtype: of images and sound.

    Raises:
        ConfigError: the inputs of such a model are unknown.
    """
    maker = _Maker(model, batch_size, sequence_length, dtype)
    return [maker.main(), *maker.with_image(), *maker.with_frames()]


class _Maker:
    def __init__(self, model: nn.Module, batch_size: int, length: int | None, dtype: torch.dtype):
        self._main = getattr(model, "main_input_name", _TEXT)
        self._takes = set(inspect.signature(model.forward).parameters)
        self._submodules = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        self._config: Any = model.config
        self._batch_size = batch_size
        self._dtype = dtype
        limit = self._number("max_position_embeddings", "n_positions", "max_target_positions", default=_DEFAULT_LENGTH)
        self._length = length or min(_DEFAULT_LENGTH, limit)

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

    def with_image(self) -> list[dict[str, Tensor]]:
        takes_both = {_TEXT, "pixel_values"} <= self._takes
        return [{**self.main(), "pixel_values": self._image()}] if takes_both else []

    def with_frames(self) -> list[dict[str, Tensor]]:
        """Videos, if their input has the name of images."""
        frames = self._find("num_frames", "frames_per_clip") if "pixel_values" in self._takes else None
        return [{"pixel_values": self._video()}] if frames else []

    def _text(self) -> Tensor:
        # Without padding and special tokens, which many vocabularies begin with.
        return torch.full((self._batch_size, self._length), 3)

    def _image(self) -> Tensor:
        return self._zeros(self._number("num_channels", "in_channels", "in_chans", default=3), *self._sides())

    def _video(self) -> Tensor:
        frames = self._number("num_frames", "frames_per_clip", default=16)
        return self._zeros(frames, self._number("num_channels", "in_channels", default=3), *self._sides())

    def _sides(self) -> tuple[int, int]:
        size = self._find("image_size", "img_size", "input_size") or 224
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
        return int(self._find(*names) or default)
