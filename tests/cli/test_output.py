"""Tables: plain text in a pipe, whatever the terminal; a table that fits the terminal on one."""

import io
import re
import sys

import pytest

from hybridpp.cli.output import bytes_done, show, working
from hybridpp.text_table import TextTable, text_table

TABLE = TextTable(("name", "size"), [("a" * 50, "1"), ("b [red]", "22")], totals=("sum", "23"))


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Puts stdout and stderr on a terminal of 30 columns; returns both."""
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def open_terminal():
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, Terminal())
        return sys.stdout, sys.stderr

    return open_terminal


def test_in_a_pipe_a_table_is_plain_text_of_any_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    show("first", TABLE, "last")
    assert capsys.readouterr().out == f"first\n{text_table(TABLE.titles, TABLE.rows, TABLE.totals)}\nlast\n"


def test_on_a_terminal_a_table_fits_it_and_loses_nothing(terminal):
    stdout, _ = terminal()
    show(TABLE, "x" * 40)
    text = stdout.getvalue()
    lines = text.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    *table, line = lines
    assert max(map(len, table)) <= 30
    assert text.count("a") == 50 + 1  # a title has one, too
    assert "b [red]" in text
    assert line == "x" * 40


def test_a_table_that_must_fold_keeps_words_whole_where_they_fit(terminal):
    stdout, _ = terminal()
    show(TextTable(("stage", "modules", "size"), [("0", "embed.tokens, layers.0-1", "1,024")], left=(1,)))
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", stdout.getvalue()).splitlines()]
    assert ["0", "embed.tokens,", "1,024"] in lines
    assert ["layers.0-1"] in lines


def test_progress_is_silent_in_a_pipe(capsys):
    with bytes_done("verify", 10) as done, working("trace the model") as now:
        done(5)
        now("cut it")
    assert capsys.readouterr() == ("", "")


def test_progress_is_on_the_terminals_stderr(terminal):
    stdout, stderr = terminal()
    with bytes_done("verify", 10) as done:
        done(10)
    assert "verify" in stderr.getvalue()
    with working("trace the model"):
        pass
    assert "trace the model" in stderr.getvalue()
    assert stdout.getvalue() == ""
