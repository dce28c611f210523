"""Images and labels for the ViT example: scikit-learn's digits, a dataset from the hub, or a folder of images."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, load_dataset
from PIL.Image import fromarray
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import BaseImageProcessor

HELD_OUT_NAMES = ("validation", "val", "test")
HELD_OUT_FRACTION = 0.2
SPLIT_SEED = 0  # not --seed: runs that differ in their seed stay comparable


@dataclass(frozen=True, kw_only=True)
class ImageSplits:
    """A training and a held-out split, and where their images and labels are."""

    train: Dataset
    held_out: Dataset
    image_column: str
    label_column: str

    @property
    def label_names(self) -> list[str]:
        return list(self.train.features[self.label_column].names)

    def with_processor(self, processor: BaseImageProcessor) -> tuple[Dataset, Dataset]:
        """Both splits as ``pixel_values`` and ``labels``, made when they are read; training images are shifted."""
        to_inputs = partial(
            images_to_inputs, processor=processor, image_column=self.image_column, label_column=self.label_column
        )
        return self.train.with_transform(partial(to_inputs, augment=True)), self.held_out.with_transform(to_inputs)


def load_splits(name: str, max_samples: int | None = None) -> ImageSplits:
    """The dataset called ``name``: ``digits``, a folder in imagefolder layout, or a dataset on the hub.

    Args:
        name: what to load.
        max_samples: keep at most this many samples of each split; ``None`` keeps all.
    """
    if name == "digits":
        splits = DatasetDict(train=digits())
    elif Path(name).is_dir():
        splits = load_dataset("imagefolder", data_dir=name)
    else:
        splits = load_dataset(name)
    image_column = find_column(splits["train"].features, Image)
    label_column = find_column(splits["train"].features, ClassLabel)
    train, held_out = hold_out(splits, label_column)
    return ImageSplits(
        train=limit(train, max_samples),
        held_out=limit(held_out, max_samples),
        image_column=image_column,
        label_column=label_column,
    )


def digits() -> Dataset:
    """The 1,797 handwritten digits inside scikit-learn: 8 x 8 pixels, gray levels from 0 to 16."""
    raw = load_digits()
    images = [fromarray((pixels * 255 / 16).astype("uint8")) for pixels in raw.images]
    features = Features(image=Image(), label=ClassLabel(names=[str(name) for name in raw.target_names]))
    return Dataset.from_dict({"image": images, "label": raw.target}, features=features)


def find_column(features: Features, kind: type) -> str:
    """The first column whose feature is a ``kind``.

    Raises:
        ValueError: there is none.
    """
    for column, feature in features.items():
        if isinstance(feature, kind):
            return column
    raise ValueError(f"the dataset needs a column of type {kind.__name__}: got {dict(features)}.")


def hold_out(splits: DatasetDict, label_column: str) -> tuple[Dataset, Dataset]:
    """The training split and a held-out one; where the dataset has none, a fifth of every class is cut off for it."""
    for name in HELD_OUT_NAMES:
        if name in splits:
            return splits["train"], splits[name]
    cut = splits["train"].train_test_split(HELD_OUT_FRACTION, stratify_by_column=label_column, seed=SPLIT_SEED)
    return cut["train"], cut["test"]


def limit(dataset: Dataset, max_samples: int | None) -> Dataset:
    """A random choice of ``max_samples`` samples: folders come sorted by class, so the first ones would not do."""
    if max_samples is None or max_samples >= len(dataset):
        return dataset
    return dataset.shuffle(seed=SPLIT_SEED).select(range(max_samples))


def images_to_inputs(
    batch: dict[str, list[Any]],
    processor: BaseImageProcessor,
    image_column: str,
    label_column: str,
    augment: bool = False,
) -> dict[str, Tensor]:
    """What the model takes, from what the dataset holds: ``pixel_values`` of shape ``[B, C, H, W]`` and ``labels``."""
    images = [image.convert("RGB") for image in batch[image_column]]
    pixel_values = processor(images, return_tensors="pt")["pixel_values"]
    return {
        "pixel_values": random_shift(pixel_values) if augment else pixel_values,
        "labels": torch.tensor(batch[label_column]),
    }


def random_shift(pixel_values: Tensor, fraction: float = 1 / 16) -> Tensor:
    """Each image moved by up to ``fraction`` of its size in both directions; its edge is repeated to fill the gap.

    The offsets come from torch's global generator.
    """
    height, width = pixel_values.shape[-2:]
    reach = max(1, round(fraction * height))
    padded = F.pad(pixel_values, (reach, reach, reach, reach), mode="replicate")
    offsets = torch.randint(2 * reach + 1, (len(pixel_values), 2)).tolist()
    return torch.stack(
        [image[:, top : top + height, left : left + width] for image, (top, left) in zip(padded, offsets, strict=True)]
    )
