"""Where activations go over from whole to divided and back: gradients are summed once, random numbers draw apart."""

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpp.cluster import Group
from hybridpp.errors import PartitionError
from hybridpp.tensor_parallel.collectives import copy_to_ranks, is_fake
from hybridpp.tensor_parallel.sequence_collectives import copy_sequence, join_sequence, shard_lengths
from hybridpp.tensor_parallel.sequence_kept import KeptShard, Rejoined


def _nothing() -> None:
    return


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


class _Before(NamedTuple):
    """A generator, how it stood before it drew for divided activations, and the seed it drew those from."""

    generator: torch.Generator
    state: Tensor
    seed: int


class Crossings:
    """What the divided layers of one model share on this rank.

    Layers that read the same whole activation (queries, keys and values) share one copy of it, so that its gradient is
    summed over the ranks once.

    On divided activations every rank draws random numbers of its own (dropout on its heads), which follow from the
    state of the generator before; behind them the generator stands where it stood, so that on whole activations all
    ranks draw the same ones.

    Inside of :meth:`on_shards`, activations between the layers are shards of sequences.

    Args:
        group: the ranks that share the model's layers.

    Attributes:
        meanwhile: called while gradients are being summed.
        keeps_parts: whether what a divided head returns stays in parts until somebody needs it whole, also where no
            gradients are wanted.
    """

    def __init__(self, group: Group):
        self.group = group
        self.meanwhile: Callable[[], None] = _nothing
        self.keeps_parts = False
        self._copied: tuple[Tensor, int, Tensor] | None = None
        self._joined: tuple[Tensor, int, Tensor] | None = None
        self._rejoined: tuple[Tensor, Tensor, Rejoined] | None = None
        self._places: tuple[int, int] | None = None
        self._on_wholes = False
        self._before: _Before | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Crossings":
        # Groups cannot be copied; a copy of the model runs on the same ranks.
        return self

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """Inside, logits stay in parts: whatever is done to them is done on all ranks."""
        before, self.keeps_parts = self.keeps_parts, True
        try:
            yield
        finally:
            self.keeps_parts = before

    def copy(self, x: Tensor) -> Tensor:
        """A whole activation, for a layer that divides it."""
        if not x.requires_grad or not torch.is_grad_enabled():
            return x
        if self._copied is None or self._copied[0] is not x or self._copied[1] != x._version:
            self._copied = (x, x._version, self._copy(x))
        return self._copied[2]

    def _copy(self, x: Tensor) -> Tensor:
        self._rejoined = None
        if self._joined is None or self._joined[0] is not x or self._joined[1] != x._version:
            return copy_to_ranks(x, self.group, self._while_summing)
        shard = self._joined[2]
        copied = copy_sequence(shard, x, self.group, self._while_summing)
        if not is_fake(x):
            self._rejoined = (copied, shard, Rejoined(x.shape[1], self.group))
        return copied

    def keep(self, x: Tensor) -> tuple[Tensor, KeptShard] | None:
        """What a layer may keep of its input for the backward pass: the shard, and how to join it; None: all of it.

        Args:
            x: what :meth:`copy` gave, or a view of all of it.
        """
        if self._rejoined is None:
            return None
        copied, shard, rejoined = self._rejoined
        if x.untyped_storage()._cdata != copied.untyped_storage()._cdata or x.numel() != copied.numel():
            return None
        return shard, KeptShard(rejoined, x.shape)

    def join(self, shard: Tensor) -> Tensor:
        """The whole activation that a shard is part of, inside of :meth:`on_shards`.

        Collective: one all-gather; where :meth:`copy` is next, also a reduce-scatter in the backward pass.
        """
        whole = join_sequence(shard, self._known_places()[1], self.group)
        self._joined = (whole, whole._version, shard)
        return whole

    def again(self, y: Tensor) -> None:
        """Behind a layer that was a place of random numbers, so that they are for shards like ``y`` again."""
        if not self._on_wholes:
            self._known_places()
            self.enter(y)

    def _known_places(self) -> tuple[int, int]:
        if self._places is None:
            # A part of a block is run again without the block: it would not draw the numbers that it drew before.
            raise PartitionError(
                "sequence parallelism must know at boost what of a block is run again in the backward pass: the model "
                "checkpoints activations inside of its blocks, and did not then. Turn that on before booster.boost, or "
                "give gradient_checkpoint_config={} instead."
            )
        return self._places

    def with_places(self, x: Tensor, *, is_shard: bool) -> Tensor:
        """``[B, S, ...]`` of what may be ``[B * S, ...]``, inside of :meth:`on_shards`; a shard has its own ``S``."""
        if x.dim() != 2:
            return x
        batch, length = self._known_places()
        own = shard_lengths(length, self.group.size)[self.group.rank]
        return x.reshape(batch, own if is_shard else length, x.shape[-1])

    @contextmanager
    def on_wholes(self) -> Iterator[None]:
        """Inside, activations are whole, although around it they are shards."""
        places, self._places, self._on_wholes = self._places, None, True
        self.leave()
        try:
            yield
        finally:
            self.leave()
            self._places, self._on_wholes = places, False

    @contextmanager
    def on_shards(self, shard: Tensor, length: int) -> Iterator[None]:
        """Inside, activations between layers are shards of sequences of ``length``, like this one: ``[B, s, ...]``."""
        self.enter(shard)
        self._places = (shard.shape[0], length)
        try:
            yield
        finally:
            self._places = None
            self.leave()

    def repeatable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A part of a block as it is to be given to activation checkpointing: run again, it finds what is around it."""
        return functools.partial(self._repeat, (self._places, self._on_wholes), function)

    def _repeat(self, around: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        before = self._places, self._on_wholes
        self._places, self._on_wholes = around
        try:
            return function(*args, **kwargs)
        finally:
            self._places, self._on_wholes = before
            if before != around:
                self.leave()

    def _while_summing(self) -> None:
        # Asked for when gradients are summed: it is set after the first forward has been traced.
        self.meanwhile()

    def enter(self, y: Tensor) -> None:
        """From here on random numbers are for divided activations like ``y``."""
        if type(y) is not Tensor or y.is_meta:
            return
        generator = _generator(y.device)
        if self._before is not None and self._before.seed == generator.initial_seed():
            return
        state = generator.get_state()
        # Of the whole state, so that every place of the forward gets numbers of its own. 32 bits are all that the
        # CPU's generator makes of a seed.
        seed = zlib.crc32(state.numpy().tobytes(), self.group.rank + 1)
        generator.manual_seed(seed)
        self._before = _Before(generator, state, seed)

    def leave(self) -> None:
        """From here on random numbers are for whole activations again, or shards; what was copied is let go of."""
        self._copied = self._joined = self._rejoined = None
        if self._places is not None:
            return
        before, self._before = self._before, None
        # Where a forward ended in between (activation checkpointing stops when it has what it needs), somebody else
        # has seeded the generator since.
        if before is not None and before.seed == before.generator.initial_seed():
            before.generator.set_state(before.state)
