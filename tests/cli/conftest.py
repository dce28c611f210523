"""Run a command of ``hybridpp``: each file of tests says which, in a fixture ``command``."""

import pytest

from hybridpp.cli import main


@pytest.fixture
def printed(command, tmp_path, monkeypatch, capsys):
    """What the command prints, run in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        assert main([command, *arguments]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


@pytest.fixture
def refused(command, tmp_path, monkeypatch, capsys):
    """The two lines on stderr that the command ends with, run in an empty folder, joined by a space.

    Where an error tells no way out, the second line names the help, which is left out here.
    """
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        assert main([command, *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        rule, way_out = captured.err.removesuffix("\n").split("\n")
        return rule if way_out == f"See hybridpp {command} --help." else f"{rule} {way_out}"

    return run
