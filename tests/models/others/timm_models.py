"""One model of every family (source file) of timm, the smallest by its name, with few layers."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from models.batches import Batch
from models.others.recipe import SAMPLES, Attempt, Foreign, first_input, takes
from torch import nn

LIBRARY = "timm"
_SIZES = (32, 64, 128, 224)
# Timm's words for small, the smallest first.
_SMALL = ("test", "zepto", "atto", "femto", "pico", "nano", "xxtiny", "xxt", "xxs", "xtiny", "xs", "xt", "tiny", "mini")
_SMALL += ("t", "small", "s", "light", "lite")
_LAYERS = re.compile(r"^(depths?|layers|num_layers|num_blocks|n_layers|stage\d?_depth|blocks)$")
_TRIED = 3


def models() -> Iterator[Foreign]:
    """Of every family one."""
    timm = _timm()
    for family in timm.list_modules():
        names = sorted(timm.list_models(module=family), key=_by_size)
        if names:
            yield Foreign(f"{LIBRARY}.{family}", partial(_attempts, names[:_TRIED]), _batches)


@cache
def _timm() -> Any:
    with _torchvision():
        import timm.models
    return timm


@contextmanager
def _torchvision() -> Iterator[None]:
    """Inside, what timm imports of torchvision: for files of images, which nothing here reads, and a frozen norm.

    Torchvision needs the build of torch that it was compiled with. Where it is missing, or is for another one, a module
    takes its place while timm is imported, and no longer: transformers looks whether there is a torchvision.
    """
    before = {name for name in sys.modules if name.partition(".")[0] == "torchvision"}
    try:
        import torchvision.ops  # noqa: F401
    except Exception:
        for name in {name for name in sys.modules if name.partition(".")[0] == "torchvision"} - before:
            del sys.modules[name]
    else:
        yield
        return
    names = ("", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional")
    absent = {f"torchvision{name}": _Absent(f"torchvision{name}") for name in names}
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


class _Absent(ModuleType):
    """A module in which every name is a class of its own."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = sys.modules.get(f"{self.__name__}.{name}")
        found = known or _Names(name, (nn.Module,), {})
        setattr(self, name, found)
        return found


class _Names(type):
    """Of classes whose attributes are strings: members of an enumeration, as far as anybody asks."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


def _by_size(name: str) -> tuple[int, int, str]:
    words = [word for word in re.split(r"[_.]", name) if word != "s8"]  # LeViT's stride, no size
    rank = min((_SMALL.index(plain) for word in words if (plain := word.rstrip("0123456789")) in _SMALL), default=99)
    numbers = [int(number) for number in re.findall(r"\d+", words[0])]
    return rank, numbers[0] if numbers else 0, name


def _attempts(names: list[str]) -> Iterator[Attempt]:
    for name in names:
        for size in _SIZES:
            for shallow in (True, False):
                yield partial(_make, name, size, shallow)


def _make(name: str, size: int, shallow: bool) -> nn.Module:
    timm = _timm()
    family = sys.modules[timm.model_entrypoint(name).__module__]
    smaller = partial(_build, family.build_model_with_cfg, size, shallow)
    with mock.patch.object(family, "build_model_with_cfg", smaller):
        model: nn.Module = timm.create_model(name)
    model.made_for = size  # type: ignore[assignment]
    return model


def _build(build: Callable[..., nn.Module], size: int, shallow: bool, kind: Any, *args: Any, **settings: Any) -> Any:
    known = takes(kind) if isinstance(kind, type) else {}
    defaults = {name: p.default for name, p in known.items() if p.default is not p.empty}
    if "img_size" in known:
        settings["img_size"] = size
    for name, value in (defaults | settings).items():
        if shallow and name in known and _LAYERS.search(name):
            settings[name] = _fewer(value)
    return build(kind, *args, **settings)


def _fewer(value: Any, most: int = 4) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_fewer(item, 2 if len(value) > 1 else most) for item in value)
    return min(value, most) if type(value) is int else value


def _batches(model: nn.Module) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    size: Any = model.made_for
    yield {first_input(model): torch.randn(SAMPLES, 3, size, size, generator=generator)}
