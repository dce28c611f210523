"""What a watchdog costs a rank: processor time of its threads, and time that its notes take in the rank's own thread.

    OMP_NUM_THREADS=1 PYTHONPATH=.:plugins:tests:benchmarks python benchmarks/failures/watchdog_cost.py

Two ranks that sleep, with and without a watchdog by turns: all processor time of the process is the watchdog's. Then
steps of 1f1b (the ViT of ``schedules.py``, hidden 192): the processor time of the watchdog's threads, by their own
clocks, as a share of all that the process took. Then the notes of a section and of a wait, in a loop. Steps spend 1
section for the step, 1 for the batch and 1 for the optimizer, and one wait for each message that is late; actions are
not noted at all (the watchdog reads the executor's).
"""

import statistics
import threading
import time

from baselines import hybridpp
from processes import run_ranks
from vit import make_batch

from hybridpp import DistCoordinator, launch
from hybridpp.cluster import current_world
from hybridpp.cluster.progress import Awaited, Progress

SECONDS, ROUNDS, CALLS = 6.0, 3, 200_000
STEPS_S = 30.0


def launched(watchdog_s: float | None) -> None:
    """Join a job anew, with or without a watchdog."""
    coordinator = DistCoordinator()
    coordinator.destroy()
    port = 20_000 + int(time.time()) % 20_000
    launch(coordinator.rank, 2, "127.0.0.1", port, backend="gloo", watchdog_s=watchdog_s)


def watched(watchdog_s: float | None) -> float:
    """Processor seconds per second of an idle rank."""

    def idle() -> float:
        launched(watchdog_s)
        current_world().control()
        before = time.process_time()
        time.sleep(SECONDS)
        return (time.process_time() - before) / SECONDS

    shares: list[float] = run_ranks(idle, 2)
    return statistics.mean(shares)


def share_of_steps() -> float:
    """Processor time of the watchdog's threads as a share of the process's, during steps; the larger of two ranks."""

    def train() -> float:
        launched(60.0)
        step = hybridpp(192, make_batch(32), 8, "1f1b")
        step()
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("hybridpp watchdog")]
        assert len(threads) == 2, "one that looks, and one that asks the store"
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident is not None]
        own, all_of_it = sum(map(time.clock_gettime, clocks)), time.process_time()
        until = time.monotonic() + STEPS_S
        while time.monotonic() < until:
            step()
        return (sum(map(time.clock_gettime, clocks)) - own) / (time.process_time() - all_of_it)

    shares: list[float] = run_ranks(train, 2, timeout_s=10 * STEPS_S)
    return max(shares)


def ns_of(call: object) -> float:
    start = time.process_time()
    for _ in range(CALLS):
        call()  # type: ignore[operator]
    return (time.process_time() - start) / CALLS * 1e9


def main() -> None:
    shares = []
    for _ in range(ROUNDS):
        without, with_watchdog = watched(None), watched(60.0)
        shares.append(with_watchdog - without)
        print(f"processor time of an idle rank: {100 * without:.4f} % without, {100 * with_watchdog:.4f} % with")
    print(f"watchdog: {100 * statistics.median(shares):.4f} % of a processor (median of {ROUNDS})")
    print(f"in steps of 1f1b: {100 * share_of_steps():.4f} % of the processor time of the rank that it takes most of")
    progress = Progress()
    awaited = Awaited("a message", (1,), "pp")

    def section() -> None:
        with progress.inside("step", str):
            pass

    def wait() -> None:
        progress.begin_wait(lambda: awaited)
        progress.end_wait()

    print(f"a section: {ns_of(section):.0f} ns; a wait: {ns_of(wait):.0f} ns")


if __name__ == "__main__":
    main()
