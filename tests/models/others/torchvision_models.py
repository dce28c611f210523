"""One model of every family (source file) of torchvision: the smallest, with few classes; no detection, whose losses
look for boxes, and nothing quantized."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from models.batches import Batch
from models.others.recipe import SAMPLES, Attempt, Foreign, first_input
from torch import nn

LIBRARY = "torchvision"
_LEFT_OUT = re.compile(r"detection|quantization")
# Of images, of films (frames first), and of two images that follow one another.
_IMAGES: dict[str, tuple[tuple[int, ...], ...]] = {
    "video": ((3, 8, 56, 56), (3, 16, 112, 112), (3, 16, 224, 224)),
    "": ((3, 64, 64), (3, 128, 128), (3, 224, 224), (3, 299, 299)),
}
_TRIED = 2


def models() -> Iterator[Foreign]:
    """Of every family one."""
    from torchvision.models import get_model_builder, list_models

    families: dict[str, list[str]] = {}
    for name in list_models():
        module = get_model_builder(name).__module__
        if not _LEFT_OUT.search(module):
            families.setdefault(module.removeprefix("torchvision.models."), []).append(name)
    for family, names in sorted(families.items()):
        yield Foreign(f"{LIBRARY}.{family}", partial(_attempts, sorted(names, key=_by_size)[:_TRIED]), _batches)


def _by_size(name: str) -> tuple[int, list[int], str]:
    words = ("_0_5", "small", "tiny", "t_", "_t", "_b0", "lite", "_s", "_b", "mobilenet")
    rank = min((place for place, word in enumerate(words) if word in name), default=len(words))
    return rank, [int(number) for number in re.findall(r"\d+", name)], name


def _attempts(names: list[str]) -> Iterator[Attempt]:
    for name in names:
        for settings in ({"num_classes": 10}, {}):
            yield partial(_make, name, settings)


def _make(name: str, settings: dict[str, Any]) -> nn.Module:
    from torchvision.models import get_model, get_model_builder

    if "segmentation" in get_model_builder(name).__module__:
        settings = settings | {"weights_backbone": None}
    model: nn.Module = get_model(name, weights=None, **settings)
    model.family = get_model_builder(name).__module__  # type: ignore[assignment]
    return model


def _batches(model: nn.Module) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    family: Any = model.family
    if "optical_flow" in family:
        yield {f"image{n}": torch.rand(SAMPLES, 3, 128, 128, generator=generator) * 2 - 1 for n in (1, 2)}
        return
    for shape in _IMAGES["video" if "video" in family else ""]:
        yield {first_input(model): torch.randn(SAMPLES, *shape, generator=generator)}


def importable() -> bool:
    """Whether it was compiled for the torch that is here: another one keeps its operators from being loaded."""
    try:
        import torchvision.models  # noqa: F401
    except Exception:
        return False
    return True
