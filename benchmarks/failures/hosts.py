"""Jobs of two hosts: network namespaces joined by a cable, which is cut and slowed down. It needs no privileges.

    PYTHONPATH=.:plugins:tests python benchmarks/failures/hosts.py equal  # torchrun and hybridpp run, pp and dp across
    PYTHONPATH=.:plugins:tests python benchmarks/failures/hosts.py cut    # the cable is pulled in the middle of a step
    PYTHONPATH=.:plugins:tests python benchmarks/failures/hosts.py down   # a host goes down, and is started again
    PYTHONPATH=.:plugins:tests python benchmarks/failures/hosts.py frozen # all processes of a host are stopped
    PYTHONPATH=.:plugins:tests python benchmarks/failures/hosts.py slow   # 1, 10 and 100 Mbit/s
    PYTHONPATH=.:plugins:tests python benchmarks/failures/hosts.py places # the cable is pulled at places of a job
    PYTHONPATH=.:plugins:tests python benchmarks/failures/hosts.py back   # it is out for some seconds, and comes back
    PYTHONPATH=.:plugins:tests python benchmarks/failures/hosts.py weak   # it is slow, and loses packets; equal bits?
    PYTHONPATH=.:plugins:tests python benchmarks/failures/hosts.py far    # it takes time, and loses packets at random
    PYTHONPATH=.:plugins:tests python benchmarks/failures/hosts.py noise  # foreign bytes on all ports of a job

Each host has its own address, name, processes and ``/etc/hosts`` (see ``tests/two_hosts.py``); the files are shared, as
those of a cluster are. Runs are ``tests/scripts/recovering.py``, as in ``recovery.py``.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from far_link import far_link
from processes import RankFailed, run_script
from recovery import SCRIPT, Job, clean
from torch import nn
from two_hosts import Host, on_hosts, two_hosts

from hybridpp import Booster, DistCoordinator, HybridParallelPlugin, launch_from_torch
from hybridpp.cluster import current_world
from hybridpp.timeline import transfers

LAUNCHERS = {"hybridpp run": ["hybridpp", "run"], "torchrun": ["torch.distributed.run"]}
END_S = 300.0


class HostJob(Job):
    """A job of recovering.py on two hosts; ``processes`` are their launchers."""

    def __init__(
        self,
        hosts: Sequence[Host],
        *arguments: object,
        launcher: str = "hybridpp run",
        ranks: int = 2,
        restarts: int = 0,
        endpoint: str = "",
    ):
        self.path = Path(tempfile.mkdtemp(prefix="hosts-"))
        endpoint = endpoint or f"{hosts[0].address}:29500"
        self._options = f"--nnodes 2 --nproc-per-node {ranks} --max-restarts {restarts} --rdzv-backend c10d".split()
        self._options += ["--rdzv-id", "job", "--rdzv-endpoint", endpoint]
        self._module, self._arguments = LAUNCHERS[launcher], arguments
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.ends: dict[str, float] = {}
        for host in hosts:
            self.start(host)
        self.process = self.processes[hosts[0].name]

    def start(self, host: Host) -> None:
        """Start the launcher of a host, once more if it has ended."""
        self.process = host.start(
            sys.executable, "-m", *self._module, *self._options, SCRIPT, self.path, *map(str, self._arguments),
            stdout=subprocess.DEVNULL, stderr=open(self.errors(host), "a"),  # noqa: SIM115
        )  # fmt: skip
        self.processes[host.name] = self.process

    def start_again(self, hosts: Sequence[Host], since: float, timeout_s: float = END_S) -> int:
        """Start launchers that fail, as a cluster would, until all have ended in order; how often that was."""
        num_starts = 0
        while time.monotonic() - since < timeout_s:
            codes = {host.name: self.processes[host.name].poll() for host in hosts}
            for host in hosts:
                if codes[host.name] not in (None, 0):
                    self.start(host)
                    num_starts += 1
            if all(code == 0 for code in codes.values()):
                break
            time.sleep(0.5)
        return num_starts

    def errors(self, host: Host) -> Path:
        """What a host prints."""
        return self.path / f"{host.name}.txt"

    def wait_for_ends(self, since: float, timeout_s: float = END_S) -> dict[str, tuple[int | None, float]]:
        """Exit codes of the launchers, and the seconds to their ends; None: it goes on after ``timeout_s``."""
        ends: dict[str, tuple[int | None, float]] = {}
        while len(ends) < len(self.processes) and time.monotonic() - since < timeout_s:
            for name, process in self.processes.items():
                if name not in ends and process.poll() is not None:
                    ends[name] = process.returncode, time.monotonic() - since
            time.sleep(0.05)
        return {name: ends.get(name, (None, timeout_s)) for name in self.processes}


def equal() -> None:
    expected = clean("--steps", 8)
    names = {
        "": lambda host, other: {host.name: host.address, other.name: other.address},
        ", own names are 127.0.1.1": lambda host, other: {host.name: "127.0.1.1", other.name: other.address},
        ", names unknown": lambda host, other: {},
    }
    cases = [("torchrun", 2, ""), *(("hybridpp run", 2, name) for name in names), ("hybridpp run", 1, "")]
    for launcher, ranks, known in cases:
        with two_hosts() as hosts:
            for host, other in (hosts, hosts[::-1]):
                host.set_names({"localhost": "127.0.0.1", **names[known](host, other)})
            endpoint = f"{hosts[0].address if 'unknown' in known else hosts[0].name}:29500"
            job = HostJob(hosts, "--steps", 8, launcher=launcher, ranks=ranks, endpoint=endpoint)
            ends = job.wait_for_ends(time.monotonic())
            found, (losses, _) = job.losses(), expected
            apart = max(abs(float.fromhex(found.get(step, "inf")) - float.fromhex(losses[step])) for step in losses)
            is_same = job.result() == expected
            bits = f", {'0 bits' if is_same else 'BITS'} of losses, weights and state differ" if ranks == 2 else ""
            axis = "replicas" if ranks == 2 else "stages"
            print(
                f"{launcher}, {axis} across hosts{known}: exit {[code for code, _ in ends.values()]}, losses differ by "
                f"{apart:.1e}{bits}",
                flush=True,
            )
            if any(code for code, _ in ends.values()):
                show(job, hosts)


def show(job: HostJob, hosts: Sequence[Host]) -> None:
    """Print what the hosts printed."""
    for host in hosts:
        print(
            f"  {host.name}:\n" + "".join(f"    {line}\n" for line in job.errors(host).read_text().splitlines()[-30:])
        )


CASES = {
    f"{across}{limit}": (ranks, watchdog)
    for across, ranks in (("replicas", 2), ("stages", 1))
    for limit, watchdog in (("-watched", 10), ("", None))
}


def lost_host(what: str, names: Sequence[str], number: int) -> None:
    """The cable is pulled (``cut``), a host goes down (``down``), or all of its processes are stopped (``frozen``).

    It is the host of this number; 80 s later it comes back, and what has ended is started again.
    """
    for ranks, watchdog in (CASES[name] for name in names):
        limits = ["--timeout", 60, "--watchdog", watchdog] if watchdog else ["--timeout", 15]
        arguments = ["--steps", 60, "--save-every", 5, "--pause", 0.02]
        expected = clean(*arguments, ranks=2 * ranks)
        with two_hosts() as hosts:
            gone = hosts[number]
            job = HostJob(hosts, *arguments, *limits, ranks=ranks, restarts=3)
            job.wait_for_step(12)
            running, lost = processes_of(job), processes_of(job, gone)
            frozen = [process for process in running if process in lost and what == "frozen"]
            running, start = [process for process in running if process not in frozen], time.monotonic()
            if what == "frozen":
                # Nsenter stops itself where what it has started does.
                lost = [process for process in lost if process.pid != job.processes[gone.name].pid]
                for process in lost:
                    process.suspend()
            else:
                gone.set_link(up=False)
            if what == "down":
                job.processes[gone.name].kill()
                for process in lost:
                    process.kill()
            ends = wait_for_ends(running, start)
            launchers = job.wait_for_ends(start, 80.0)
            happens = {"cut": "cable pulled", "down": f"{gone.name} goes down", "frozen": f"{gone.name} is stopped"}[
                what
            ]
            print(
                f"{'replicas' if ranks == 2 else 'stages'} across hosts, {happens}, "
                f"{f'watchdog_s={watchdog}' if watchdog else 'timeout_s=15'}: ranks ended after {ends}; "
                f"{told(launchers)}",
                flush=True,
            )
            show(job, hosts)
            if what == "frozen":
                for process in lost:
                    with suppress(psutil.NoSuchProcess):
                        process.resume()
                job.processes[gone.name].send_signal(signal.SIGCONT)
                print(f"  the stopped ranks ended after {wait_for_ends(frozen, time.monotonic())}", flush=True)
            else:
                gone.set_link(up=True)
            back = time.monotonic()
            num_starts = job.start_again(hosts, back)
            launchers = job.wait_for_ends(back, 0.1 + time.monotonic() - back)
            resumed = [line["resumed"] for line in job.lines() if "resumed" in line]
            same = "0 bits differ" if job.result() == expected else "DIFFERS"
            starts = f"{num_starts} launchers started again, " if num_starts else ""
            print(f"  it is back: {starts}{told(launchers)}, resumed at {resumed}, {same}", flush=True)
            if any(code for code, _ in launchers.values()):
                show(job, hosts)


def told(launchers: dict[str, tuple[int | None, float]]) -> str:
    """How launchers ended."""
    return ", ".join(
        f"{name} goes on" if code is None else f"{name} ended with {code} after {seconds:.0f} s"
        for name, (code, seconds) in launchers.items()
    )


def processes_of(job: HostJob, host: Host | None = None) -> list[psutil.Process]:
    """The rank processes of a job; with a host, all of its processes there."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            command = process.cmdline()
            is_rank = "-u" in command and command[0] != "nsenter"
            is_there = host is None or same_network(process.pid, host.pid)
            if str(job.path) in command and is_there and (is_rank or host is not None):
                found.append(process)
    return found


