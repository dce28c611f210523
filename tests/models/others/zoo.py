"""Every model of other libraries that is examined."""

import importlib.util
from collections.abc import Iterator
from types import ModuleType

from models.others import (
    diffusers_models,
    monai_models,
    peft_models,
    timm_models,
    torch_models,
    torchvision_models,
    x_models,
)
from models.others.recipe import Foreign

RECIPES: tuple[ModuleType, ...] = (
    torch_models,
    timm_models,
    diffusers_models,
    monai_models,
    x_models,
    peft_models,
    torchvision_models,
)


def everything() -> Iterator[Foreign]:
    """All models of the libraries that are installed."""
    for recipe in RECIPES:
        if is_installed(recipe.LIBRARY):
            yield from recipe.models()


def is_installed(library: str) -> bool:
    """Whether the models of a library can be made here."""
    if library == torchvision_models.LIBRARY:
        return torchvision_models.importable()
    return importlib.util.find_spec(library) is not None


def find(name: str) -> Foreign:
    """The model of that name, of a library that is installed."""
    recipe = next(recipe for recipe in RECIPES if name.partition(".")[0] == recipe.LIBRARY)
    found: Foreign = next(model for model in recipe.models() if model.name == name)
    return found
