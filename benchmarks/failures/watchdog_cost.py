"""What a watchdog costs a rank: processor time of its threads, and time that its notes take in the rank's own thread.

    PYTHONPATH=.:plugins:tests python benchmarks/failures/watchdog_cost.py

Two ranks that sleep, with and without a watchdog by turns: all processor time of the process is the watchdog's. Then
the notes of a section and of a wait, in a loop. Steps spend 1 section for the step, 1 for the batch and 1 for the
optimizer, and one wait for each message that is late; actions are not noted at all (the watchdog reads the executor's).
"""

import statistics
import time

from processes import run_ranks

from hybridpp import DistCoordinator, launch
from hybridpp.cluster import current_world
from hybridpp.cluster.progress import Awaited, Progress

SECONDS, ROUNDS, CALLS = 6.0, 3, 200_000


def watched(watchdog_s: float | None) -> float:
    """Processor seconds per second of an idle rank."""

    def idle() -> float:
        coordinator = DistCoordinator()
        coordinator.destroy()
        port = 20_000 + int(time.time()) % 20_000
        launch(coordinator.rank, 2, "127.0.0.1", port, backend="gloo", watchdog_s=watchdog_s)
        current_world().control()
        before = time.process_time()
        time.sleep(SECONDS)
        return (time.process_time() - before) / SECONDS

    return statistics.mean(run_ranks(idle, 2))


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
