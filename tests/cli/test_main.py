import importlib
import subprocess
import sys
import tomllib

import pytest
from support import ROOT

from hybridpp.cli import main


def test_the_command_is_installed():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"hybridpp": "hybridpp.cli:main"}


@pytest.mark.parametrize("command", [[], ["partition"], ["checkpoint", "export"]], ids=str)
def test_help_and_wrong_options_load_no_torch(command):
    code = (
        "import sys; from hybridpp.cli import main\n"
        f"assert main([*{command}, '--help']) == 0 and main([*{command}, '--tea']) == 2\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=True)


def test_help_lists_the_commands():
    command = [sys.executable, "-m", "hybridpp", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "Show how a model would be cut into pipeline stages" in done.stdout
    assert "Print, draw, check and compare pipeline schedules" in done.stdout
    assert "Simulate the time of a step from the costs of its stages" in " ".join(done.stdout.split())


def test_the_package_runs_as_the_command():
    command = [sys.executable, "-m", "hybridpp", "schedule", "1f1b", "--stages", "2", "--microbatches", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert "rank 1" in done.stdout


@pytest.mark.parametrize("arguments", [["schedule", "--compare"], ["simulate", "1f1b"]])
def test_schedules_need_neither_torch_nor_what_is_optional(arguments):
    code = (
        "import sys; from hybridpp.cli import main\n"
        f"assert main([*{arguments}, '--stages', '2', '--microbatches', '2']) == 0\n"
        "assert not {'torch', 'matplotlib', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=30, check=True)


def test_without_its_packages_two_lines_say_what_to_install():
    # Python without its site-packages; the library needs torch only when something of it is used.
    command = [sys.executable, "-S", "-m", "hybridpp", "--help"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "hybridpp: the command line needs the packages typer and rich: typer and rich cannot be imported.\n"
        f"Run {sys.executable} -m pip install typer rich\n"
    )


@pytest.mark.parametrize(
    ("found", "is_refused"), [("0.21.0", True), ("0.9", True), ("0.21.1", False), ("1.0b1", False)]
)
def test_an_old_typer_is_two_lines(monkeypatch, capsys, found, is_refused):
    monkeypatch.setattr(importlib.import_module("hybridpp.cli.main"), "version", lambda name: found)
    assert main(["--version"]) == (2 if is_refused else 0)
    two_lines = (
        f"hybridpp: the command line needs typer 0.21.1 or newer: got {found}.\n"
        f"Run {sys.executable} -m pip install --upgrade 'typer>=0.21.1'\n"
    )
    assert capsys.readouterr().err == (two_lines if is_refused else "")
