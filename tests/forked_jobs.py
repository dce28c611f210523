"""Commands that start ranks with torchrun's agent, in forks: a job of two ranks spends 10 s on interpreters that start.

All but the start is real: the agent and its store, its signals to the ranks, and ranks that run a script in a session
of their own. Where the start is the point: ``test_doctor.py`` and ``test_run.py`` of the command line.
"""

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import IO, Any

from processes import after_fork, interpret, print_to
from support import ROOT
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

_FORK = multiprocessing.get_context("fork")


class ForkedJob:
    """A command that runs in a forked child, and what it has printed so far."""

    def __init__(self, process: Any, stdout: IO[str], stderr: IO[str]):
        self.process, self._stdout, self._stderr = process, stdout, stderr

    def end(self, timeout_s: float) -> int:
        """Wait for its end; the exit code."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"runs after {timeout_s} s\n{self.stdout}\n{self.stderr}"
        code: int = self.process.exitcode
        return code

    @property
    def stdout(self) -> str:
        """What was printed, as long as the block lasts."""
        return _text(self._stdout)

    @property
    def stderr(self) -> str:
        return _text(self._stderr)


def _text(file: IO[str]) -> str:
    # Not by the file's own position, which the children share.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


@contextmanager
def forked_job(
    main: Callable[[list[str]], int | None],
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    move: Callable[[], None] = lambda: None,
) -> Iterator[ForkedJob]:
    """``main(arguments)`` in a forked child, which calls ``move()`` first; the job is killed at the end of the block.

    ``main`` may call what calls torchrun's agent. Ranks are forked, too.
    """
    variables = os.environ | dict(environment or {})
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:

        def launcher() -> None:
            after_fork()
            move()
            os.environ.clear()
            os.environ.update(variables)
            os.chdir(cwd)
            tempfile.tempdir = None  # of the environment
            print_to(stdout.fileno(), stderr.fileno())
            with _forked_ranks():
                sys.argv = [main.__module__, *arguments]
                code = main(list(arguments))
            sys.exit(code)

        process = _FORK.Process(target=launcher)
        process.start()
        try:
            yield ForkedJob(process, stdout, stderr)
        finally:
            process.kill()
            process.join()


@contextmanager
def _forked_ranks() -> Iterator[None]:
    """Let torchrun's agent in this process start ranks as forks; they are killed at the end.

    A process of one thread forks them: the agent has more, whose locks would stay locked in what is forked.
    """
    server, connection = _server()

    def popen(handler: SubprocessHandler, command: Sequence[str], variables: dict[str, str]) -> _Interpreter:
        assert command[:2] == (sys.executable, "-u"), command
        return _Interpreter(connection, command[2:], variables)

    SubprocessHandler._popen = popen
    try:
        yield
    finally:
        _end(server, connection)


def keep_a_young_process() -> None:
    """Fork a process that has imported what this one has, and done nothing else, for :func:`run_young`."""
    _young.append(_server())


def let_young_processes_go() -> None:
    """Call it before this process ends, which waits for its children."""
    while _young:
        _end(*_young.pop())


def run_young(script: Path, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a script in a fork of the process that was kept; both are gone afterwards.

    For what a process must do first: its backward passes know the devices that there were at the first one.
    """
    server, connection = _young.pop()
    command = [str(script), *arguments]
    with tempfile.NamedTemporaryFile("w+") as output:
        try:
            run = _Interpreter(connection, command, dict(os.environ), output.name)
            run.wait(timeout_s)
            return subprocess.CompletedProcess(command, run.poll() or 0, _text(output))
        finally:
            _end(server, connection)


_young: list[tuple[Any, Connection]] = []


def _server() -> tuple[Any, Connection]:
    """A process that forks what is asked for, and the way to ask."""
    ours, theirs = _FORK.Pipe()
    server = _FORK.Process(target=_serve, args=(ours, theirs))
    server.start()
    theirs.close()
    return server, ours


def _end(server: Any, connection: Connection) -> None:
    # To close it does not do: what was forked meanwhile may have it, too.
    connection.send(None)
    connection.close()
    server.join()


class _Interpreter:
    """What torchrun's agent uses of a :class:`subprocess.Popen`."""

    def __init__(self, server: Connection, command: Sequence[str], variables: dict[str, str], output: str = ""):
        self._server = server
        server.send((command, variables, output))
        self.pid: int = server.recv()

    def poll(self) -> int | None:
        self._server.send(self.pid)
        code: int | None = self._server.recv()
        return code

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)


def _serve(ours: Connection, theirs: Connection) -> None:
    """Fork interpreters, and tell their exit codes, until who asks is gone."""
    ours.close()  # so that its end is seen
    started: dict[int, Any] = {}
    with suppress(EOFError):
        while (request := theirs.recv()) is not None:
            if isinstance(request, int):
                theirs.send(started[request].exitcode)
            else:
                leads = _FORK.Event()
                process = _FORK.Process(target=_run, args=(leads, *request))
                process.start()
                leads.wait()
                assert process.pid is not None
                started[process.pid] = process
                theirs.send(process.pid)
    for process in started.values():
        process.kill()
        process.join()


def _run(leads: Event, command: Sequence[str], variables: dict[str, str], output: str) -> None:
    os.setsid()
    leads.set()  # a session, to which the agent sends its signals
    after_fork()
    if output:
        with open(output, "a") as file:
            print_to(file.fileno(), file.fileno())
    os.environ.clear()
    os.environ.update(variables)
    # The parent's are not this interpreter's.
    atexit._clear()
    try:
        interpret(command)
    finally:
        # As the interpreter does; a forked process has no such end.
        threading._shutdown()
        atexit._run_exitfuncs()
