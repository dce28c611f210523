"""Key-value caches that blocks pass on: which calls read entries there that other calls have made.

Each block has entries of its own in such a cache, so each stage may have a cache of its own. That is not so where two
blocks have one entry: layers that share their attention, or are copies with one ``layer_idx``. The second one reads
the keys of the first, which another stage has.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from hybridpp.errors import PartitionError
from hybridpp.nn.snapshot import Snapshot, reachable
from hybridpp.partition.calls import UnitCall


class UncachedTraceNeededError(Exception):
    """Calls that a trace did not run may have one entry in a cache: the trace is to be made again, with all of them."""


class CacheEntries:
    """The tensors in key-value caches, by the call of the forward that made them."""

    def __init__(self) -> None:
        self._makers: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._numbers: set[Any] = set()

    @property
    def makers(self) -> Mapping[int, int]:
        """The call that made each, by the tensor's ``id``."""
        return self._makers

    def are_new(self, numbers: Collection[Any]) -> bool:
        """Whether no call of this forward had one of these numbers; they are noted."""
        known = not self._numbers.isdisjoint(numbers)
        self._numbers.update(numbers)
        return bool(numbers) and not known

    def note(self, caches: Sequence[Any], call: int) -> None:
        """Note what is in these caches after a call, and was not before."""
        for tensor in Snapshot(reachable(caches)[0]).tensors():
            if id(tensor) not in self._makers:
                self._makers[id(tensor)] = call
                self._alive.append(tensor)


def refuse_divided_entries(calls: Sequence[UnitCall], stages: Sequence[int]) -> None:
    """Refuse a cut between calls of which one reads what the other has put in a cache.

    Raises:
        PartitionError: there are such calls.
    """
    for call, stage in zip(calls, stages, strict=True):
        for index in sorted(call.cache_entries_of):
            if stages[index] != stage:
                raise PartitionError(
                    f"unit {call.name!r} on stage {stage} reads keys that unit {calls[index].name!r} on stage "
                    f"{stages[index]} has put in the key-value cache: both have one entry there, as layers that share "
                    "their attention, or have one layer_idx. Each stage has a cache of its own. Use none: "
                    "model.config.use_cache = False in training, which has no use for it, use_cache=False in generate. "
                    "Or give each layer a layer_idx of its own, keep both on one stage (split_points=...), or use "
                    "pp_size=1."
                )
