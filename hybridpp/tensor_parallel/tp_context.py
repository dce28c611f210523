"""Boundaries between replicated and sharded activations: gradients are summed once, random numbers differ by rank."""

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpp.cluster import DrawMonitor, Group
from hybridpp.errors import PartitionError
from hybridpp.nn.torch_private import has_no_data, storage_id, version_of
from hybridpp.sharded_activations.collectives import copy_to_ranks
from hybridpp.sharded_activations.saved_shard import RegatherHandle, SavedShard
from hybridpp.sharded_activations.sequence_collectives import copy_sequence, gather_sequence, shard_lengths


def _nothing() -> None:
    return


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


class _ForkedGenerator(NamedTuple):
    """A forked generator: its state before the fork, and the seed of the fork."""

    generator: torch.Generator
    state: Tensor
    seed: int


class TensorParallelContext:
    """What the sharded layers of one model share on this rank.

    Layers that read the same replicated activation (queries, keys and values) share one copy of it, so its gradient is
    all-reduced once.

    On sharded activations every rank draws random numbers of its own (dropout on its heads), seeded by the generator's
    state before. Afterwards the generator has that state again, so on replicated activations all ranks draw the same
    numbers.

    In a :meth:`sequence_parallel_region`, activations between the layers are sequence shards.

    Args:
        group: the ranks that share the model's layers.

    Attributes:
        overlap_fn: called while gradients are being summed.
        draws: where no draws are expected, generators are left alone.
        keeps_logits_sharded: whether the output of a sharded head stays sharded until it is read in full, also where no
            gradients are computed.
    """

    def __init__(self, group: Group):
        self.group = group
        self.overlap_fn: Callable[[], None] = _nothing
        self.draws = DrawMonitor()
        self.keeps_logits_sharded = False
        self._copied: tuple[Tensor, int, Tensor] | None = None
        self._gathered: tuple[Tensor, int, Tensor] | None = None
        self._regather: tuple[Tensor, Tensor, RegatherHandle] | None = None
        self._sequence_shape: tuple[int, int] | None = None
        self._is_replicated = False
        self._before: _ForkedGenerator | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorParallelContext":
        # Groups cannot be copied; a copy of the model runs on the same ranks.
        return self

    @contextmanager
    def keep_logits_sharded(self) -> Iterator[None]:
        """Inside, logits stay sharded: every operation on them is done on all ranks."""
        before, self.keeps_logits_sharded = self.keeps_logits_sharded, True
        try:
            yield
        finally:
            self.keeps_logits_sharded = before

    def copy_to_tp_region(self, x: Tensor) -> Tensor:
        """A replicated activation, for a layer with sharded outputs."""
        if not x.requires_grad or not torch.is_grad_enabled():
            return x
        if self._copied is None or self._copied[0] is not x or self._copied[1] != version_of(x):
            self._copied = (x, version_of(x), self._copied_to_tp_region(x))
        return self._copied[2]

    def _copied_to_tp_region(self, x: Tensor) -> Tensor:
        self._regather = None
        if self._gathered is None or self._gathered[0] is not x or self._gathered[1] != version_of(x):
            return copy_to_ranks(x, self.group, self._while_summing)
        shard = self._gathered[2]
        copied = copy_sequence(shard, x, self.group, self._while_summing)
        if not has_no_data(x):
            self._regather = (copied, shard, RegatherHandle(x.shape[1], self.group))
        return copied

    def saved_shard_of(self, x: Tensor) -> tuple[Tensor, SavedShard] | None:
        """What a layer can save of its input: the shard, and how to gather it again; None: all of the input.

        Args:
            x: the result of :meth:`copy_to_tp_region`, or a view of all of it.
        """
        if self._regather is None:
            return None
        copied, shard, regather = self._regather
        if storage_id(x) != storage_id(copied) or x.numel() != copied.numel():
            return None
        return shard, SavedShard(regather, x.shape)

    def gather_from_sp_region(self, shard: Tensor) -> Tensor:
        """The full activation of a shard, in a :meth:`sequence_parallel_region`.

        Collective: one all-gather; before :meth:`copy_to_tp_region`, also a reduce-scatter in the backward pass.
        """
        full = gather_sequence(shard, self._known_sequence_shape()[1], self.group)
        self._gathered = (full, version_of(full), shard)
        return full

    def refork_rng(self, y: Tensor) -> None:
        """Fork the RNG again after a layer that ended the fork, for shards like ``y``."""
        if not self._is_replicated:
            self._known_sequence_shape()
            self.fork_rng(y)

    def _known_sequence_shape(self) -> tuple[int, int]:
        if self._sequence_shape is None:
            # Only a part of the block is recomputed: without the block's forward it would draw other numbers.
            raise PartitionError(
                "sequence parallelism must know at boost which parts of a block the backward pass recomputes: the "
                "model checkpoints activations inside its blocks now, and did not at boost. Enable that before "
                "booster.boost, or set gradient_checkpoint_config={} instead."
            )
        return self._sequence_shape

    def unflatten_sequence(self, x: Tensor, *, is_shard: bool) -> Tensor:
        """``[B, S, ...]`` of ``[B, S, ...]`` or ``[B * S, ...]``; of a shard, ``[B, s, ...]``."""
        if x.dim() != 2:
            return x
        batch, length = self._known_sequence_shape()
        own = shard_lengths(length, self.group.size)[self.group.rank]
        return x.reshape(batch, own if is_shard else length, x.shape[-1])

    @contextmanager
    def replicated_region(self) -> Iterator[None]:
        """Inside, activations are replicated, in the middle of a sequence-parallel region."""
        before, self._sequence_shape, self._is_replicated = self._sequence_shape, None, True
        self.restore_rng()
        try:
            yield
        finally:
            self.restore_rng()
            self._sequence_shape, self._is_replicated = before, False

    @contextmanager
    def sequence_parallel_region(self, shard: Tensor, length: int) -> Iterator[None]:
        """Inside, activations between layers are shards, ``[B, s, ...]`` like this one, of sequences of ``length``."""
        self.fork_rng(shard)
        self._sequence_shape = (shard.shape[0], length)
        try:
            yield
        finally:
            self._sequence_shape = None
            self.restore_rng()

    def for_recompute(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function for activation checkpointing: its recomputation runs in the same region."""
        return functools.partial(self._run_again, (self._sequence_shape, self._is_replicated), function)

    def _run_again(self, region: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        before = self._sequence_shape, self._is_replicated
        self._sequence_shape, self._is_replicated = region
        try:
            return function(*args, **kwargs)
        finally:
            self._sequence_shape, self._is_replicated = before
            if before != region:
                self.restore_rng()

    def _while_summing(self) -> None:
        # Read when gradients are summed: it is set after the first forward was traced.
        self.overlap_fn()

    def fork_rng(self, y: Tensor) -> None:
        """Let random numbers be this rank's own from now on, for sharded activations like ``y``."""
        if not self.draws.expected or type(y) is not Tensor or y.is_meta:
            return
        generator = _generator(y.device)
        if self._before is not None and self._before.seed == generator.initial_seed():
            return
        self.draws.note(generator)
        state = generator.get_state()
        # From the complete state, so that each call in the forward gets other numbers. The CPU's generator uses
        # 32 bits of a seed.
        seed = zlib.crc32(state.numpy().tobytes(), self.group.rank + 1)
        generator.manual_seed(seed)
        self._before = _ForkedGenerator(generator, state, seed)

    def restore_rng(self) -> None:
        """Let all ranks draw the same random numbers again, and free what was copied."""
        self._copied = self._gathered = self._regather = None
        if self._sequence_shape is not None:
            return
        before, self._before = self._before, None
        # If a forward ended in between (activation checkpointing stops early), others have seeded the generator.
        if before is not None and before.seed == before.generator.initial_seed():
            self.draws.note(before.generator)
            before.generator.set_state(before.state)
