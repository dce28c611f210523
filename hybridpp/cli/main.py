"""The entry point ``hybridpp``: look for the packages of the command line, then run it."""

import importlib
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

_NEEDED = ("typer", "rich")
# An older one fails in the middle of the declarations of options.
_OLDEST_TYPER = (0, 21, 1)
_REFUSED = 2
INTERRUPTED = 130
"""The exit code after Ctrl-C, as of a shell."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``hybridpp`` with these arguments (None: those of the process); returns the exit code."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # before a command runs: it takes seconds to import some
        return interrupted()


def interrupted() -> int:
    """Say so; returns the exit code."""
    sys.stderr.write("hybridpp: interrupted (Ctrl-C).\n")
    return INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        # The library works without them, as on a host where it was only copied.
        sys.stderr.write(
            f"hybridpp: the command line needs the packages {' and '.join(_NEEDED)}: {' and '.join(missing)} cannot be "
            f"imported.\nRun {sys.executable} -m pip install {' '.join(missing)}\n"
        )
        return _REFUSED
    found = _version_of("typer")
    if found and tuple(map(int, re.findall(r"\d+", found)[:3])) < _OLDEST_TYPER:
        oldest = ".".join(map(str, _OLDEST_TYPER))
        sys.stderr.write(
            f"hybridpp: the command line needs typer {oldest} or newer: got {found}.\n"
            f"Run {sys.executable} -m pip install --upgrade 'typer>={oldest}'\n"
        )
        return _REFUSED
    app = importlib.import_module("hybridpp.cli.app")
    code: int = app.run(list(sys.argv[1:] if arguments is None else arguments))
    return code


def _version_of(name: str) -> str:
    """Of an installed package; empty: it was only copied here."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
