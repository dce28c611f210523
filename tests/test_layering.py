"""Imports go one way, down the table of ARCHITECTURE.md."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# Package (or modules that are one) -> row. A package that does not exist yet is guarded from its first file on.
ROWS = {
    "hybridpp.code_owner": 0,
    "hybridpp.errors": 0,
    "hybridpp.config": 0,
    "hybridpp.saving": 0,
    "hybridpp.sizes": 0,
    "hybridpp.strict_json": 0,
    "hybridpp.text_table": 0,
    "hybridpp.schedule": 1,
    "hybridpp.timeline": 1,
    "hybridpp.nn": 1,
    "hybridpp.cluster": 2,
    "hybridpp.module_adapter": 2,
    "hybridpp.sharding_plan": 2,
    "hybridpp.sharded_activations": 3,
    "hybridpp.simulate": 4,
    "hybridpp.partition": 4,
    "hybridpp.tensor_parallel": 4,
    "hybridpp.data_parallel": 4,
    "hybridpp.precision": 4,
    "hybridpp.optim": 4,
    "hybridpp.checkpoint": 4,
    "hybridpp.pipeline": 4,
    "hybridpp.plan_search": 5,
    "hybridpp.estimate": 5,
    "hybridpp.doctor": 5,
    "hybridpp.report": 5,
    "hybridpp.plugin": 5,
    "hybridpp.tp_preview": 5,
    "hybridpp.registry": 5,
    "hybridpp.plugin_saves": 5,
    "hybridpp.boosted": 5,
    "hybridpp.boosted_runs": 5,
    "hybridpp.booster": 5,
    "hybridpp.booster_saves": 5,
    "hybridpp.booster_adapters": 5,
    "hybridpp.trainer": 6,
    "hybridpp_plugins": 6,
    "hybridpp.cli": 7,
    "hybridpp.__main__": 7,
    "examples": 7,
}
# Modules that are one thing: they may import each other (in one direction: see the test on cycles).
TOGETHER = [
    {
        *("hybridpp.errors", "hybridpp.config", "hybridpp.saving", "hybridpp.sizes", "hybridpp.strict_json"),
        "hybridpp.text_table",
        "hybridpp.code_owner",
    },
    {
        *("hybridpp.plugin", "hybridpp.registry", "hybridpp.booster", "hybridpp.boosted_runs"),
        *(
            "hybridpp.plugin_saves",
            "hybridpp.boosted",
            "hybridpp.booster_saves",
            "hybridpp.booster_adapters",
            "hybridpp.tp_preview",
        ),
    },
    {"hybridpp.cli", "hybridpp.__main__"},
]
WITHOUT_TORCH = {
    *("hybridpp.errors", "hybridpp.config", "hybridpp.sizes", "hybridpp.strict_json", "hybridpp.text_table"),
    "hybridpp.code_owner",
    *("hybridpp.schedule", "hybridpp.timeline", "hybridpp.simulate", "hybridpp.report"),
}
NEEDS_TORCH = {name for name in ROWS if name not in WITHOUT_TORCH} | {"torch", "transformers", "accelerate"}
# The door that users come in by re-exports from everywhere, so nothing behind it may use it.
FRONT_DOOR = "hybridpp"
ENVIRONMENT = "hybridpp.cluster.launch"


class Import(NamedTuple):
    """One imported name: from which line, which module, and how many dots stand before it."""

    line: int
    module: str
    dots: int = 0


def sources() -> dict[str, Path]:
    """Every module of the library, the plugins and the examples, by its dotted name."""
    found = {}
    for top in (ROOT, ROOT / "plugins"):
        for package in ("hybridpp", "hybridpp_plugins", "examples"):
            for path in sorted((top / package).rglob("*.py")):
                name = ".".join(path.relative_to(top).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


SOURCES = sources()


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def imports(source: str) -> Iterator[Import]:
    """What a source imports, wherever in it; ``from a import b`` counts as ``a.b`` where that is one of our modules."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                known = inner in SOURCES or package_of(inner) == inner
                yield Import(node.lineno, inner if known else node.module or "", node.level)


def package_of(module: str) -> str | None:
    """The package of the table that a module is in."""
    return next((name for name in ROWS if module == name or module.startswith(f"{name}.")), None)


def reads_environment(source: str) -> Iterator[int]:
    """Lines that use ``os.environ`` or ``os.getenv``."""
    for node in ast.walk(parsed(source)):
        used = [node.attr] if isinstance(node, ast.Attribute) else []
        used += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if {"environ", "environb", "getenv", "putenv"} & set(used):
            yield node.lineno


def broken_rule(importer: str, found: Import) -> str | None:
    """The rule that an import breaks, if it breaks one."""
    own, other = package_of(importer), package_of(found.module)
    if found.dots > 1:
        return "no relative import goes upwards"
    if own in WITHOUT_TORCH and (found.module.split(".")[0] in NEEDS_TORCH or other in NEEDS_TORCH):
        return f"{own} needs no torch"
    if importer == FRONT_DOOR or found.dots:
        return None
    if own is None:
        return f"{importer} is not in the table: give it a row"
    if found.module == FRONT_DOOR:
        return None if ROWS[own] == ROWS["examples"] else "only entry points come in by the front door"
    if found.module.split(".")[0] == FRONT_DOOR and other is None:
        return f"{found.module} is not in the table: give it a row"
    if other is None or other == own or any({own, other} <= group for group in TOGETHER):
        return None
    if ROWS[other] == ROWS[own]:
        return f"siblings of row {ROWS[own]} never import each other"
    if ROWS[other] > ROWS[own]:
        return f"row {ROWS[own]} never imports row {ROWS[other]}"
    return None


