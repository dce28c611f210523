import subprocess
import sys
import tomllib

import pytest
from support import ROOT

from hybridpp.cli import main


def test_the_command_is_installed():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"hybridpp": "hybridpp.cli:main"}


def test_help_lists_the_commands_and_loads_no_torch():
    code = (
        "import sys; from hybridpp.cli import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert "show how a model would be cut into pipeline stages" in done.stdout
    assert "print, draw, check and compare pipeline schedules" in done.stdout
    assert "simulate the time of a step from the costs of its stages" in " ".join(done.stdout.split())


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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "hybridpp: error: the following arguments are required: command"),
        (
            ["brew"],
            "hybridpp: error: argument command: invalid choice: 'brew' "
            "(choose from 'checkpoint', 'estimate', 'partition', 'run', 'plan', 'profile', 'schedule', 'simulate')",
        ),
        (["partition", "--model", "x"], "hybridpp partition: error: the following arguments are required: --pp-size"),
        (
            ["partition", "--model", "x", "--pp-size", "0"],
            "hybridpp partition: error: argument --pp-size: '0' is not an integer of at least 1",
        ),
        (
            ["partition", "--model", "x", "--pp-size", "2", "--layers-per-stage", "1,b"],
            "hybridpp partition: error: argument --layers-per-stage: 'b' is not an integer of at least 1",
        ),
        (
            ["partition", "--model", "x", "--pp-size", "2", "--split-points", "a.b"],
            "hybridpp partition: error: argument --split-points: 'a.b' is not NAME:before or NAME:after",
        ),
    ],
)
def test_flags_that_are_wrong(capsys, arguments, text):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == text
