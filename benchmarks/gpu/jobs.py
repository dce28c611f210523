"""Cases of a benchmark, each in processes of its own with a time limit: a hang is a result."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from report import header, lines_of, table, tell

LIMIT_S = 60.0
Measure = Callable[[], Mapping[str, Any]]


def outcome(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> tuple[str, str]:
    """How a job ended (``"ok"``, ``"error"``, ``"hang"``), and its output; at the limit its processes are ended."""
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "hang", process.communicate()[0]
    return "ok" if process.returncode == 0 else "error", output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every benchmark."""
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a case (default: %(default)s)")
    parser.add_argument("--here", action="store_true", help="cases run in this process, without a limit")
    parser.add_argument("--case", help=argparse.SUPPRESS)


def run_cases(
    benchmark: str,
    cases: Mapping[str, Measure],
    args: argparse.Namespace,
    num_ranks: int = 1,
    print_here: bool = True,
) -> None:
    """Run a benchmark: a line of JSON per case, then a table of them.

    Args:
        benchmark: its name.
        cases: by name; each returns numbers by name.
        args: of :func:`add_arguments`.
        num_ranks: of a case's job; above 1, its processes are started by torchrun.
        print_here: in a case's process: whether this rank prints.
    """
    if args.case is not None:
        numbers = cases[args.case]()
        if print_here:
            tell(benchmark, args.case, numbers)
        return
    tell(benchmark, "header", header())
    lines = []
    for name, measure in cases.items():
        if args.here:
            tell(benchmark, name, numbers := measure())
            lines.append({"case": name, **numbers})
        else:
            lines.append(_in_a_job(benchmark, name, args.limit, num_ranks))
    print(f"\n{table(lines)}", flush=True)


def _in_a_job(benchmark: str, case: str, limit_s: float, num_ranks: int) -> dict[str, Any]:
    """Run one case in a job; its line, which is printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), *sys.argv, "--case", case]
    start = time.monotonic()
    status, output = outcome(command, {}, limit_s)
    found = lines_of(output)
    if status == "ok" and found:
        numbers = {name: value for name, value in found[-1].items() if name not in ("benchmark", "case")}
    else:
        status = "error" if status == "ok" else status
        numbers = {"said": output[-400:]}
    numbers = {"result": status, **numbers, "job (s)": round(time.monotonic() - start, 1)}
    tell(benchmark, case, numbers)
    return {"case": case, **numbers}
