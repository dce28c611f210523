"""Ranks as processes: forked ones for functions and scripts, and torchrun as users call it."""

import contextlib
import gc
import io
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from support import ROOT

from hybridpp import launch

# Tests seed the others, and forked children have their state.
_DICE = random.SystemRandom()


class RankFailed(Exception):
    """A rank of :func:`run_ranks` raised, died or took too long."""


def _stay(rank: int) -> int:
    return rank


def run_ranks(
    function: Callable[[], Any],
    num_ranks: int,
    timeout_s: float = 60.0,
    address: str = "127.0.0.1",
    move: Callable[[int], int] = _stay,
    wait_s: float = 30.0,
) -> list[Any]:
    """Call ``function`` on ranks that are forked gloo processes; the results, in rank order.

    ``move`` is called first, with the rank; it returns the local rank. ``address`` is that of the rank 0.
    After ``wait_s``, a rank that waits for another one gives up.

    Raises:
        RankFailed: with the traceback of the first rank that failed, or on a hang.
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    ranks = []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(function, rank, num_ranks, (address, port, wait_s), move, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return [_result(rank, pipe, timeout_s) for rank, (_, pipe) in enumerate(ranks)]
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()


def run_forked(function: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """What ``function`` returns in a forked child, which has imported what this process has.

    Raises:
        RankFailed: with the child's traceback, or on a hang.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(function, theirs))
    child.start()
    theirs.close()
    try:
        return _result(0, ours, timeout_s)
    finally:
        child.kill()
        child.join()


def _child(function: Callable[[], Any], pipe: Connection) -> None:
    after_fork()
    _send_result(function, pipe)


def _rank(
    function: Callable[[], Any],
    rank: int,
    num_ranks: int,
    address: tuple[str, int, float],
    move: Callable[[int], int],
    pipe: Connection,
) -> None:
    after_fork()
    try:
        local_rank = move(rank)
        host, port, wait_s = address
        launch(rank, num_ranks, host, port, backend="gloo", timeout_s=wait_s, local_rank=local_rank)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    try:
        _send_result(function, pipe)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _send_result(function: Callable[[], Any], pipe: Connection) -> None:
    try:
        buffer = io.BytesIO()
        torch.save(function(), buffer)
        pipe.send((True, buffer.getvalue()))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def after_fork() -> None:
    """Call it first in every forked child."""
    # A forked child hangs in OpenMP if the parent used it, unless it says first that it needs one thread.
    torch.set_num_threads(1)
    # What it inherits stays until its end: a search for garbage among that takes longer than most that is done here.
    gc.freeze()
    # Nor can a forked child use CUDA, where the parent did.
    torch.cuda.is_available = lambda: False


def free_port() -> int:
    """A port on which a rank can listen in a moment.

    It is none that systems give to connections, which those of tests that run beside could take meanwhile; and each
    worker of pytest-xdist has its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
    while True:
        port = 20_000 + 1_000 * worker + _DICE.randrange(1_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _result(rank: int, pipe: Connection, timeout_s: float) -> Any:
    try:
        if not pipe.poll(timeout_s):
            raise RankFailed(f"rank {rank} gave no result within {timeout_s} s")
        done, value = pipe.recv()
    except EOFError:
        raise RankFailed(f"rank {rank} died") from None
    if not done:
        raise RankFailed(f"rank {rank} raised:\n{value}")
    return torch.load(io.BytesIO(value), weights_only=False)


def run_script(
    num_ranks: int,
    script: Path,
    *arguments: str,
    timeout_s: float = 100.0,
    cwd: Path = ROOT,
    until_all_end: bool = False,
    address: str = "127.0.0.1",
    move: Callable[[int], int] = _stay,
) -> subprocess.CompletedProcess[str]:
    """Run a script as :func:`torchrun` does, on ranks that are forked, for where their start is not the point.

    A fork has imported what takes a new interpreter 6 s. A warning ends its rank, as it ends a test. The first rank
    that fails ends the others, unless ``until_all_end``. ``address`` and ``move`` are as in :func:`run_ranks`.
    """
    context = multiprocessing.get_context("fork")
    job = os.environ | {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    job |= {"MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    command = [str(script), *arguments]

    def run(rank: int, *parts: Any) -> None:
        os.environ["LOCAL_RANK"] = str(move(rank))
        _script(*parts)

    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        ranks = []
        # A store in this process looks up who connects to it, and glibc's lock for that stays locked in whatever is
        # forked meanwhile: no rank begins before all are forked.
        are_forked = context.Event()
        for rank in range(num_ranks):
            environment = job | {"RANK": str(rank)}
            files = (stdout.fileno(), stderr.fileno())
            ranks.append(context.Process(target=run, args=(rank, are_forked, command, environment, cwd, *files)))
            ranks[-1].start()
        are_forked.set()
        try:
            deadline = time.monotonic() + timeout_s
            # The first that fails ends the job: the others may wait for it.
            while (running := [rank for rank in ranks if rank.is_alive()]) and (
                until_all_end or not any(rank.exitcode for rank in ranks)
            ):
                if not wait([rank.sentinel for rank in running], deadline - time.monotonic()):
                    raise RankFailed(f"{script} took longer than {timeout_s} s\n{_text(stdout)}\n{_text(stderr)}")
        finally:
            for process in ranks:
                process.kill()
                process.join()
        codes = {abs(process.exitcode or 0) for process in ranks}
        return subprocess.CompletedProcess(command, max(codes), _text(stdout), _text(stderr))


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _script(
    are_forked: Event, command: list[str], environment: dict[str, str], cwd: Path, stdout: int, stderr: int
) -> None:
    after_fork()
    are_forked.wait()
    os.environ.update(environment)
    os.chdir(cwd)
    print_to(stdout, stderr)
    interpret(command)


def print_to(stdout: int, stderr: int) -> None:
    """Let this process, and those that it starts, print to the files with these numbers."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdout, sys.stderr = open(stdout, "a", buffering=1), open(stderr, "a", buffering=1)  # noqa: SIM115


def interpret(command: Sequence[str]) -> None:
    """Do in a forked child what Python does with these arguments: a script, or ``-m`` and a module, and its own."""
    is_module = command[0] == "-m"
    sys.argv = list(command[is_module:])
    # The parent's launches have left hooks, torch's among them.
    sys.excepthook = sys.__excepthook__
    sys.path.insert(0, os.getcwd() if is_module else str(Path(command[0]).parent))
    try:
        if is_module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except Exception:
        # As the interpreter does; multiprocessing would print the traceback itself.
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def torchrun(
    num_ranks: int,
    script: Path,
    *arguments: str,
    timeout_s: float = 100.0,
    cwd: Path = ROOT,
    launcher: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a script as users do, from a checkout that is not installed; ``launcher`` is what torchrun is told."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += launcher
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "plugins", "tests"))
    return subprocess.run(
        [*command, str(script), *arguments],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=cwd,
    )


def has_ended(pid):
    """Whether a process has ended; the one that it is left to may not wait for it, or at once."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
