"""Options of commands: what typer calls to read a value, and what help says about it."""

from collections.abc import Callable
from typing import Any

import typer

from hybridpp.errors import ConfigError

_MAX_DIGITS = 40
# Parsers also get defaults, which are no text.


def _is_integer(text: str) -> bool:
    # Python converts texts of thousands of digits only if it is told to.
    return text.isdecimal() and len(text) <= _MAX_DIGITS


def _short(text: str) -> str:
    return repr(text) if len(text) <= _MAX_DIGITS else f"a text of {len(text)} characters"


def positive(value: object) -> int:
    """An integer of at least 1."""
    text = str(value)
    if not _is_integer(text) or int(text) < 1:
        raise typer.BadParameter(f"{_short(text)} is not an integer of at least 1.")
    return int(text)


def integer(value: object) -> int:
    """An integer of at least 0."""
    text = str(value)
    if not _is_integer(text):
        raise typer.BadParameter(f"{_short(text)} is not an integer of at least 0.")
    return int(text)


def number(value: object) -> float:
    """A number."""
    try:
        return float(str(value))
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not a number.") from None


def counts(flag: str, text: str | None) -> list[int] | None:
    """Integers of at least 1, separated by commas; None: the option was not given.

    Raises:
        ConfigError: the text is something else.
    """
    if text is None:
        return None
    found = [part.strip() for part in text.split(",")]
    for part in found:
        if not _is_integer(part) or int(part) < 1:
            raise ConfigError(
                f"{flag} takes integers of at least 1, separated by commas: got {_short(part)}. Write them as in 1,2,4."
            )
    return [int(part) for part in found]


def option(help: str, metavar: str | None = None, name: str | None = None, *, hidden: bool = False) -> Any:
    """An option that takes a text or, if it has a type of its own, one of its values; or a flag, given its name.

    Args:
        help: a line.
        metavar: stands for the value in help.
        name: with dashes; a flag needs it, so that there is no ``--no-`` of it.
        hidden: from help, because another command gives it.
    """
    return typer.Option(*([name] if name else []), metavar=metavar, help=help, hidden=hidden)


def count(help: str, metavar: str = "N") -> Any:
    """An option that takes an integer of at least 1."""
    return _parsed(positive, help, metavar)


def index(help: str, metavar: str = "N") -> Any:
    """An option that takes an integer of at least 0."""
    return _parsed(integer, help, metavar)


def real(help: str, metavar: str = "X") -> Any:
    """An option that takes a number."""
    return _parsed(number, help, metavar)


def argument(help: str, metavar: str | None = None) -> Any:
    """What is given by its position."""
    return typer.Argument(metavar=metavar, help=help)


def _parsed(parser: Callable[[object], Any], help: str, metavar: str) -> Any:
    return typer.Option(parser=parser, metavar=metavar, help=help)


def per_stage(flag: str, text: str) -> float | tuple[float, ...]:
    """One number for all stages, or one per stage, separated by commas.

    Raises:
        BadParameter: the text is neither.
    """
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        message = f"{text!r} is not a number, or one per stage as in 1,1,1,1.5."
        raise typer.BadParameter(message, param_hint=repr(flag)) from None
    return values if "," in text else values[0]
