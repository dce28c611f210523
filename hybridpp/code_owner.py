"""Whose code a file is: decided by the folders of installed packages and of the standard library."""

import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path

OWN_PACKAGES = ("hybridpp", "hybridpp_plugins")


class CodeOwner(StrEnum):
    """Whose code it is; the value is what messages call it."""

    HYBRIDPP = "hybridpp"
    TORCH = "torch"
    STANDARD_LIBRARY = "the standard library"
    PACKAGE = "other packages"
    USER = "the script"


@cache
def code_owner(filename: str, function: str = "") -> CodeOwner:
    """Whose code is in a file.

    What the folders are called does not count: a script may lie in a clone of this project, or in a folder named after
    a package. Packages that are installed in place are the user's, but for this one and torch.

    Args:
        filename: of a code object (``frame.f_code.co_filename``); what is typed (``<stdin>``, a cell of a notebook) is
            the user's.
        function: the code object's name, which tells the generated methods of dataclasses from ``python -c``.
    """
    if filename.startswith("<"):
        is_generated = filename.startswith("<frozen ") or (filename == "<string>" and function.startswith("__"))
        return CodeOwner.STANDARD_LIBRARY if is_generated else CodeOwner.USER
    for path in dict.fromkeys((os.path.abspath(filename), os.path.realpath(filename))):
        for folder, owner in _folders():
            if path.startswith(folder):
                return owner
    return CodeOwner.USER


def is_own_module(name: object) -> bool:
    """Whether a module or class with this ``__module__`` or ``__name__`` is of this library's packages.

    Example:
        >>> is_own_module("hybridpp.config.base"), is_own_module("hybridpp_experiments.models"), is_own_module(None)
        (True, False, False)
    """
    return str(name).partition(".")[0] in OWN_PACKAGES


def is_library_module(name: object) -> bool:
    """Whether one with this name is of this library or of torch: neither the script's, nor of a library of models."""
    return str(name).partition(".")[0] in (*OWN_PACKAGES, "torch")


@cache
def _folders() -> tuple[tuple[str, CodeOwner], ...]:
    """The folders of each owner, with a separator at the end; inner ones before those that they lie in."""
    found: dict[str, CodeOwner] = {}
    for name, owner in (*((name, CodeOwner.HYBRIDPP) for name in OWN_PACKAGES), ("torch", CodeOwner.TORCH)):
        found |= dict.fromkeys(_of_package(name), owner)
    paths = sysconfig.get_paths()
    packages = [paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()]
    for folders, owner in (
        (packages, CodeOwner.PACKAGE),
        ([paths["stdlib"], paths["platstdlib"]], CodeOwner.STANDARD_LIBRARY),
    ):
        for folder in folders:
            found.setdefault(os.path.abspath(folder), owner)
            found.setdefault(os.path.realpath(folder), owner)
    inner_first = sorted(found, key=len, reverse=True)
    return tuple((folder.rstrip(os.sep) + os.sep, found[folder]) for folder in inner_first)


def _of_package(name: str) -> Iterator[str]:
    """The folders of a package that is imported or can be."""
    if name in sys.modules:
        folders = list(getattr(sys.modules[name], "__path__", ()))
    else:
        spec = find_spec(name)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if name == OWN_PACKAGES[0]:
        folders.append(str(Path(__file__).parent))
    for folder in folders:
        yield os.path.abspath(folder)
        yield os.path.realpath(folder)
