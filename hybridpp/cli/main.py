"""Choose the subcommand, run it, print its output."""

import importlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

from hybridpp.errors import HybridppError

_FAILED = 2  # as argparse does for invalid arguments


class Command(Protocol):
    """The interface of a subcommand's module."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the flags."""

    def run(self, arguments: Namespace) -> str:
        """Run the command; returns the text to print."""


class _Entry(NamedTuple):
    module: str
    help: str
    # Whether its function `main` gets all arguments, and returns the exit code.
    has_main: bool = False


# A module is imported when its command is chosen, so `hybridpp --help` needs no torch.
_COMMANDS = {
    "checkpoint": _Entry("hybridpp.cli.checkpoint", "list, verify, show and convert checkpoints of runs"),
    "estimate": _Entry("hybridpp.cli.estimate", "estimate the memory of every rank and the time of a step"),
    "partition": _Entry("hybridpp.cli.partition", "show how a model would be cut into pipeline stages"),
    "run": _Entry("hybridpp.cli.run", "start a script on several ranks: torchrun that can be stopped", has_main=True),
    "plan": _Entry("hybridpp.cli.plan", "search for the fastest layouts that fit in memory"),
    "profile": _Entry("hybridpp.cli.profile", "measure this device, and a model on it, for estimates"),
    "schedule": _Entry("hybridpp.cli.schedule", "print, draw, check and compare pipeline schedules"),
    "simulate": _Entry("hybridpp.cli.simulate", "simulate the time of a step from the costs of its stages"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``hybridpp`` with these arguments (None: those of the process); returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = ArgumentParser(prog="hybridpp", description="Hybrid-parallel training for PyTorch.")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    if given and given[0] in _COMMANDS and _COMMANDS[given[0]].has_main:
        code: int = importlib.import_module(_COMMANDS[given[0]].module).main(given[1:])
        return code
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
