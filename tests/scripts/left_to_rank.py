"""A worker that leaves signals to its rank, and does what the rank says; it loads no torch, for which spawn waits.

With ``pipe`` in its globals, it is started by ``multiprocessing``.
"""

import runpy
import signal
import subprocess
import threading
from pathlib import Path

SIGNALS = (int(signal.SIGTERM), int(signal.SIGUSR1))


def program_ended() -> int:
    """How a program ends that this worker tells to."""
    with subprocess.Popen(["sleep", "1000"]) as program:
        program.terminate()
        return program.wait(60)


def answer(pipe):
    # A thread of a native library, from before.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    worker_signals = Path(__file__).parents[2] / "hybridpp/cluster/worker_signals.py"
    runpy.run_path(str(worker_signals))["leave_to_rank"](SIGNALS)
    while (asked := pipe.recv()) != "end":
        pipe.send(program_ended() if asked == "start a program" else asked)


if "pipe" in globals():
    answer(globals()["pipe"])
