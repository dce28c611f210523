"""What a command is: its arguments, its help, and the function that does its work."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_type_hints

import typer

from hybridpp.errors import ConfigError

# What commands import, which a host to which the library was only copied may lack.
_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "fsspec",
    "jinja2",
    "numpy",
    "psutil",
    "safetensors",
    "tqdm",
    "xxhash",
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of ``hybridpp``, before anything that it needs is imported.

    Attributes:
        name: that users type.
        arguments: a frozen dataclass of keywords, whose fields are annotated with the options of ``argtypes``. The
            first line of its docstring is its line in the list of commands; all of it is its help.
        work: ``"module:function"``, imported when the command runs. The function is called with ``arguments``, prints
            with :func:`hybridpp.cli.output.show`, and returns nothing. It raises an error of ``hybridpp.errors`` for
            what is told in two lines (exit code 2), and ``typer.Exit(1)`` after it has printed what it found wrong.
        examples: command lines, for the end of the help.
        settings: of typer's context, for a command that passes options on.
    """

    name: str
    arguments: type[Any]
    work: str
    examples: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def register(self, app: typer.Typer) -> None:
        """Make it a command of ``app``."""
        examples = "\n".join(["\b", "Examples:", *(f"  {line}" for line in self.examples)])
        app.command(
            self.name,
            help=inspect.getdoc(self.arguments),
            epilog=examples,
            context_settings=dict(self.settings),
        )(self._function())

    def call(self, arguments: Any) -> None:
        """Import the work, and do it.

        Raises:
            ConfigError: a package that the work needs is not installed.
        """
        module, _, name = self.work.partition(":")
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in _PACKAGES:
                raise
            raise ConfigError(
                f"hybridpp {self.name} needs the package {missing}, which is not installed. "
                f"Run {sys.executable} -m pip install {missing}"
            ) from error
        getattr(imported, name)(arguments)

    def _function(self) -> Callable[..., None]:
        """A function whose parameters are the fields of ``arguments``: typer reads signatures."""

        def run(**given: Any) -> None:
            self.call(self.arguments(**given))

        hints = get_type_hints(self.arguments, include_extras=True)
        parameters = [
            inspect.Parameter(
                entry.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if entry.default is MISSING else entry.default,
                annotation=hints[entry.name],
            )
            for entry in fields(self.arguments)
        ]
        signature = inspect.Signature(parameters)
        vars(run).update(__signature__=signature)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run


@dataclass(frozen=True, kw_only=True)
class CommandGroup:
    """Commands under one name, as ``hybridpp checkpoint list``.

    Attributes:
        name: that users type before the command's.
        help: its line in the list of commands.
        commands: in the order of help.
    """

    name: str
    help: str
    commands: tuple[Command, ...]
