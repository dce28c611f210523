"""Choose the subcommand, run it, print what it says."""

import importlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

from hybridpp.errors import HybridppError

_FAILED = 2  # as argparse, for arguments that it refuses


class Command(Protocol):
    """What the module of a subcommand has."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare its flags."""

    def run(self, arguments: Namespace) -> str:
        """Do it; what is to be printed."""


class _Entry(NamedTuple):
    module: str
    help: str


# A module is loaded when its command is chosen: `hybridpp --help` needs no torch.
_COMMANDS = {
    "partition": _Entry("hybridpp.cli.partition", "show how a model would be cut into pipeline stages"),
    "schedule": _Entry("hybridpp.cli.schedule", "print, draw, check and compare pipeline schedules"),
    "simulate": _Entry("hybridpp.cli.simulate", "tell how long a step would take, from what its stages cost"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``hybridpp`` with these arguments (None: those of the process); the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = ArgumentParser(prog="hybridpp", description="Hybrid-parallel training for PyTorch.")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    chosen: dict[str, Command] = {}
    for name, entry in _COMMANDS.items():
        subparser = subparsers.add_parser(name, help=entry.help, description=f"{entry.help.capitalize()}.")
        if name in given[:1]:
            chosen[name] = cast(Command, importlib.import_module(entry.module))
            chosen[name].add_arguments(subparser)
    parsed = parser.parse_args(given)
    try:
        text = chosen[parsed.command].run(parsed)
    except HybridppError as error:
        sys.stderr.write(f"hybridpp: {' '.join(str(error).split())}\n")
        return _FAILED
    sys.stdout.write(f"{text}\n")
    return 0
