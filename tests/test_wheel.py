"""The wheel and the sdist hold what an installation needs, and the project says what it needs honestly."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
from support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CITATION.cff", "CONTRIBUTING.md", "CHANGELOG.md")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Paths of the wheel and of the sdist, built from a copy of what they are made of."""
    pytest.importorskip("setuptools", minversion="77")
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for folder in ("hybridpp", "plugins"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    code = (
        "import sys; from setuptools import build_meta\n"
        "folder = sys.argv[1]; build_meta.build_wheel(folder); build_meta.build_sdist(folder)"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(output)],
        cwd=source,
        capture_output=True,
        timeout=110,
        check=True,
    )
    return next(output.glob("*.whl")), next(output.glob("*.tar.gz"))


def test_the_wheel_holds_every_file_of_both_packages(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        entry_points = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
        metadata = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
    # Modules, what checkers of types look for, and the parts of pages.
    files = {
        str(path.relative_to(root))
        for root, package in ((ROOT, "hybridpp"), (ROOT / "plugins", "hybridpp_plugins"))
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"hybridpp/py.typed", "hybridpp_plugins/py.typed", "hybridpp_plugins/setup.py"} <= files
    assert {name for name in names if ".dist-info/" not in name} == files
    assert "hybridpp = hybridpp.cli:main" in entry_points
    assert "hybrid_parallel = hybridpp_plugins:HybridParallelPlugin" in entry_points
    assert {"plot", "trackers", "lora", "ray", "docs"} <= set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.M))


def test_the_sdist_says_how_to_cite_and_how_to_contribute(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"CITATION.cff", "CONTRIBUTING.md", "LICENSE", "CHANGELOG.md", "plugins/hybridpp_plugins/setup.py"} <= names


def test_the_citation_has_the_version_of_the_project():
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_oldest_constraints_are_the_lower_bounds():
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints-oldest.txt").read_text(), re.M))
    bounds = [re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=(\S+)", one).groups() for one in PROJECT["dependencies"]]
    assert set(pinned) == {name for name, _ in bounds}
    for name, bound in bounds:
        assert f"{pinned[name]}.0".startswith(f"{bound}."), name


def test_what_is_pinned_is_allowed():
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text().lower(), re.M))
    for one in PROJECT["dependencies"]:
        name, bound = re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=(\S+)", one).groups()
        assert [int(n) for n in pinned[name].split(".")] >= [int(n) for n in bound.split(".")], name
