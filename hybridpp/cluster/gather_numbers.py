"""Exchange a few numbers between ranks, and find ranks that are in different calls.

Every exchange names the call that its rank is in, as the end of a sentence that begins with "rank 0 is": "in
optimizer.load_state_dict", "at the start of a training step".
"""

import struct
from collections.abc import Sequence
from functools import lru_cache

import torch

from hybridpp.cluster.world import Group, Patience
from hybridpp.errors import UnlikeCallsError

MAX_STARTED = 40
"""How many numbers :func:`start_gather_numbers` takes."""

_CALL_BYTES = 160
# The call; how many numbers there are; as many of them as fit. Rows have this size in every exchange: unlike calls
# cannot give a backend rows of different sizes, for which gloo ends the process.
_ROW = struct.Struct(f"={_CALL_BYTES}s{1 + MAX_STARTED}d")


class PendingNumbers:
    """An exchange of numbers that is under way.

    Args:
        group: the ranks.
        call: that this rank is in.
        numbers: of this rank; the exchange has as many of them as fit in a row.
    """

    def __init__(self, group: Group, call: str, numbers: Sequence[float]):
        self._ranks, self._call = group.ranks, _encoded(call)
        row = bytearray(_ROW.size)
        own = numbers[:MAX_STARTED]
        _ROW.pack_into(row, 0, self._call, len(numbers), *own, *_PADDING[len(own) :])
        self._exchange = group.start_all_gather(torch.frombuffer(row, dtype=torch.uint8))
        self._received: list[tuple[float, ...]] | Exception | None = None

    def counts_and_numbers(self) -> list[tuple[float, ...]]:
        """By rank, how many numbers it has, then those that fit in a row. May be called again.

        Raises:
            UnlikeCallsError: the ranks are in different calls; raised on every rank that calls it.
        """
        if self._received is None:
            try:
                self._received = self._receive()
            except Exception as error:
                self._received = error
        if isinstance(self._received, Exception):
            raise self._received
        return self._received

    def _receive(self) -> list[tuple[float, ...]]:
        rows = [_ROW.unpack(row.numpy().data) for row in self._exchange.wait()]
        if any(row[0] != self._call for row in rows):
            raise UnlikeCallsError(_unlike_calls(self._ranks, [row[0] for row in rows]))
        return [row[1:] for row in rows]

    def check_arrived(self, patience: Patience) -> bool:
        """Whether the rows of all ranks are here; it raises if they are, and the ranks are in different calls.

        A rank that ends because of it got the rows of all, so they are here, or on their way. Another one may never
        send its row, while it waits for this rank: so it is waited for as long as there is patience.

        Raises:
            UnlikeCallsError: see :meth:`counts_and_numbers`.
        """
        has_arrived = self._received is not None or self._exchange.ends_within(patience)
        if has_arrived:
            self.counts_and_numbers()
        return has_arrived

    def wait(self) -> list[tuple[float, ...]]:
        """Every rank's numbers, in the group's order. May be called again.

        Raises:
            UnlikeCallsError: see :meth:`counts_and_numbers`.
        """
        return [row[1 : 1 + int(row[0])] for row in self.counts_and_numbers()]


_PADDING = (0.0,) * MAX_STARTED


def start_gather_numbers(group: Group, call: str, numbers: Sequence[float]) -> PendingNumbers:
    """Start to exchange numbers. Collective: every member of ``group``.

    Args:
        group: over host memory.
        call: that this rank is in.
        numbers: of this rank, at most :data:`MAX_STARTED`; each rank may have another number of them.
    """
    assert len(numbers) <= MAX_STARTED, "what does not fit in a row needs a second exchange: gather_numbers"
    return PendingNumbers(group, call, numbers)


def gather_numbers(group: Group, call: str, numbers: Sequence[float]) -> list[tuple[float, ...]]:
    """Every member's numbers, in the group's order.

    Collective: every member of ``group``; one all-gather, and a second one for more than :data:`MAX_STARTED` numbers.

    Args:
        group: over host memory.
        call: that this rank is in.
        numbers: of this rank; each rank may have another number of them.

    Raises:
        UnlikeCallsError: the ranks are in different calls; raised on every rank.
    """
    pending = PendingNumbers(group, call, numbers)
    counts = [int(row[0]) for row in pending.counts_and_numbers()]
    rows = pending.wait()
    if max(counts) <= MAX_STARTED:
        return rows
    rest = torch.zeros(max(counts) - MAX_STARTED, dtype=torch.float64)
    own_rest = numbers[MAX_STARTED:]
    rest[: len(own_rest)] = torch.tensor(own_rest, dtype=torch.float64)
    received = (row.tolist() for row in group.all_gather(rest))
    return [
        (*row, *more[: max(0, count - MAX_STARTED)]) for row, more, count in zip(rows, received, counts, strict=True)
    ]


def name_ranks(ranks: Sequence[int]) -> str:
    """The ranks in an error: "rank 1", "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@lru_cache
def _encoded(call: str) -> bytes:
    return call.encode()[:_CALL_BYTES].ljust(_CALL_BYTES, b"\0")


def _unlike_calls(ranks: Sequence[int], calls: Sequence[bytes]) -> str:
    ranks_of_call: dict[bytes, list[int]] = {}
    for rank, call in zip(ranks, calls, strict=True):
        ranks_of_call.setdefault(call, []).append(rank)
    clauses = [
        f"{name_ranks(members)} {'is' if len(members) == 1 else 'are'} {call.rstrip(bytes(1)).decode(errors='replace')}"
        for call, members in ranks_of_call.items()
    ]
    return (
        f"all ranks must make the same calls in the same order: {' while '.join(clauses)}. Make these calls on all "
        "ranks, with gradients enabled on all or on none: put no `if coordinator.is_master()` around them, and read "
        "the same data iterators in the same way everywhere."
    )
