"""What becomes of a run whose ranks are killed, or that is told to stop, under ``hybridpp run``.

    python benchmarks/failures/recovery.py kills    # each of 4 ranks at 7 places: 28 runs
    python benchmarks/failures/recovery.py seeded   # 20 kills at random in 300 steps of one run
    python benchmarks/failures/recovery.py stops    # SIGTERM and SIGUSR1 at 20 random times
    python benchmarks/failures/recovery.py fewer    # goes on with 2 ranks where 4 were
    python benchmarks/failures/recovery.py frozen   # the launcher is stopped (SIGSTOP), and goes on later

Every run is ``tests/scripts/recovering.py``: 2 stages and 2 replicas, dropout, Adam, a shuffled loader. Times are of
the whole machine, which also has other work: seconds, not more.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "recovering.py"
PLACES = ("receive", "forward", "send", "backward", "reduce", "optimizer step", "save")
NUM_RANKS = 4
DIES_AT_STEP = 6  # a step that ends with a save


class Job:
    """A run in a folder of its own."""

    def __init__(self, *arguments: object, launcher: tuple[object, ...] = (), ranks: int = NUM_RANKS, path: Any = None):
        self.path = Path(path or tempfile.mkdtemp(prefix="recovery-"))
        command = [sys.executable, "-m", "hybridpp", "run", "--nproc-per-node", ranks, *launcher, SCRIPT, self.path]
        python_path = os.pathsep.join(str(ROOT / folder) for folder in (".", "plugins", "tests"))
        self.process = subprocess.Popen(
            list(map(str, [*command, *arguments])),
            env=os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )

    def lines(self) -> list[dict[str, Any]]:
        """What rank 0 told so far."""
        file = self.path / "losses.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_step(self, step: int, attempt_lines: int = 0) -> None:
        """Wait until a step is done that is told after the first ``attempt_lines`` lines."""
        while not any(line.get("step", 0) >= step for line in self.lines()[attempt_lines:]):
            if self.process.poll() is not None:
                raise SystemExit(f"the job ended early: {self.process.returncode}\n{self.process.stderr.read()}")
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """The exit code, and what the job printed."""
        _, printed = self.process.communicate(timeout=300)
        return self.process.returncode, printed

    def losses(self) -> dict[int, str]:
        """The loss of every step, of the last attempt that did it."""
        return {line["step"]: line["loss"] for line in self.lines() if "step" in line}

    def weights(self) -> list[str]:
        """The digest of every rank's weights and optimizer state."""
        return [path.read_text() for path in sorted(self.path.glob("weights-*"))]

    def result(self) -> tuple[dict[int, str], list[str]]:
        """What must be equal, to the bit."""
        return self.losses(), self.weights()


def clean(*arguments: object, ranks: int = NUM_RANKS) -> tuple[dict[int, str], list[str]]:
    """The result of a run to which nothing happens."""
    job = Job(*arguments, ranks=ranks)
    code, printed = job.end()
    assert code == 0, printed
    return job.result()


def kills(ranks: list[int], places: list[str]) -> None:
    expected = clean("--steps", 10)
    times, wrong = [], 0
    for rank in ranks:
        for place in places:
            die = f"{rank}:{place}:{DIES_AT_STEP - 1}"
            job = Job("--steps", 10, "--die", die, launcher=("--max-restarts", 1))
            code, printed = job.end()
            lines = job.lines()
            starts = [index for index, line in enumerate(lines) if "resumed" in line]
            assert len(starts) == 2, f"{die}: started {len(starts)} times\n{printed}"
            times.append(lines[starts[1] + 1]["time"] - lines[starts[1] - 1]["time"])
            is_same = code == 0 and job.result() == expected
            wrong += not is_same
            resumed = lines[starts[1]]["resumed"]
            print(
                f"rank {rank} {place:14} exit {code}, resumed at {resumed}, {times[-1]:5.1f} s, "
                f"{'0 bits differ' if is_same else 'DIFFERS'}, printed {len(printed.splitlines())} lines",
                flush=True,
            )
    print(f"{len(times)} kills: {wrong} differ; back after {statistics.median(times):.1f} s (at most {max(times):.1f})")


