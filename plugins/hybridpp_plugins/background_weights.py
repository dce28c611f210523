"""Write weights while training goes on: a thread of rank 0 writes what was brought there before."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hybridpp.checkpoint import SaveTarget
from hybridpp.checkpoint.safetensors_file import StoredSpec
from hybridpp.cluster import Awaited, Group
from hybridpp_plugins.agreement import agree
from hybridpp_plugins.background_save import SaveOutcome, SavingRank, yield_to_training
from hybridpp_plugins.weight_stream import SAVE_CALL


class DeferredTarget:
    """A target that keeps what it is given, in memory of its own, until :meth:`write` is called.

    Args:
        target: that it is written to.
    """

    def __init__(self, target: SaveTarget):
        self._target = target
        self._files: list[list[Tensor]] = []

    def plan(
        self,
        specs: Mapping[str, StoredSpec],
        aliases: Mapping[str, str],
        dtype: torch.dtype | None,
        max_shard_size: str,
    ) -> list[tuple[str, ...]]:
        """See :meth:`SaveTarget.plan`."""
        return self._target.plan(specs, aliases, dtype, max_shard_size)

    def write_next(self, tensors: Iterable[Tensor]) -> None:
        """Keep the tensors of the next file, which may be views of what the run trains."""
        self._files.append([tensor.clone() for tensor in tensors])

    def finish(self) -> None:
        """Nothing: nothing is written yet."""

    def write(self, after_tensor: Callable[[], None]) -> None:
        """Write everything, on whatever thread; ``after_tensor`` is called after each tensor.

        Raises:
            CheckpointError: see :meth:`SaveTarget.write`.
        """
        try:
            while self._files:
                self._target.write_next(_one_by_one(self._files.pop(0), after_tensor))
            self._target.finish()
        except BaseException:
            self._files.clear()
            self._target.discard()
            raise

    def discard(self) -> None:
        """See :meth:`SaveTarget.discard`."""
        self._files.clear()
        self._target.discard()


def _one_by_one(tensors: Iterable[Tensor], after_tensor: Callable[[], None]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield tensor
        after_tensor()


class BackgroundWeights:
    """A save of weights that is under way.

    Args:
        control: all ranks.
        ranks_of_host: how many share the host's processors.
        write: on rank 0, what writes them, and calls what it is given after each tensor; None: another rank does.

    Attributes:
        outcome: how far this rank is.
        failure: why it failed; None: it has not, so far.
    """

    def __init__(self, control: Group, ranks_of_host: int, write: Callable[[Callable[[], None]], None] | None):
        self._control, self._write = control, write
        self._pace = SavingRank(control.rank, control.size, ranks_of_host).pace()
        self.outcome = SaveOutcome.NONE if write else SaveOutcome.DONE
        self.failure: Exception | None = None
        # No daemon: a script that ends waits for its weights.
        self._thread = threading.Thread(target=self._run, name="hybridpp save of weights")
        if write:
            self._thread.start()

    def _run(self) -> None:
        assert self._write is not None
        yield_to_training()
        self._pace.begin()
        try:
            self._write(self._pace.rest)
            self.outcome = SaveOutcome.DONE
        except Exception as error:
            self.failure = error
            self.outcome = SaveOutcome.FAILED
        self._write = None

    def hurry(self) -> None:
        """Let the thread work as fast as it can."""
        self._pace.hurry()

    def join(self) -> None:
        """Wait for this rank's thread; nothing is communicated."""
        if self._thread.ident is not None:
            self._thread.join()

    def cancel(self) -> None:
        """Nothing: no rank waits for another one's files."""

    def awaited(self) -> Awaited | None:
        """None: no rank."""
        return None

    def finish(self) -> None:
        """Wait until they are written; where that failed, it fails on all ranks. Collective: all ranks."""
        self.hurry()
        self.join()
        agree(self._control, SAVE_CALL, self.failure, "writing the model")
