"""Specimens that were built before: most of a sweep's time goes into finding a batch that a model runs on."""

import pickle
from pathlib import Path

import torch
from models.zoo import Architecture, DoesNotBuild, Specimen, build


def built(architecture: Architecture, folder: Path) -> Specimen:
    """The specimen of an architecture, from the folder if it is there; else it is built, and kept there.

    Raises:
        DoesNotBuild: as when it was first tried.
    """
    file = folder / f"{architecture.name}.pt"
    kept = torch.load(file, weights_only=False) if file.exists() else _build(architecture)
    if not file.exists():
        _keep(kept, file)
    if isinstance(kept, Specimen):
        return kept
    raise DoesNotBuild(kept)


def _build(architecture: Architecture) -> Specimen | str:
    try:
        return build(architecture)
    except DoesNotBuild as error:
        return str(error)


def _keep(kept: Specimen | str, file: Path) -> None:
    unfinished = file.with_suffix(".part")
    try:
        torch.save(kept, unfinished)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):  # some models cannot be written to a file
        unfinished.unlink()
    else:
        unfinished.rename(file)