def seeded(num_kills: int, num_steps: int) -> None:
    expected = clean("--steps", num_steps, "--save-every", 5)
    numbers = random.Random(20)
    steps = sorted(numbers.sample(range(1, num_steps - 1), num_kills))
    job = Job("--steps", num_steps, "--save-every", 5, "--pause", 0.02, launcher=("--max-restarts", num_kills))
    done = 0
    for step in steps:
        job.wait_for_step(step, done)
        done = len(job.lines())
        time.sleep(numbers.random() * 0.03)
        rank = numbers.randrange(NUM_RANKS)
        os.kill(int((job.path / f"pid-{rank}").read_text()), signal.SIGKILL)
        # The next kill is of a process of the next attempt.
        while not any("resumed" in line for line in job.lines()[done:]):
            time.sleep(0.02)
    code, printed = job.end()
    lines = job.lines()
    starts = [index for index, line in enumerate(lines) if "resumed" in line]
    times = [lines[start + 1]["time"] - lines[start - 1]["time"] for start in starts[1:]]
    is_same = job.result() == expected
    print(
        f"{num_kills} kills in {num_steps} steps: exit {code}, {len(starts)} starts, "
        f"{'0 bits differ' if is_same else 'DIFFERS'}; back after {statistics.median(times):.1f} s (at most "
        f"{max(times):.1f}); {len(printed.splitlines())} lines printed"
    )


def stops(num_stops: int) -> None:
    numbers, times, wrong = random.Random(20), [], 0
    for number in range(num_stops):
        asynchronous = ["--asynchronous"] if number % 2 else []
        name = "SIGTERM" if number % 4 < 3 else "SIGUSR1"
        job = Job("--steps", 10**6, "--save-every", 7, *asynchronous)
        job.wait_for_step(numbers.randrange(1, 60))
        time.sleep(numbers.random() * 0.05)
        start = time.monotonic()
        job.process.send_signal(getattr(signal, name))
        code, printed = job.end()
        times.append(time.monotonic() - start)
        stopped = {path.read_text() for path in job.path.glob("stopped-*")}
        marker = json.loads((job.path / "checkpoints" / "interrupted.json").read_text())
        last = max(job.losses())
        verify = [sys.executable, "-m", "hybridpp", "checkpoint", "verify", str(job.path / "checkpoints")]
        verified = subprocess.run([*verify, "--step", str(last)], capture_output=True, text=True, cwd=ROOT).returncode
        is_right = (code, verified) == (143, 0) and stopped == {str(last)} and marker == {"step": last, "signal": name}
        wrong += not is_right
        print(
            f"{name} {'asynchronous' if asynchronous else 'synchronous':12} exit {code} after {times[-1]:.1f} s, all "
            f"at step {last}: {'right' if is_right else f'WRONG {stopped} {marker} {verified} {printed}'}",
            flush=True,
        )
    print(f"{num_stops} stops: {wrong} wrong; {statistics.median(times):.1f} s (at most {max(times):.1f})")


def fewer() -> None:
    expected, _ = clean("--steps", 12)
    begun = Job("--steps", 7)
    assert begun.end()[0] == 0
    go_on = Job("--steps", 12, ranks=2, path=begun.path)
    code, printed = go_on.end()
    assert code == 0, printed
    found = go_on.losses()
    start = [line["resumed"] for line in go_on.lines() if "resumed" in line][-1]
    apart = max(abs(float.fromhex(found[step]) - float.fromhex(expected[step])) for step in range(start + 1, 13))
    print(f"2 ranks in place of 4 from step {start} on: losses of {12 - start} steps differ by at most {apart:.1e}")


def frozen() -> None:
    """The launcher, whose process has the job's store, is stopped in the middle of a watched run."""
    arguments = ("--steps", 40, "--pause", 0.1)
    expected = clean(*arguments)
    job = Job(*arguments, "--watchdog", 5)
    job.wait_for_step(5)
    ranks = [psutil.Process(int(path.read_text())) for path in job.path.glob("pid-*")]
    os.kill(job.process.pid, signal.SIGSTOP)
    start = time.monotonic()
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        time.sleep(0.1)
        if time.monotonic() - start > 120:
            break
    seconds, step = time.monotonic() - start, max(job.losses())
    os.kill(job.process.pid, signal.SIGCONT)
    code, printed = job.end()
    is_same = "0 bits differ" if job.result() == expected else "DIFFERS"
    print(f"launcher stopped at step 5: ranks at step {step} ended after {seconds:.1f} s; exit {code}, {is_same}")
    print(printed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "seeded", "stops", "fewer", "frozen"))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(range(NUM_RANKS)))
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--number", type=int, default=20, help="of kills or stops")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    if options.what == "kills":
        kills(options.ranks, options.places)
    elif options.what == "seeded":
        seeded(options.number, options.steps)
    elif options.what == "stops":
        stops(options.number)
    elif options.what == "fewer":
        fewer()
    else:
        frozen()
