"""The tests of a folder, each within a time limit: a line of JSON per test, then those that did not pass.

    PYTHONPATH=.:plugins python benchmarks/gpu/run_tests.py tests/gpu

A test that hangs in the device's driver cannot be interrupted from within. So pytest runs in a process of its own,
which is ended at the limit and started again with the tests that are left. Needs pytest, and none of its plugins.
Exits with 1 unless all tests pass or are skipped.
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from jobs import LIMIT_S
from report import header, table, tell

_EVENT = "hybridpp test: "
# As a plugin in the process of pytest.
_PLUGIN = "test_events"


class Pytest:
    """A process of pytest, and the events that its plugin prints."""

    def __init__(self, arguments: Sequence[str]):
        here = os.path.dirname(os.path.abspath(__file__))
        path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
        # -s: what a plugin prints is seen at once.
        command = [sys.executable, "-m", "pytest", "-p", _PLUGIN, "-q", "-s", "-W", "default", *arguments]
        self._process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)

    def _finish(self) -> None:
        self._process.wait()
        # Processes that a test left behind may hold the pipe.
        self._reader.join(timeout=5)

    def next_event(self, limit_s: float) -> dict[str, Any] | None:
        """The next event; None at the end.

        Raises:
            TimeoutError: none came in time, and the process was ended.
        """
        while True:
            try:
                line = self._lines.get(timeout=limit_s)
            except queue.Empty:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._finish()
                raise TimeoutError from None
            if line is None:
                self._finish()
                return None
            at = line.find(_EVENT)
            if at >= 0:
                event: dict[str, Any] = json.loads(line[at + len(_EVENT) :])
                return event
            self.output.append(line)


def collected(arguments: Sequence[str], limit_s: float) -> list[str]:
    """The names of all tests, as pytest knows them."""
    process, names = Pytest(["--collect-only", *arguments]), []
    while (event := process.next_event(limit_s)) is not None:
        names += event.get("collected", [])
    if not names:
        raise SystemExit("".join(process.output)[-2000:])
    return names


def run(names: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
    """Run tests, and tell the result of each: "passed", "failed", "skipped", "hang", or "died" with its process."""
    left, lines = list(names), []

    def told(name: str, **result: Any) -> None:
        left.remove(name)
        tell("tests", name, result)
        lines.append({"case": name, **result})

    while left:
        process, running = Pytest(left), None
        try:
            while (event := process.next_event(limit_s)) is not None:
                running = event.get("started", running)
                if "ended" in event:
                    told(event.pop("ended"), **event)
                    running = None
        except TimeoutError:
            told(running or left[0], result="hang", seconds=limit_s, said="".join(process.output)[-400:])
            continue
        if left:
            told(running or left[0], result="died", said="".join(process.output)[-400:])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tests", nargs="*", default=["tests/gpu"], help="files, folders or names (default: %(default)s)"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a test (default: %(default)s)")
    args = parser.parse_args()
    tell("tests", "header", header())
    lines = run(collected(args.tests, args.limit), args.limit)
    print(f"\n{table([line for line in lines if line['result'] != 'passed'])}")
    counts = {
        result: sum(line["result"] == result for line in lines) for result in sorted({one["result"] for one in lines})
    }
    print(", ".join(f"{count} {result}" for result, count in counts.items()), flush=True)
    sys.exit(int(not counts.keys() <= {"passed", "skipped"}))


if __name__ == "__main__":
    main()
