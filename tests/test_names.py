"""Every public type name is defined once in hybridpp and its plugins, and names of tests are short."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("hybridpp", "plugins/hybridpp_plugins")

MAX_TEST_NAME = 70

# Names that are defined several times, each with the reason.
REPEATED: dict[str, str] = {}


def type_names(tree: ast.Module) -> Iterator[str]:
    """Classes (protocols, enums and named tuples among them) and type aliases of a module, without private ones."""
    for node in tree.body:
        name = ""
        if isinstance(node, ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id if ast.unparse(node.annotation).endswith("TypeAlias") else ""
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id if _is_type(node.targets[0].id, node.value) else ""
        if name and not name.startswith("_"):
            yield name


def _is_type(name: str, value: ast.expr) -> bool:
    """Whether an assignment without annotation is an alias; type variables and constants are none."""
    return isinstance(value, ast.Subscript | ast.BinOp) and name[0].isupper() and not name.isupper()


def test_every_public_type_name_is_defined_once():
    files = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in type_names(ast.parse(path.read_text())):
                files[name].append(str(path.relative_to(ROOT)))
    repeated = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert {name: paths for name, paths in repeated.items() if name not in REPEATED} == {}
    assert sorted(REPEATED) == sorted(repeated), "a name that is defined once needs no reason"
    assert len(files) > 100


def test_classes_and_aliases_are_found_but_no_constants():
    source = """
class Group(Protocol): ...
class _Private: ...
Key: TypeAlias = tuple[str, str]
Axis = Literal["dp", "pp"]
T = TypeVar("T")
LIMIT = 2 | 4
limits: dict[str, int] = {}
"""
    assert list(type_names(ast.parse(source))) == ["Group", "Key", "Axis"]


# Names that say nothing to who reads only one function, with what to write.
VAGUE_NAMES = {
    "behind": "after",
    "mine": "own_..., local",
    "place": "index, position, rank",
    "places": "indices, positions, ranks",
    "said": "what it is: message, report",
    "theirs": "what it is: saved, expected, second",
    "told": "what it is: message, report",
    "whole": "full, complete, unsharded",
}


def names_in(tree: ast.Module) -> Iterator[str]:
    """Names of variables, arguments, attributes, functions and classes, without underscores around them."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name.strip("_")
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name.strip("_")


def test_names_are_terms_of_the_field():
    paths = [str(path.relative_to(ROOT)) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = {
        f"{path}: {name}": VAGUE_NAMES[name]
        for path in paths
        for name in names_in(ast.parse((ROOT / path).read_text()))
        if name in VAGUE_NAMES
    }
    assert found == {}
    assert len(paths) > 200


def test_vague_names_are_found():
    source = "def f(whole): self._place = [told for told in whole]"
    assert VAGUE_NAMES.keys() & set(names_in(ast.parse(source))) == {"whole", "place", "told"}


def test_names_of_tests_have_at_most_70_characters():
    names = [
        node.name
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name) > MAX_TEST_NAME] == []
    assert len(names) > 1000