def same_network(pid: int, other: int) -> bool:
    return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/proc/{other}/ns/net").st_ino


def wait_for_ends(running: Sequence[psutil.Process], since: float) -> str:
    """Seconds to the end of each process."""
    ends: dict[psutil.Process, float] = {}
    while len(ends) < len(running) and time.monotonic() - since < END_S:
        for process in running:
            if process not in ends and not (process.is_running() and process.status() != psutil.STATUS_ZOMBIE):
                ends[process] = time.monotonic() - since
        time.sleep(0.05)
    left = len(running) - len(ends)
    return ", ".join(f"{seconds:.0f}" for seconds in ends.values()) + " s" + (f", {left} GO ON" if left else "")


def slow(rates: Sequence[float]) -> None:
    """Two stages on two hosts, whose cable is slowed down in both directions."""
    for mbit_s in rates:
        with two_hosts() as hosts:
            for host in hosts:
                if mbit_s:
                    host.slow_down(mbit_s)
            environment = {
                "WORLD_SIZE": "2",
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29500",
                "LOCAL_RANK": "0",
            }
            ranks = [
                host.start(sys.executable, __file__, "rank", env=environment | {"RANK": str(rank)})
                for rank, host in enumerate(hosts)
            ]
            printed = [rank.communicate(timeout=END_S) for rank in ranks]
            errors = "".join(error for rank, (_, error) in zip(ranks, printed, strict=True) if rank.returncode)
            rate = f"{mbit_s:g}" if mbit_s else "any"
            print(f"{rate} Mbit/s: {printed[0][0].strip()}{errors}", flush=True)


