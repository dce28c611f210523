"""Versions of the packages that a job uses, and the oldest that are tested."""

import importlib
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

OLDEST = {
    "torch": "2.11",
    "transformers": "5.17",
    "datasets": "4.4",
    "accelerate": "1.10",
    "tqdm": "4.66.3",
    "safetensors": "0.8",
    "fsspec": "2025.3",
    "xxhash": "3.5",
    "psutil": "5.9",
    "typer": "0.21.1",
    "rich": "13.7",
    "jinja2": "3.1",
}
"""The lower bounds of ``pyproject.toml``, which a checkout that is not installed does not show."""

_OTHERS = ("hybridpp", "numpy", "torchvision", "peft", "ray", "matplotlib", "tensorboardX")


def package_versions() -> dict[str, str]:
    """The version of Python and of each package that is installed; those that are not are left out."""
    found = {"python": platform.python_version()}
    for name in (*OLDEST, *_OTHERS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__}


def build_versions() -> dict[str, str]:
    """Of what torch was built with: ``cuda``, ``nccl``, ``gloo``; empty text: without."""
    distributed = torch.distributed
    has_nccl = distributed.is_available() and distributed.is_nccl_available()
    has_gloo = distributed.is_available() and distributed.is_gloo_available()
    nccl = torch.cuda.nccl.version() if has_nccl else ()  # type: ignore[no-untyped-call]  # torch
    return {
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, nccl)),
        "gloo": "built in" if has_gloo else "",
    }


def version_numbers(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found.group().split("."))) if found else ()


def is_older(found: str, oldest: str) -> bool:
    """Whether a version lies below a lower bound."""
    return version_numbers(found) < version_numbers(oldest)


def torchvision_error() -> str:
    """Why torchvision cannot be imported, in a line; empty: it can be, or is not there.

    One for another build of torch keeps transformers from importing its models of images.
    """
    if find_spec("torchvision") is None:
        return ""
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # an operator that is missing, a library that cannot be loaded
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""
