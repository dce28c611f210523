"""Signatures that ``help()`` shows with a line for each argument."""

import inspect
import re
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, Unpack, get_args, get_origin

F = TypeVar("F", bound=Callable[..., Any])

_STARS: dict[int, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


class LineByLine(inspect.Signature):
    """A signature whose text has a line for each argument, and short annotations.

    ``help()`` prints this text. Since Python 3.13 pydoc breaks long signatures itself; the class can go with 3.12.
    """

    def __str__(self) -> str:
        lines, parameters = [], list(self.parameters.values())
        kinds = [parameter.kind for parameter in parameters]
        for index, parameter in enumerate(parameters):
            before, after = kinds[:index], kinds[index + 1 :]
            first_keyword_only = parameter.kind is parameter.KEYWORD_ONLY and parameter.kind not in before
            if first_keyword_only and parameter.VAR_POSITIONAL not in before:
                lines.append("*")
            lines.append(_line(parameter))
            if parameter.kind is parameter.POSITIONAL_ONLY and parameter.kind not in after:
                lines.append("/")
        returned = "" if self.return_annotation is self.empty else f" -> {_text(self.return_annotation)}"
        return "(\n" + "".join(f"    {line},\n" for line in lines) + f"){returned}"


def _line(parameter: inspect.Parameter) -> str:
    stars = _STARS.get(parameter.kind, "")
    typed = "" if parameter.annotation is parameter.empty else f": {_text(parameter.annotation)}"
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}{typed}{default}"


def _text(annotation: Any) -> str:
    """The annotation without the modules of its types: ``Sequence[int]``, not ``collections.abc.Sequence[int]``."""
    if get_origin(annotation) is Unpack:
        return f"Unpack[{get_args(annotation)[0].__name__}]"
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(_text, get_args(annotation)))
    if annotation is NoneType:
        return "None"
    return re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", inspect.formatannotation(annotation))


def line_by_line(function: F) -> F:
    """``function``, whose signature ``help()`` shows line by line; the class's too, where it is an ``__init__``."""
    plain = inspect.signature(function)
    vars(function)["__signature__"] = LineByLine(
        list(plain.parameters.values()), return_annotation=plain.return_annotation
    )
    return function
