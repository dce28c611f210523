"""Report which ranks are missing where all of them must meet."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hybridpp.cluster.patient_store import ask
from hybridpp.cluster.rendezvous import FIRST_NOTICE_S, LOGGER, list_ranks
from hybridpp.errors import PeerError
from hybridpp.nn.torch_private import Store


@contextmanager
def reporting_missing(store: Store, rank: int, size: int, meeting: str, what: str) -> Iterator[None]:
    """Inside, all ranks meet. While some are missing, the first that waits logs from time to time which ones.

    A :class:`PeerError` that leaves it gets a note of the ranks that were missing.

    Args:
        store: where each rank records that it is present.
        rank: this rank.
        size: number of ranks.
        meeting: name of the meeting, the same on all ranks.
        what: the purpose of the meeting, which ends the messages.
    """
    over = threading.Event()
    # If the store ended with the rank that hosts it, or is cut off, the ranks' messages report that.
    with suppress(RuntimeError):
        ask(lambda: store.set(f"{meeting} {rank}", ""))

    def missing() -> list[int]:
        with suppress(RuntimeError):
            return ask(lambda: [other for other in range(size) if not store.check([f"{meeting} {other}"])])
        return []

    def log_missing() -> None:
        waited_s, pause_s = 0.0, FIRST_NOTICE_S
        while not over.wait(pause_s):
            waited_s += pause_s
            pause_s = waited_s
            absent = missing()
            if absent and min(set(range(size)) - set(absent)) == rank:
                LOGGER.warning("[rank %d] has waited %.0f s for %s %s.", rank, waited_s, list_ranks(absent), what)

    thread = threading.Thread(target=log_missing, daemon=True)
    thread.start()
    try:
        yield
    except PeerError as error:
        if absent := missing():
            error.add_note(f"hybridpp: rank {rank} waited for {list_ranks(absent)} {what}.")
        raise
    finally:
        over.set()
        thread.join()
