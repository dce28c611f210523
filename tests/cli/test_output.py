"""Tables: plain text in a pipe, whatever the terminal; a table that fits the terminal on one."""

import io
import re
import sys

import pytest

from hybridpp.cli.cut_table import _OF_RANKS, _TITLES
from hybridpp.cli.output import bytes_done, show, working
from hybridpp.cli.plan_table import _TITLES as PLAN
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


@pytest.fixture
def shown(terminal, monkeypatch):
    """The lines of a table on a terminal of 80 columns."""

    def lines_of(table):
        stdout, _ = terminal()
        monkeypatch.setenv("COLUMNS", "80")
        show(table)
        return re.sub(r"\x1b\[[0-9;]*m", "", stdout.getvalue()).splitlines()

    return lines_of


ESTIMATE = ("rank", "stages", "weights", "gradients", "masters", "moments", "activations", "logits", "buffers", "total")
TABLES = {
    "estimate": TextTable((*ESTIMATE, "peak at"), [[str(1000 + n) for n in range(11)]]),
    "partition": TextTable(
        (*_TITLES, "MiB to train"),
        [["0", "model.vision_tower.encoder.layers.0-1, model.projector", "1,097,448", "0.01", "16.8", "51", "4", "18"]],
        left=(1,),
    ),
    "partition of tp": TextTable(
        (*_TITLES, *_OF_RANKS),
        [["0", "model.language_model.embed_tokens", "1", "2", "3", "4", "5", "6", "7"]],
        left=(1,),
    ),
    "plan": TextTable(
        PLAN, [["1", "64,16,128", "3", "interleaved", "1,024 of 16", "some", "1,024.55", "123,456.7", "100.0 %"]]
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_commands_fit_80_columns_without_a_cut_word(shown, name):
    table = TABLES[name]
    lines = shown(table)
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    pieces = [piece for text in (*table.titles, *table.rows[0]) for piece in re.findall(r"[^ .]+\.?|\.", text)]
    for piece in (text for text in pieces if text.strip(".,").isalpha() or "_" in text):
        assert any(piece in word for word in words), piece
    for cell in table.rows[0]:
        assert cell.replace(" ", "") in "".join(words) or "." in cell, cell


def test_columns_that_do_not_fit_follow_beside_the_first_one(shown):
    lines = [line.split() for line in shown(TABLES["estimate"])]
    assert ["1000", *map(str, range(1001, 1008))] in lines
    assert ["rank", "buffers", "total", "peak", "at"] in lines
    assert ["1000", "1008", "1009", "1010"] in lines


def test_names_are_folded_at_dots(shown):
    lines = [line.split() for line in shown(TABLES["partition"])]
    names = [line[1] if line[0] == "0" else line[0] for line in lines if "." in "".join(line)]
    assert "".join(names) == "model.vision_tower.encoder.layers.0-1,model.projector"
    assert all(name.endswith((".", ",")) for name in names[:-1])


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
