"""What is left of a job after each kind of end: processes, sockets, shared memory, temporary files.

    PYTHONPATH=.:plugins:tests python benchmarks/failures/leftovers.py [--only killed]

Each job is ``hybridpp run`` with two ranks, each with two workers that load data, on a host of its own (a network
namespace, see ``tests/two_hosts.py``), so that everything found there afterwards is the job's.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from recovery import SCRIPT
from two_hosts import Host, two_hosts

END_S, SETTLE_S = 200.0, 20.0
ENDLESS = ("--steps", "1000000", "--pause", "0.02")


class LeftoverJob:
    """A job on a host."""

    def __init__(self, host: Host, *arguments: str):
        self.host, self.path = host, Path(tempfile.mkdtemp(prefix="leftovers-"))
        self.temporary = self.path / "temporary"
        self.temporary.mkdir()
        options = ["--nproc-per-node", "2", SCRIPT, self.path, "--workers", "2", "--timeout", "20", *arguments]
        self.launcher = host.start(
            sys.executable, "-m", "hybridpp", "run", *options,
            env={"TMPDIR": str(self.temporary)}, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def begun(self) -> "LeftoverJob":
        """When it has done some steps."""
        losses = self.path / "losses.jsonl"
        while not (losses.exists() and '"step": 5' in losses.read_text()):
            if self.launcher.poll() is not None:
                raise SystemExit(f"the job ended early:\n{self.launcher.communicate()[1]}")
            time.sleep(0.05)
        return self

    def processes(self) -> list[psutil.Process]:
        """All processes of the host, but for its first two."""
        first = psutil.Process(self.host.pid)
        family = {first.pid, *(child.pid for child in first.children() if child.name() == "cat")}
        space = pid_space(first.pid)
        return [each for each in psutil.process_iter() if pid_space(each.pid) == space and each.pid not in family]

    def rank(self, number: int) -> psutil.Process:
        """A rank's process: Python with -u; workers are its children, with the same command."""
        ranks = [each for each in self.processes() if "-u" in each.cmdline() and "-u" not in each.parent().cmdline()]
        return sorted(ranks, key=lambda each: each.pid)[number]

    def left(self) -> list[str]:
        """What is there, after a while for the kernel."""
        until = time.monotonic() + SETTLE_S
        while (found := self._found()) and time.monotonic() < until:
            time.sleep(0.2)
        return found

    def _found(self) -> list[str]:
        processes = [
            f"process {' '.join(each.cmdline()[:4]) or each.name()}" for each in self.processes() if is_alive(each)
        ]
        # State 06 is TIME_WAIT, which the kernel keeps for a minute after every connection.
        tables = (
            "for t in tcp tcp6; do tail -n +2 /proc/net/$t; done | awk '$4 != \"06\"'; grep hybridpp /proc/net/unix; "
            "ls /dev/shm; true"
        )
        sockets = [f"socket or shared memory {line.strip()}" for line in self.host.run("sh", "-c", tables).splitlines()]
        return processes + sockets + [f"file {path.name}" for path in self.temporary.iterdir()]


def pid_space(pid: int) -> str:
    """Name of the namespace of a process's children."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def normal(host: Host) -> LeftoverJob:
    return LeftoverJob(host, "--steps", "8", "--asynchronous")


def failed(host: Host) -> LeftoverJob:
    return LeftoverJob(host, "--steps", "4", "--break-at", "end")


def killed(host: Host) -> LeftoverJob:
    job = LeftoverJob(host, *ENDLESS).begun()
    job.rank(1).kill()
    return job


def killed_with_stopped_workers(host: Host) -> LeftoverJob:
    job = LeftoverJob(host, *ENDLESS).begun()
    rank = job.rank(1)
    for worker in rank.children():
        worker.suspend()
    rank.kill()
    return job


def terminated(host: Host) -> LeftoverJob:
    return signalled(host, signal.SIGTERM)


def interrupted(host: Host) -> LeftoverJob:
    """Ctrl-C: SIGINT to all processes of the terminal, here to all of the host."""
    job = LeftoverJob(host, *ENDLESS).begun()
    for process in job.processes():
        process.send_signal(signal.SIGINT)
    return job


def signalled(host: Host, number: signal.Signals) -> LeftoverJob:
    job = LeftoverJob(host, *ENDLESS).begun()
    launcher = min(job.processes(), key=lambda each: each.create_time())
    launcher.send_signal(number)
    return job


def hung(host: Host) -> LeftoverJob:
    job = LeftoverJob(host, *ENDLESS, "--watchdog", "4").begun()
    job.rank(1).suspend()
    return job


def hung_in_a_loader(host: Host) -> LeftoverJob:
    job = LeftoverJob(host, *ENDLESS, "--watchdog", "4").begun()
    for worker in job.rank(1).children():
        worker.suspend()
    return job


ENDS: tuple[Callable[[Host], LeftoverJob], ...] = (
    normal, failed, killed, killed_with_stopped_workers, terminated, interrupted, hung, hung_in_a_loader,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="ends whose names have this text")
    only, is_clean = parser.parse_args().only, True
    for end in ENDS:
        if only not in end.__name__:
            continue
        with two_hosts() as (host, _):
            host.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
            job = end(host)
            _, printed = job.launcher.communicate(timeout=END_S)
            left = job.left()
            is_clean &= not left
            print(f"{end.__name__:28} exit {job.launcher.returncode}: {left or 'nothing'} left", flush=True)
            if left:
                print(printed)
            shutil.rmtree(job.path)
    return not is_clean


if __name__ == "__main__":
    sys.exit(main())
