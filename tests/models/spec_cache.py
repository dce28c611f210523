"""Specimens that were built before: most of a sweep's time goes into finding a batch that a model runs on."""

import copy
import pickle
from pathlib import Path

import torch
from models.zoo import Buildable, DoesNotBuild, Specimen, plain_step


def built(architecture: Buildable, folder: Path) -> Specimen:
    """The specimen of an architecture, from the folder if it is there; else it is built, and kept there.

    Raises:
        DoesNotBuild: as when it was first tried.
    """
    file = folder / f"{architecture.name}.pt"
    kept = torch.load(file, weights_only=False) if file.exists() else None
    if kept is None or (isinstance(kept, Specimen) and not _runs(kept)):
        kept = _build(architecture)
        _keep(kept, file)
    if isinstance(kept, Specimen):
        return kept
    raise DoesNotBuild(kept)


def _runs(specimen: Specimen) -> bool:
    """Whether nothing that the model needs was lost on the way through a file."""
    try:
        plain_step(copy.deepcopy(specimen.model), specimen.batch, 1)
    except Exception:
        return False
    return True


def _build(architecture: Buildable) -> Specimen | str:
    try:
        return architecture.build()
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
