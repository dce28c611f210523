import doctest
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import hybridpp
import hybridpp.optim

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


def test_a_job_needs_neither_transformers_nor_packages_of_the_command_line():
    code = """
import sys, torch
sys.modules.update(typer=None, rich=None)
from hybridpp import Booster, HybridParallelPlugin
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
booster = Booster(plugin=HybridParallelPlugin(precision="fp32"), device="cpu")
model, *_ = booster.boost(model, sample=torch.zeros(1, 2))
booster.save_model(model, sys.argv[1])
booster.load_model(model, sys.argv[1])
assert "transformers" not in sys.modules
import hybridpp
[getattr(hybridpp, name) for name in hybridpp.__all__]
assert not hasattr(torch.ops.hybridpp, "separated_linear"), "operators are for compiled blocks"
"""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, f"{folder}/weights"]
        assert subprocess.run(command, cwd=ROOT, timeout=100, check=False).returncode == 0


@pytest.mark.parametrize("name", hybridpp._MODULE_OF)
def test_public_names_resolve_and_have_a_docstring(name):
    value = getattr(hybridpp, name)
    assert value.__name__ == name
    # Read here and not by inheritance: a class without a docstring of its own would show its base's.
    assert value.__dict__["__doc__"] if isinstance(value, type) else value.__doc__


def test_the_top_level_is_about_a_dozen_names():
    assert hybridpp.__all__ == sorted(hybridpp.__all__)
    assert len(hybridpp.__all__) <= 17
    assert [name for name in dir(hybridpp) if not name.startswith("__")] == hybridpp.__all__
    assert "__version__" in dir(hybridpp)
    assert set(hybridpp.__all__) <= set(hybridpp._MODULE_OF)


def test_learning_rate_schedules_are_exported_from_optim():
    moved = [name for name in hybridpp._MODULE_OF if name not in hybridpp.__all__]
    assert len(moved) == 16
    assert all(name.endswith("LR") for name in moved)
    assert set(moved) < set(hybridpp.optim.__all__)
    # Scripts that import them from the top level get the same classes.
    assert all(getattr(hybridpp, name) is getattr(hybridpp.optim, name) for name in moved)


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'hybridpp' has no attribute 'Boster'"):
        _ = hybridpp.Boster
    assert not hasattr(hybridpp, "__wrapped__")


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_give_what_they_say(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0
    assert results.failed == 0
