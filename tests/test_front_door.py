import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hybridpp

ROOT = Path(__file__).parents[1]
WITH_EXAMPLES = [
    ".".join(path.relative_to(top).with_suffix("").parts)
    for top in (ROOT, ROOT / "plugins")
    for package in ("hybridpp", "hybridpp_plugins")
    for path in sorted((top / package).rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("module", ["hybridpp", "hybridpp.errors", "hybridpp.config", "hybridpp.schedule"])
def test_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=30, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("name", hybridpp.__all__)
def test_public_names_resolve_and_have_a_docstring(name):
    value = getattr(hybridpp, name)
    assert value.__name__ == name
    # Read here and not by inheritance: a class without a docstring of its own would show its base's.
    assert value.__dict__["__doc__"] if isinstance(value, type) else value.__doc__


def test_all_public_names_are_listed():
    assert list(hybridpp.__all__) == sorted(hybridpp._HOME)
    assert set(hybridpp.__all__) <= set(dir(hybridpp))


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'hybridpp' has no attribute 'Boster'"):
        _ = hybridpp.Boster
    assert not hasattr(hybridpp, "__wrapped__")


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_give_what_they_say(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0
    assert results.failed == 0