PLACES = ("launch", "connect", "group", "trace", "1F2", "loader", "save", "resume")
HANGING, FOREIGN_BYTES = SCRIPT.with_name("hanging.py"), SCRIPT.with_name("foreign_bytes.py")


def places(names: Sequence[str]) -> None:
    """A rank's cable is pulled at a place of the job, without a watchdog and with one."""
    for name in names:
        for limits in (("watched=0", "timeout=15"), ("limit=5", "setup=6", "save=6", "timeout=60")):
            os.environ["FOLDER"] = tempfile.mkdtemp(prefix="hosts-")
            with two_hosts() as hosts:
                try:
                    job = run_script(
                        *(2, HANGING, "cut", "1", name, *limits), timeout_s=90, until_all_end=True, **on_hosts(hosts)
                    )
                except RankFailed as error:
                    print(f"{name}, {limits[0]}: HANGS\n{error}", flush=True)
                    continue
                seconds = time.time() - float(re.findall(r"HANGS ([\d.]+)", job.stdout)[0])
                told = [line for line in job.stderr.splitlines() if re.search("Error|suspect", line)]
                print(f"{name}, {limits[0]}: exit {job.returncode} after {seconds:.0f} s", flush=True)
                print("".join(f"    {line[:300]}\n" for line in told), flush=True)


