"""One package owns what is put on the user's modules: nobody else replaces what a call of a module goes through."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OWNER = "hybridpp/module_adapter/wrapper.py"
# By attribute, by setattr, and past both by vars(module).
SETS_FORWARD = re.compile(
    r"""\.forward\ =[^=]|\.(_call_impl|_compiled_call_impl)\ =[^=]
    |setattr\([^,]+,\ ["']forward["']|\[["']?(forward|FORWARD|_FORWARD|CALL|COMPILED_CALL)["']?\]\ =[^=]""",
    re.VERBOSE,
)


def setters():
    """The files of the library and its plugins with a line that sets a forward, by path."""
    sources = [path for top in ("hybridpp", "plugins") for path in sorted((ROOT / top).rglob("*.py"))]
    assert len(sources) > 200
    return [str(path.relative_to(ROOT)) for path in sources if SETS_FORWARD.search(path.read_text())]


def test_one_file_sets_the_forward_of_modules():
    assert setters() == [OWNER]


@pytest.mark.parametrize(
    "line",
    [
        "module.forward = partial(run, module.forward)",
        'vars(module)["forward"] = run',
        "vars(module)[CALL] = run",
        'setattr(module, "forward", run)',
        "module._call_impl = run",
    ],
)
def test_a_planted_setter_is_found(line):
    assert SETS_FORWARD.search(line)


@pytest.mark.parametrize("line", ["forward = module.forward", "if module.forward == run:", "self._forward = run"])
def test_a_reader_is_no_setter(line):
    assert not SETS_FORWARD.search(line)