def violations(importer: str, source: str, path: str = "planted.py") -> list[str]:
    """Every broken rule in a source, as the message that a failing test shows."""
    bad = []
    for found in imports(source):
        rule = broken_rule(importer, found)
        if rule is not None:
            bad.append(f"{path}:{found.line}: {importer} imports {'.' * found.dots}{found.module}: {rule}")
    if importer != ENVIRONMENT:
        rule = f"only {ENVIRONMENT} reads the environment"
        bad += [f"{path}:{line}: {importer}: {rule}" for line in reads_environment(source)]
    return bad


def test_the_sources_are_found():
    packages = {package_of(name) for name in SOURCES}
    assert {"hybridpp.schedule", "hybridpp.pipeline", "hybridpp_plugins", "examples", "hybridpp.booster"} <= packages


def test_imports_go_down_the_table():
    bad = [
        message
        for name, path in SOURCES.items()
        for message in violations(name, path.read_text(), str(path.relative_to(ROOT)))
    ]
    assert not bad, "\n".join(["imports go one way:", *bad])


def test_no_module_imports_itself_in_a_circle():
    graph = {
        # A package's __init__ gathers its own modules; they import each other, not the __init__.
        name: {found.module for found in imports(path.read_text()) if found.module in SOURCES}
        for name, path in SOURCES.items()
        if name != FRONT_DOOR
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize(
    ("importer", "source", "rule"),
    [
        ("hybridpp.optim.x", "from hybridpp.precision import f", "siblings of row 4 never import each other"),
        ("hybridpp.nn.x", "import hybridpp.schedule", "siblings of row 1 never import each other"),
        ("hybridpp.nn.x", "from hybridpp.cluster import Group", "row 1 never imports row 2"),
        ("hybridpp.pipeline.x", "from hybridpp import simulate", "siblings of row 4 never import each other"),
        ("hybridpp.cli.x", "import examples.vit.train", "siblings of row 7 never import each other"),
        ("hybridpp.errors", "from hybridpp.schedule import f", "row 0 never imports row 1"),
        ("hybridpp.partition.x", "def f():\n    from hybridpp.plugin import P", "row 4 never imports row 5"),
        ("hybridpp.booster", "from hybridpp_plugins import P", "row 5 never imports row 6"),
        ("hybridpp_plugins.x", "from examples.vit.data import f", "row 6 never imports row 7"),
        ("hybridpp_plugins.x", "from hybridpp import cli", "row 6 never imports row 7"),
        ("hybridpp.booster", "from hybridpp import launch", "only entry points come in by the front door"),
        ("hybridpp.schedule.x", "import torch.distributed as dist", "hybridpp.schedule needs no torch"),
        ("hybridpp.timeline.x", "if True:\n    from torch import Tensor", "hybridpp.timeline needs no torch"),
        ("hybridpp.simulate.x", "from hybridpp.cluster import World", "hybridpp.simulate needs no torch"),
        ("hybridpp.schedule.x", "from ..cluster import World", "no relative import goes upwards"),
        ("hybridpp.novel.x", "import math", "hybridpp.novel.x is not in the table: give it a row"),
        ("hybridpp.pipeline.x", "import hybridpp.novel", "hybridpp.novel is not in the table: give it a row"),
    ],
)
def test_the_checker_finds_a_planted_import(importer, source, rule):
    (message,) = violations(importer, source)
    assert message.startswith(f"planted.py:{len(source.splitlines())}: {importer} imports ")
    assert message.endswith(f": {rule}")


@pytest.mark.parametrize("source", ["import os\nx = os.environ['RANK']", "\nfrom os import getenv"])
def test_the_checker_finds_a_planted_look_at_the_environment(source):
    message = "planted.py:2: hybridpp.optim.x: only hybridpp.cluster.launch reads the environment"
    assert violations("hybridpp.optim.x", source) == [message]
    assert violations(ENVIRONMENT, source) == []


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("hybridpp.cluster.x", "from hybridpp.nn.linear import is_linear"),
        ("hybridpp.pipeline.x", "from hybridpp.schedule import f\nfrom hybridpp.timeline import g\nimport torch"),
        ("hybridpp.simulate.x", "from hybridpp.schedule import f\nfrom hybridpp.timeline import g"),
        ("hybridpp.booster", "from hybridpp.registry import load_plugin"),
        ("hybridpp_plugins.x", "from hybridpp.partition import f\nfrom hybridpp.data_parallel import g"),
        ("hybridpp.cli.x", "from hybridpp import Booster\nfrom hybridpp.registry import plugin_names"),
        ("examples.vit.train", "from hybridpp import Booster"),
    ],
)
def test_the_checker_lets_what_is_allowed_pass(importer, source):
    assert violations(importer, source) == []