def back(pauses: Sequence[float]) -> None:
    """The cable is out for some seconds in the middle of steps; the job must go on, and come to the same result."""
    arguments = ["--steps", 60, "--save-every", 5, "--pause", 0.02]
    expected = clean(*arguments)
    for seconds in pauses:
        with two_hosts() as hosts:
            job = HostJob(hosts, *arguments, "--timeout", 120, "--watchdog", 60)
            job.wait_for_step(12)
            hosts[1].set_link(up=False)
            time.sleep(seconds)
            before, start = max(job.losses()), time.monotonic()
            hosts[1].set_link(up=True)
            job.wait_for_step(before + 3)
            after = time.monotonic() - start
            launchers = job.wait_for_ends(time.monotonic())
            same = "0 bits differ" if job.result() == expected else "DIFFERS"
            print(f"out for {seconds:g} s: goes on {after:.0f} s after; {told(launchers)}, {same}", flush=True)
            if any(code for code, _ in launchers.values()):
                show(job, hosts)


# Mbit/s (0: any), and KB of the queue before the cable. One of 4 KB lets no larger packet through, however often it is
# sent, as where the hosts have different MTUs.
LINKS = ((0.0, None), (1.0, None), (0.2, None), (5.0, 32), (1.0, 32), (5.0, 4))


def weak(links: Sequence[tuple[float, int | None]] = LINKS) -> None:
    """Replicas across a cable that is slow, loses packets (no alarm, and the same result), or loses the large."""
    expected = clean(*OF_LINKS)
    for mbit_s, queue_kb in links:
        with two_hosts() as hosts:
            for host in hosts if mbit_s else ():
                host.slow_down(mbit_s, queue_kb)
            result = over_link(hosts, expected)
            link = f"{mbit_s:g} Mbit/s" if mbit_s else "any rate"
            lost = f", {sum(host.num_lost() for host in hosts)} packets lost" if mbit_s else ""
            print(f"{link}, queue of {queue_kb or 'any'} KB: {result}{lost}", flush=True)


# Milliseconds in each direction, and the share of packets that are lost.
FAR = ((0, 0.0), (50, 0.0), (200, 0.0), (0, 0.01), (50, 0.01), (10, 0.05))


def far() -> None:
    """Replicas across a link that takes time, and loses packets at random."""
    expected = clean(*OF_LINKS)
    for delay_ms, loss in FAR:
        with two_hosts() as hosts, far_link(hosts, delay_ms / 1e3, loss):
            print(f"{delay_ms} ms, {100 * loss:g} % lost: {over_link(hosts, expected)}", flush=True)


OF_LINKS = ("--steps", 20, "--save-every", 5)


def over_link(hosts: Sequence[Host], expected: object) -> str:
    """How a job ends whose replicas are on the hosts, and the median time of its steps."""
    job = HostJob(hosts, *OF_LINKS, "--timeout", 120, "--watchdog", 10)
    launchers = job.wait_for_ends(time.monotonic())
    times = [line["time"] for line in job.lines() if "step" in line]
    same = "0 bits differ" if job.result() == expected else "DIFFERS"
    step = statistics.median(after - before for before, after in pairwise(times)) if len(times) > 1 else 0.0
    if any(code for code, _ in launchers.values()):
        show(job, hosts)
    return f"{told(launchers)}, {same}, step {step:.2f} s"


