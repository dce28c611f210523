import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import pytest
import torch
from hybridpp_plugins.signature import line_by_line


class Options(TypedDict, total=False):
    depth: int


def settings(
    self,
    size: int,
    *,
    mode: Literal["a", "b"] | None = None,
    files: Sequence[Path] | Mapping[str, Any] = (),
    dtype: torch.dtype | str = "fp32",
    **options: Unpack[Options],
) -> Path: ...


def test_each_argument_has_a_line_with_its_short_type_and_default():
    assert str(inspect.signature(line_by_line(settings))) == (
        "(\n"
        "    self,\n"
        "    size: int,\n"
        "    *,\n"
        "    mode: Literal['a', 'b'] | None = None,\n"
        "    files: Sequence[Path] | Mapping[str, Any] = (),\n"
        "    dtype: torch.dtype | str = 'fp32',\n"
        "    **options: Unpack[Options],\n"
        ") -> Path"
    )


def plain(a, b=1): ...


def positional(a, /, b): ...


def many(a, *args, b, **rest): ...


def keywords(*, a, b): ...


def only_positional(a, b, /): ...


@pytest.mark.parametrize("function", [plain, positional, many, keywords, only_positional])
def test_the_text_is_that_of_python_broken_into_lines(function):
    text = str(inspect.signature(function))
    broken = str(inspect.signature(line_by_line(function))).replace("    ", "")
    assert broken.replace("(\n", "(").replace(",\n)", ")").replace("\n", " ").replace(" = ", "=") == text


def test_a_bound_method_has_no_self_and_keeps_the_lines():
    bound = inspect.signature(line_by_line(settings).__get__(object()))
    assert str(bound).startswith("(\n    size: int,\n    *,\n")
