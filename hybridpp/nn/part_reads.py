"""Refuse code that reads weights of which this rank has a part, where the sample did not show it."""

from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from hybridpp.errors import ConfigError
from hybridpp.nn.force_eager import force_eager, has_compiled
from hybridpp.nn.weight_reads import WeightReads


class PartReadCheck:
    """Looks at the first forward of each kind, in training and in evaluation, and after the first losses that differ.

    A plan leaves whole what the model's code reads on the sample. Without labels there, or under a user's plan that was
    not tried, code outside of sharded blocks may read a part (a penalty), and compute another loss on each rank.

    Args:
        model: with this rank's shards.
        readers: the modules that may read them, by the weight's name.
        size: number of ranks that share layers.
    """

    def __init__(self, model: nn.Module, readers: Mapping[str, Collection[nn.Module]], size: int):
        self._reads = WeightReads(model, readers, self._refuse)
        self._size = size
        self._known: set[Hashable] = set()

    def watching(self, kind: Hashable, *, is_running: bool = False) -> AbstractContextManager[None]:
        """A context for a forward, in which it is watched if no forward of this kind was.

        Args:
            kind: of the forward.
            is_running: whether it has begun, in a call by the script. Then compiled code cannot run as it was written,
                as it may run again in the script's own backward pass; and where something has been compiled, it is not
                watched: a compiler would look into the function mode.

        Raises:
            ConfigError: something else than the readers reads a part; in the forward.
        """
        if kind in self._known:
            return nullcontext()
        is_compiled = has_compiled()
        if is_compiled and is_running:
            return nullcontext()
        self._known.add(kind)
        return self._watching(is_compiled, is_running)

    @contextmanager
    def _watching(self, is_compiled: bool, is_running: bool) -> Iterator[None]:
        with force_eager() if is_compiled else nullcontext(), self._reads.watched(is_running=is_running):
            yield

    def again(self) -> None:
        """Watch the next forward of each kind again."""
        self._known.clear()

    def _refuse(self, name: str) -> None:
        raise ConfigError(
            f"the model's code reads a weight of which this rank has a part ({name}), as a penalty does: got "
            f"tp_size={self._size}. Call it on the sample, too (booster.boost(..., sample=batch) with what makes the "
            "model compute it, such as labels): then the search leaves such layers whole. With tensor_parallel_plan, "
            "leave the layer out of it. Or use weight_decay of the optimizer, or tp_size=1."
        )
