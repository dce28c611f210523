"""Errors can be caught as hybridpp's and as the built-in error that fits."""

import inspect
import re
from pathlib import Path

import pytest

from hybridpp import errors
from hybridpp.config import PartitionConfig, ZeroConfig
from hybridpp.errors import ConfigError, HybridppError, named, shown, some_of, text_of

ROOT = Path(__file__).parents[1]

OWN = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
CLASSES = [cls for cls in OWN if cls is not HybridppError]


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


def test_long_values_and_lists_are_cut_with_a_count():
    assert shown("x" * 198) == repr("x" * 198)
    assert shown("x" * 10_000) == f"'{'x' * 199}… (10,002 characters)"
    assert shown(10**5000) == "<int, too long to be shown>"
    assert some_of(["a", "b"]) == "['a', 'b']"
    assert some_of(range(2_009)) == "[0, 1, 2, 3, 4, 5, 6, 7] and 2,001 more"


LONG = {"layers_per_stage": [1] * 10**5, "split_points": {f"layers.{n}": "after" for n in range(10**4)}}


@pytest.mark.parametrize(
    ("make", "settings"),
    [(PartitionConfig, {"balance": "x" * 10**6}), (PartitionConfig, LONG), (ZeroConfig, {"zero_stage": "9" * 10**6})],
)
def test_messages_of_settings_stay_short(make, settings):
    with pytest.raises(ConfigError) as raised:
        make(**settings)
    assert len(str(raised.value)) < 600
