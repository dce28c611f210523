"""One rule per kind of input that makes a batch for any transformers model, from its signature and configuration."""

import inspect
from collections.abc import Iterator

import torch
from models.tiny import fields, walk
from torch import Tensor, nn

SAMPLES, TOKENS, TARGETS, FRAMES, WAVE = 4, 16, 8, 128, 4000

Batch = dict[str, Tensor]

_LANGUAGE = {
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
}
_CLASSES = {"IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION"}


def batches(model: nn.Module, task: str) -> Iterator[Batch]:
    """Batches to try: with everything the model takes first, then with its main input alone."""
    maker = _Maker(model, task)
    for tries in (maker.everything, maker.several_images, maker.bins_first, maker.main_input_only):
        try:
            batch = tries()
        except Exception:
            continue  # its parts do not take this kind of input
        if batch:
            yield batch


class _Maker:
    def __init__(self, model: nn.Module, task: str):
        self._model = model
        self._task = task
        self._config = model.config
        parameters = inspect.signature(model.forward).parameters
        self._takes = set(parameters)
        self._required = {
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        self._row = self._bins_first = False
        self._generator = torch.Generator().manual_seed(0)

    def everything(self) -> Batch:
        batch: Batch = {}
        if "input_ids" in self._takes:
            batch["input_ids"] = self._ids(TOKENS)
        batch |= self._image() if self._image_tokens_fit() else {}
        batch |= self._sound()
        if "decoder_input_ids" in self._takes and self._task not in _LANGUAGE:
            batch["decoder_input_ids"] = self._ids(TARGETS)
        if "input_ids" in batch and "pixel_values" in batch:
            batch |= self._placed(batch)
        if "input_ids" in batch and "attention_mask" in self._takes:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][1::2, -2:] = 0
        return batch | self._labels(batch)

    def several_images(self) -> Batch:
        """A sample may hold a row of images."""
        self._row = {"input_ids", "pixel_values"} <= self._takes
        return self.everything() if self._row else {}

    def bins_first(self) -> Batch:
        """Sound may come as frequencies by time."""
        self._row, self._bins_first = False, "input_features" in self._takes
        return self.everything() if self._bins_first else {}

    def main_input_only(self) -> Batch:
        batch: Batch = {}
        main = getattr(self._model, "main_input_name", "input_ids")
        if "input_ids" in self._takes and (main == "input_ids" or "input_ids" in self._required):
            batch["input_ids"] = self._ids(TOKENS)
        elif main in {"pixel_values", "pixel_values_videos"}:
            batch |= self._image()
        else:
            batch |= self._sound()
        return batch | self._labels(batch)

    def _ids(self, length: int) -> Tensor:
        special = {v for part in walk(self._config) for n, v, _ in fields(part) if isinstance(v, int) and "_id" in n}
        vocab = min((v for v in self._all("vocab_size") if v > 8), default=32)
        allowed = torch.tensor([v for v in range(3, vocab) if v not in special])
        return allowed[torch.randint(len(allowed), (SAMPLES, length), generator=self._generator)]

    def _all(self, *names: str) -> list[int]:
        found = [getattr(part, name, None) for part in walk(self._config) for name in names]
        return [value for value in found if isinstance(value, int) and not isinstance(value, bool)]

    def _first(self, default: int, *names: str) -> int:
        for part in walk(self._config):
            for name in names:
                value = getattr(part, name, None)
                value = value[0] if isinstance(value, list | tuple) and value else value
                if isinstance(value, int) and value:
                    return value
        return default

    def _image(self) -> Batch:
        side = self._first(32, "image_size", "img_size", "input_size")
        channels = self._first(3, "num_channels", "in_channels", "num_input_channels", "in_chans")
        image = torch.randn(SAMPLES, channels, side, side, generator=self._generator)
        batch: Batch = {}
        if "pixel_values" in self._takes:
            batch["pixel_values"] = image[:, None] if self._row else image
            if "image_sizes" in self._takes:
                batch["image_sizes"] = torch.full((SAMPLES, 2), side)
            if self._task == "VIDEO_CLASSIFICATION":
                frames = self._first(4, "num_frames", "frames_per_clip")
                batch["pixel_values"] = torch.randn(SAMPLES, frames, channels, side, side, generator=self._generator)
        if "pixel_values_videos" in self._required or self._main("pixel_values_videos"):
            frames = self._first(4, "num_frames", "frames_per_clip")
            batch["pixel_values_videos"] = torch.randn(SAMPLES, frames, channels, side, side, generator=self._generator)
        return batch

    def _main(self, name: str) -> bool:
        return getattr(self._model, "main_input_name", None) == name

    def _image_tokens_fit(self) -> bool:
        # Patches of all images in one row, without a dimension for the samples, cannot be split into micro-batches.
        return not {"image_grid_thw", "image_grid_hws"} & self._takes

    def _sound(self) -> Batch:
        if "input_features" in self._takes:
            bins = self._first(80, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "num_bins")
            frames = 2 * self._first(FRAMES // 2, "max_source_positions")
            shape = (bins, frames) if self._bins_first else (frames, bins)
            batch = {"input_features": torch.randn(SAMPLES, *shape, generator=self._generator)}
            masks = ["input_features_mask", "feature_attention_mask"]
            if "input_ids" not in self._takes and not self._bins_first:
                masks.append("attention_mask")
            return batch | {
                name: torch.ones(SAMPLES, frames, dtype=torch.long) for name in masks if name in self._takes
            }
        if "input_values" in self._takes:
            if self._all("num_mel_bins"):
                shape = (SAMPLES, self._first(FRAMES, "max_length"), self._first(80, "num_mel_bins"))
            elif self._all("audio_channels") or self._all("hop_length"):
                shape = (SAMPLES, self._first(1, "audio_channels"), WAVE)
            else:
                shape = (SAMPLES, WAVE)
            return {"input_values": torch.randn(*shape, generator=self._generator)}
        return {}

    def _placed(self, batch: Batch) -> Batch:
        """Put as many image tokens in front of the text as the model makes of an image."""
        token = next(
            (
                value
                for part in walk(self._config)
                for name in ("image_token_id", "image_token_index", "img_token_id", "media_token_id")
                if isinstance(value := getattr(part, name, None), int)
            ),
            None,
        )
        if token is None or not hasattr(self._model, "get_image_features"):
            return {}
        with torch.no_grad():
            features = self._model.get_image_features(
                **{n: batch[n] for n in ("pixel_values", "image_sizes") if n in batch}
            )
        features = (
            getattr(features, "pooler_output", None) if not isinstance(features, Tensor | list | tuple) else features
        )
        if features is None:
            return {}
        rows = sum(
            part.numel() // part.shape[-1] for part in ([features] if isinstance(features, Tensor) else features)
        )
        images = torch.full((SAMPLES, rows // SAMPLES), token)
        return {"input_ids": torch.cat([batch["input_ids"][:, :1], images, batch["input_ids"][:, 1:]], 1)}

    def _labels(self, batch: Batch) -> Batch:
        if "labels" not in self._takes:
            return {}
        if self._task in _LANGUAGE:
            decodes = "decoder_input_ids" in self._takes
            if decodes or "input_ids" not in batch:
                return {"labels": self._ids(TARGETS)}
            return {"labels": self._ids(batch["input_ids"].shape[1])}
        if self._task == "CTC":
            return {"labels": self._ids(4)}
        if self._task in _CLASSES:
            return {"labels": torch.randint(self._config.num_labels, (SAMPLES,), generator=self._generator)}
        if self._task == "SEMANTIC_SEGMENTATION":
            size = batch["pixel_values"].shape[-2:]
            return {"labels": torch.randint(self._config.num_labels, (SAMPLES, *size), generator=self._generator)}
        return {}
