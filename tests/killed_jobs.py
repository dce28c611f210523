"""Jobs of which one rank is killed at a place (``scripts/dying.py``): how long the others live."""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from forked_jobs import forked_job
from processes import after_fork, free_port, interpret, print_to
from support import ROOT
from torch.distributed.run import main as torchrun

from hybridpp.cli.main import main as command

sys.path.insert(0, str(ROOT / "tests/scripts"))
import dying

SCRIPT = Path(dying.__file__)
_FORK = multiprocessing.get_context("fork")


class Ended(NamedTuple):
    """What became of a job.

    Attributes:
        seconds: from the kill to the end of the last survivor; infinite: it was there after ``patience_s``.
        codes: exit codes of the ranks, or of the launcher.
        printed: by the survivors.
    """

    seconds: float
    codes: list[int | None]
    printed: str


def by_hand(
    layout: str, place: str, victim: int, environment: Mapping[str, str] | None = None, patience_s: float = 60.0
) -> Ended:
    """Ranks that nobody looks after; the time from the kill to the end of the last survivor."""
    size = dying.LAYOUTS[layout]["ranks"]
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as output:
        variables = {"WORLD_SIZE": str(size), "MASTER_PORT": str(free_port()), **(environment or {})}

        def rank(number: int) -> None:
            after_fork()
            os.environ.update(variables, RANK=str(number))
            print_to(output.fileno(), output.fileno())
            interpret([str(SCRIPT), layout, place, str(victim), name])

        ranks = [_FORK.Process(target=rank, args=(number,)) for number in range(size)]
        for process in ranks:
            process.start()
        killed, last = Path(name, "killed"), time.monotonic()
        until = last + 3 * patience_s
        try:
            while running := [process for process in ranks if process.is_alive()]:
                wait([process.sentinel for process in running], 1.0)
                last = time.monotonic()
                if killed.exists():
                    until = min(until, last + patience_s)
                if last > until:
                    last = float("inf")
                    break
        finally:
            for process in ranks:
                process.kill()
                process.join()
        output.seek(0)
        printed = output.read()
        assert killed.exists(), f"{layout}, {place}, rank {victim}: nobody was killed\n{printed}"
        return Ended(last - float(killed.read_text()), [process.exitcode for process in ranks], printed)


def launched(
    layout: str,
    place: str,
    victim: int,
    environment: Mapping[str, str] | None = None,
    patience_s: float = 60.0,
    *,
    by_torchrun: bool = False,
) -> Ended:
    """Ranks of ``hybridpp run`` or torchrun; the time to the launcher's end, which comes after that of all ranks."""
    size = str(dying.LAYOUTS[layout]["ranks"])
    with tempfile.TemporaryDirectory() as name:
        arguments = ["--standalone", "--nproc-per-node", size, str(SCRIPT), layout, place, str(victim), name]
        main = torchrun if by_torchrun else command
        with forked_job(main, *([] if by_torchrun else ["run"]), *arguments, environment=environment) as job:
            job.process.join(2 * patience_s)
            last = time.monotonic() if job.process.exitcode is not None else float("inf")
            killed = Path(name, "killed")
            assert killed.exists(), f"{layout}, {place}, rank {victim}: nobody was killed\n{job.stderr}"
            return Ended(last - float(killed.read_text()), [job.process.exitcode], job.stderr)