def noise() -> None:
    """Foreign bytes reach all ports of a job of two hosts, from its start to its end."""
    arguments = ["--steps", 60, "--save-every", 5, "--pause", 0.1]
    for ranks in (2, 1):
        expected = clean(*arguments, ranks=2 * ranks)
        with two_hosts() as hosts:
            senders = [host.start(sys.executable, FOREIGN_BYTES, 40) for host in hosts]
            job = HostJob(hosts, *arguments, "--timeout", 60, "--watchdog", 20, ranks=ranks)
            start = time.monotonic()
            launchers = job.wait_for_ends(start)
            same = "0 bits differ" if job.result() == expected else "DIFFERS"
            sent = [sender.communicate()[0].strip() for sender in senders]
            print(f"{ranks} ranks per host: {told(launchers)} {same}; {'; '.join(sent)}", flush=True)
            print(f"  files that a pickle made: {list(Path().glob('PICKLED*'))}", flush=True)
            if any(code for code, _ in launchers.values()):
                show(job, hosts)


ROWS, WIDTH, NUM_MICROBATCHES = 64, 128, 4


def slow_rank() -> None:
    """A rank of :func:`slow`; rank 0 prints the median over steps of what its timeline shows."""
    launch_from_torch(backend="gloo", timeout_s=120, watchdog_s={"step": 30})
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    booster = Booster(
        plugin=HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=NUM_MICROBATCHES), device="cpu"
    )
    batch = {"x": torch.randn(NUM_MICROBATCHES * ROWS, WIDTH)}
    sample, optimizer = {"x": batch["x"][:ROWS]}, torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, *_ = booster.boost(model, optimizer, sample=sample, model_inputs={"input": "x"})
    rows = []
    for _ in range(8):
        with booster.record_timeline(model) as recording:
            booster.execute_pipeline(iter([batch]), model, lambda outputs, inputs: outputs.square().mean(), optimizer)
        optimizer.step()
        timeline = recording.timeline
        waits = sum(span.duration_ms for span in timeline.spans if not span.computes)
        gaps = [transfer.gap_ms for transfer in transfers(timeline)]
        busy_ms = sum(map(timeline.busy_ms, (0, 1)))
        rows.append((timeline.makespan_ms, busy_ms, waits, statistics.median(gaps), 100 * timeline.idle_share))
    if current_world().rank == 0:
        step, busy, waits, gap, idle = (statistics.median(column) for column in zip(*rows[2:], strict=True))
        message = ROWS * WIDTH * 4
        print(
            f"step {step:.0f} ms, in which both ranks together compute {busy:.0f} ms; a message of "
            f"{message * 8 / 1e6:.2f} Mbit arrives {gap:.0f} ms (median) after it was made; ranks are in messages for "
            f"{waits:.0f} ms; idle {idle:.0f} %"
        )
    DistCoordinator().destroy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whats = ("equal", "cut", "down", "frozen", "slow", "rank", "places", "back", "weak", "far", "noise")
    parser.add_argument("what", choices=whats)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, help="of cut, down and frozen")
    parser.add_argument("--host", type=int, choices=(0, 1), default=1, help="that is lost; 0 has the endpoint")
    parser.add_argument("--places", nargs="+", default=PLACES, choices=PLACES)
    parser.add_argument("--seconds", type=float, nargs="+", default=[3, 15], help="of back, without the cable")
    parser.add_argument(
        "--mbit", type=float, nargs="+", default=[0, 100, 10, 1], help="of slow, per second; 0: no limit"
    )
    options = parser.parse_args()
    calls = {
        "equal": equal,
        "cut": lambda: lost_host("cut", options.cases, options.host),
        "down": lambda: lost_host("down", options.cases, options.host),
        "frozen": lambda: lost_host("frozen", options.cases, options.host),
        "slow": lambda: slow(options.mbit),
        "rank": slow_rank,
        "places": lambda: places(options.places),
        "back": lambda: back(options.seconds),
        "weak": weak,
        "far": far,
        "noise": noise,
    }
    calls[options.what]()
