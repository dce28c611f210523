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
    """The line on stderr that the command ends with, run in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        assert main([command, *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        return captured.err.rstrip("\n")

    return run
