"""Errors can be caught as hybridpp's and as the built-in error that fits."""

import inspect

import pytest

from hybridpp import errors
from hybridpp.errors import HybridppError

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls is not HybridppError]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_hybridpps_and_one_built_in_error(cls):
    assert issubclass(cls, HybridppError)
    assert sum(issubclass(cls, built_in) for built_in in (ValueError, RuntimeError)) == 1
