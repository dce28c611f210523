"""What every command shares: errors in two lines, exit codes, help, completion."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from inspect import getdoc
from typing import get_args, get_type_hints

import pytest
import typer
from support import ROOT

from hybridpp.cli import main
from hybridpp.cli.app import COMMANDS
from hybridpp.cli.command import Command, CommandGroup
from hybridpp.cli.commands.model_options import ModelOptions
from hybridpp.cli.estimate_flags import OPTIMIZERS
from hybridpp.errors import ConfigError
from hybridpp.estimate import DEVICES

PATHS = [
    [*([entry.name] if isinstance(entry, CommandGroup) else []), command.name]
    for entry in COMMANDS
    for command in (entry.commands if isinstance(entry, CommandGroup) else [entry])
]
BY_PATH = {
    tuple(path): command
    for path, command in zip(
        PATHS,
        (one for entry in COMMANDS for one in (entry.commands if isinstance(entry, CommandGroup) else [entry])),
        strict=True,
    )
}


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ([], ["missing command.", "See hybridpp --help."]),
        (["brew"], ["hybridpp has no command 'brew'.", "Use one of run, doctor, estimate, plan, profile, "]),
        (["checkpoint"], ["missing command.", "See hybridpp checkpoint --help."]),
        (["checkpoint", "brew"], ["hybridpp checkpoint has no command 'brew'.", "Use one of list, verify, show, "]),
        (["partition", "--model", "x"], ["missing option '--pp-size'.", "See hybridpp partition --help."]),
        (["partition", "--zzz"], ["no such option: --zzz.", "See hybridpp partition --help."]),
        (
            ["partition", "--model", "x", "--pp-size", "0"],
            [
                "invalid value for '--pp-size': '0' is not an integer of at least 1.",
                "See hybridpp partition --help.",
            ],
        ),
        (
            ["partition", "--model", "x", "--pp-size", "2", "--zero-stage", "7"],
            ["invalid value for '--zero-stage': '7' is not one of '0', '1', '2', '3'.", "See hybridpp partition "],
        ),
        (
            ["partition", "--model", "x", "--pp-size", "2", "--layers-per-stage", "1,b"],
            [
                "--layers-per-stage takes integers of at least 1, separated by commas: got 'b'.",
                "Write them as in 1,2,4.",
            ],
        ),
        (
            ["partition", "--model", "x", "--pp-size", "2", "--split-points", "a.b"],
            [
                "--split-points takes NAME:before or NAME:after, separated by commas: got 'a.b'.",
                "Pass the names of blocks, as model.layers.4:before.",
            ],
        ),
        (
            ["schedule", "check", "none.csv"],
            ["none.csv cannot be read: no such file or directory.", "See hybridpp schedule --help."],
        ),
    ],
    ids=lambda value: " ".join(value) if value and value[0][:1].islower() else None,
)
def test_an_error_is_two_lines_and_exit_code_2(capsys, arguments, lines):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    rule, way_out = printed.err.splitlines()
    # Versions of click quote the option.
    assert re.sub(r"no such option '(\S+)'", r"no such option: \1", rule) == f"hybridpp: {lines[0]}"
    assert way_out.startswith(lines[1])


def test_a_file_that_may_not_be_read_is_two_lines(capsys, tmp_path):
    folder = tmp_path / "plan.csv"
    folder.mkdir()
    assert main(["schedule", "check", str(folder)]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"hybridpp: {folder} cannot be read: is a directory."


def test_what_a_command_did_not_expect_keeps_its_traceback(monkeypatch):
    def fail(arguments):
        raise KeyError("a defect")

    monkeypatch.setattr("hybridpp.cli.schedule.run", fail)
    with pytest.raises(KeyError, match="a defect"):
        main(["schedule"])


def test_ctrl_c_is_one_line_and_exit_code_130(capsys, monkeypatch):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("hybridpp.cli.schedule.run", interrupt)
    assert main(["schedule"]) == 130
    assert capsys.readouterr() == ("", "hybridpp: interrupted (Ctrl-C).\n")


def test_a_file_error_of_a_command_is_two_lines(capsys, monkeypatch):
    def fail(arguments):
        raise PermissionError(13, "Permission denied", "/x/y")

    monkeypatch.setattr("hybridpp.cli.schedule.run", fail)
    assert main(["schedule"]) == 2
    assert capsys.readouterr().err == ("hybridpp: /x/y: permission denied.\nCheck the path and its permissions.\n")


@pytest.mark.parametrize(("missing", "kind"), [("torch", ConfigError), ("torch.cuda", ConfigError), ("x", ImportError)])
def test_a_package_that_is_missing_is_two_lines(monkeypatch, tmp_path, missing, kind):
    (tmp_path / "needs_it.py").write_text(f"raise ModuleNotFoundError('no module', name={missing!r})")
    monkeypatch.syspath_prepend(tmp_path)
    text = (
        "hybridpp doctor needs the package torch, which is not installed. Run" if kind is ConfigError else "no module"
    )
    with pytest.raises(kind, match=text):
        replace(BY_PATH["doctor",], work="needs_it:run").call(None)


def test_a_problem_found_and_an_interrupt_have_their_exit_codes(monkeypatch):
    def found(arguments):
        raise typer.Exit(1)

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("hybridpp.cli.schedule.run", found)
    assert main(["schedule"]) == 1
    monkeypatch.setattr("hybridpp.cli.schedule.run", interrupted)
    assert main(["schedule"]) == 130


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_fits_a_screen_and_ends_with_examples_that_parse(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("hybridpp.cli.command.Command.call", lambda self, arguments: None)
    assert main([*path, "--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 60
    assert all(len(line) <= 80 and line[-1:] != "-" for line in text.partition("Examples:")[0].splitlines())
    examples = [line.strip() for line in text.partition("Examples:\n")[2].splitlines()]
    assert examples == list(BY_PATH[tuple(path)].examples)
    for example in examples:
        program, *arguments = example.split()
        assert program == "hybridpp"
        assert arguments[: len(path)] == path
        assert main(arguments) == 0


def texts_of_help():
    for path, command in BY_PATH.items():
        name = " ".join(path)
        yield name, getdoc(command.arguments).splitlines()[0]
        for option, hint in get_type_hints(command.arguments, include_extras=True).items():
            yield f"{name} {option}", hint.__metadata__[0].help
    yield from ((entry.name, entry.help) for entry in COMMANDS if isinstance(entry, CommandGroup))


def test_texts_of_help_are_sentences():
    texts = list(texts_of_help())
    assert len(texts) > 100
    fragments = [
        (where, text) for where, text in texts if not re.fullmatch(r"(?!Of )[A-Z]\S*( \S+){2,}\.", text, re.DOTALL)
    ]
    assert not fragments


def test_help_names_the_devices_and_optimizers_that_there_are(capsys):
    assert main(["estimate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{', '.join(DEVICES)}, or a profile's file" in text
    assert set(OPTIMIZERS) == set(get_args(get_type_hints(ModelOptions)["optimizer"]))


def test_help_tells_the_exit_codes(capsys):
    assert main(["--help"]) == 0
    assert "Exit codes: 0: done. 1: a problem was found" in " ".join(capsys.readouterr().out.split())


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"hybridpp \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize(("words", "found"), [("hybridpp sim", "simulate"), ("hybridpp checkpoint export --t", "--to")])
def test_shells_complete_commands_and_options(words, found):
    environment = {
        **os.environ,
        "_HYBRIDPP_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    command = [sys.executable, "-c", "from hybridpp.cli import main; main()"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [found]


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "schedule --help", "schedule 1f1b --stages 2 --microbatches 2"]
)
def test_output_that_cannot_be_written_is_two_lines(arguments):
    command = [sys.executable, "-c", "import sys; from hybridpp.cli import main; sys.exit(main())", *arguments.split()]
    with open("/dev/full", "w") as full:
        job = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert job.returncode == 2
    assert job.stderr.decode().splitlines()[0] == "hybridpp: the output cannot be written: no space left on device."
    assert job.stderr.decode().splitlines()[1:] == ["Free space, or send it to another file."]


def test_a_reader_that_stops_early_is_no_error():
    python = shlex.quote(sys.executable)
    command = f"{python} -m hybridpp schedule gpipe --stages 16 --microbatches 256 | head -c 10"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("rank 0  | ", "")


def test_names_of_commands_differ_and_their_arguments_are_frozen():
    assert len(BY_PATH) == len(PATHS)
    for command in BY_PATH.values():
        assert isinstance(command, Command)
        assert command.arguments.__dataclass_params__.frozen
