"""Errors can be caught as hybridpp's and as the built-in error that fits."""

import inspect
import re
from pathlib import Path

import pytest

from hybridpp import errors
from hybridpp.errors import HybridppError, named, text_of

ROOT = Path(__file__).parents[1]

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls is not HybridppError]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_hybridpps_and_one_built_in_error(cls):
    assert issubclass(cls, HybridppError)
    assert sum(issubclass(cls, built_in) for built_in in (ValueError, RuntimeError)) == 1


def test_what_an_error_says_ends_no_sentence_inside_of_one():
    error = OSError("no file named model.safetensors, or pytorch_model.bin, found in directory x.")
    assert f"{named(error)}. Pass another." == f"OSError: {text_of(error)}. Pass another."
    assert text_of(error).endswith("in directory x")


def test_no_message_puts_a_full_stop_after_an_error_that_may_end_in_one():
    sources = [path for package in ("hybridpp", "plugins") for path in sorted((ROOT / package).rglob("*.py"))]
    pattern = re.compile(r"\{(error|real|raised)\}\.[ \"]")
    found = [f"{path.name}: {one[0]}" for path in sources for one in pattern.finditer(path.read_text())]
    assert found == []
