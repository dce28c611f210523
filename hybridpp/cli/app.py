"""The command line: its commands, what is said when one fails, and the exit code.

Exit codes: 0: done. 1: the command ran, and what it examined has a problem, which it printed. 2: it could not do what
was asked, for the reason in two lines on stderr. 130: interrupted. ``hybridpp run`` has codes of its own, in
``hybridpp/cluster/exit_codes.py``.
"""

import errno
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

import hybridpp
from hybridpp.cli.command import Command, CommandGroup
from hybridpp.cli.commands.checkpoint import CHECKPOINT
from hybridpp.cli.commands.doctor import DOCTOR
from hybridpp.cli.commands.estimate import ESTIMATE
from hybridpp.cli.commands.partition import PARTITION
from hybridpp.cli.commands.plan import PLAN
from hybridpp.cli.commands.profile import PROFILE
from hybridpp.cli.commands.report import REPORT
from hybridpp.cli.commands.run import RUN
from hybridpp.cli.commands.schedule import SCHEDULE
from hybridpp.cli.commands.simulate import SIMULATE
from hybridpp.cli.main import interrupted
from hybridpp.errors import ConfigError, HybridppError

COMMANDS: tuple[Command | CommandGroup, ...] = (
    RUN,
    DOCTOR,
    ESTIMATE,
    PLAN,
    PROFILE,
    PARTITION,
    SCHEDULE,
    SIMULATE,
    REPORT,
    CHECKPOINT,
)

_CODES = "Exit codes: 0: done. 1: a problem was found, and printed. 2: refused, for the reason in two lines."
_REFUSED = 2
# The base class of what typer raises for arguments; its name depends on the version (TyperException since 0.28).
_BASES: tuple[type[Any], ...] = typer.BadParameter.__mro__
_WrongArguments = _BASES[_BASES.index(Exception) - 1]


class _InterruptedError(Exception):
    """Ctrl-C, which typer would end without a word."""


class _Named(TyperGroup):
    """Commands, of which an unknown name lists the known ones."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first of ``args`` names."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            names = ", ".join(self.list_commands(ctx))
            raise ConfigError(f"{ctx.command_path} has no command {args[0]!r}. Use one of {names}.")
        return super().resolve_command(ctx, args)


class _Root(_Named):
    """All commands; errors of their work become two lines, while the command's name is known."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Read the arguments."""
        try:
            return super().make_context(*args, **more)
        except KeyboardInterrupt:
            raise _InterruptedError from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            returned = super().invoke(ctx)
            sys.stdout.flush()
        except HybridppError as error:
            message = str(error)
        except OSError as error:
            message = _of_file(error)
        except KeyboardInterrupt:
            raise _InterruptedError from None
        else:
            return returned
        _tell(message, f"{ctx.command_path} {ctx.invoked_subcommand or ''}".rstrip())
        raise typer.Exit(_REFUSED)


def run(arguments: Sequence[str]) -> int:
    """Run ``hybridpp`` with these arguments; returns the exit code."""
    try:
        code = get_command(application()).main(list(arguments), prog_name="hybridpp", standalone_mode=False)
    except OSError as error:  # of help, which is printed before a command is called
        _tell(_of_file(error), "hybridpp")
        return _REFUSED
    except _WrongArguments as error:  # arguments that are missing or wrong
        context = getattr(error, "ctx", None)
        # "Value error, " comes from pydantic, which reads the values of typer's options.
        # "(env var: 'None')" comes from click, on which typer was built before 0.26.
        message = (
            error.format_message().replace("Value error, ", "").replace(" (env var: 'None')", "").rstrip(".") + "."
        )
        _tell(message[:1].lower() + message[1:], "hybridpp" if context is None else context.command_path)
        return _REFUSED
    except _InterruptedError:
        return interrupted()
    return int(code or 0)


def _of_file(error: OSError) -> str:
    """What is said of a file that a command did not expect to fail, or of its output."""
    if error.errno == errno.EPIPE:  # a pipe that closed, which typer handles
        raise error
    where, way_out = error.filename, "Check the path and its permissions."
    if where is None:
        where, way_out = "the output cannot be written", "Free space, or send it to another file."
        # What is left would be written when the interpreter ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return f"{where}: {(error.strerror or str(error)).lower()}. {way_out}"


def application() -> typer.Typer:
    """The commands, for typer."""
    app = typer.Typer(cls=_Root, help="Hybrid-parallel training for PyTorch.", epilog=_CODES, rich_markup_mode=None)
    app.callback(context_settings={"max_content_width": 120})(_root)
    for entry in COMMANDS:
        if isinstance(entry, CommandGroup):
            group = typer.Typer(cls=_Named, name=entry.name, help=entry.help, rich_markup_mode=None)
            for command in entry.commands:
                command.register(group)
            app.add_typer(group)
        else:
            entry.register(app)
    return app


def _print_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"hybridpp {hybridpp.__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Hybrid-parallel training for PyTorch."""


def _tell(message: str, command: str) -> None:
    """Print an error on stderr: a line with the rule and the values, a line with the way out."""
    rule, *way_out = re.split(r"(?<=\.)\s+(?=[A-Z])", " ".join(message.split()), maxsplit=1)
    with suppress(OSError):  # the exit code says it, too
        sys.stderr.write(f"hybridpp: {rule}\n{way_out[0] if way_out else f'See {command} --help.'}\n")
