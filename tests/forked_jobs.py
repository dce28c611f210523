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
    ours, theirs = _FORK.Pipe()
    server = _FORK.Process(target=_serve, args=(ours, theirs))
    server.start()
    theirs.close()
    SubprocessHandler._popen = lambda handler, command, variables: _Rank(ours, command, variables)
    try:
        yield
    finally:
        ours.close()
        server.join()


class _Rank:
    """What the agent uses of a :class:`subprocess.Popen`."""

    def __init__(self, server: Connection, command: Sequence[str], variables: dict[str, str]):
        assert command[:2] == (sys.executable, "-u"), command
        self._server = server
        server.send((command[2:], variables))
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
    """Start ranks, and tell their exit codes, until the agent is gone."""
    ours.close()  # so that the end of the agent is seen
    ranks: dict[int, Any] = {}
    with suppress(EOFError):
        while True:
            request = theirs.recv()
            if isinstance(request, int):
                theirs.send(ranks[request].exitcode)
            else:
                rank = _FORK.Process(target=_rank, args=request)
                rank.start()
                assert rank.pid is not None
                ranks[rank.pid] = rank
                theirs.send(rank.pid)
    for rank in ranks.values():
        rank.kill()
        rank.join()


def _rank(command: Sequence[str], variables: dict[str, str]) -> None:
    os.setsid()
    after_fork()
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
