"""Layers of which each rank holds a part: what they do around the layer's own computation on it.

Every kind is ``leave(own forward(enter(x)))``, so any linear layer or embedding will do, whatever its class.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.tensor_parallel.collectives import gather_from_ranks, is_fake, sum_over_ranks, take_own_part
from hybridpp.tensor_parallel.crossings import Crossings
from hybridpp.tensor_parallel.lazy_whole import lazily_whole
from hybridpp.tensor_parallel.plan import Kind
from hybridpp.tensor_parallel.sequence_collectives import joined_shards, sum_sequence
from hybridpp.tensor_parallel.sequence_kept import KeptShard, is_kept_by_others, saved_as_shard


class ShardedLayer:
    """A layer that this rank holds a part of.

    Its module keeps its class and attributes; only the instance attribute ``forward`` is set.

    Attributes:
        kind: how it is divided.
        module: with this rank's part as weight.
        from_shards: whether a column layer's input is a shard of sequences, ``[B, s, H]``.
        to_shards: whether a row layer's output is one.
    """

    kind = Kind.WHOLE
    from_shards = False
    to_shards = False

    def __init__(self, module: nn.Module, crossings: Crossings):
        self.module = module
        self.crossings = crossings
        self._forward: Callable[..., Tensor] = module.forward
        # functools.partial and no closure, so that the model can still be copied.
        module.forward = functools.partial(self._run)

    def _run(self, x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
        entered = self.enter(x)
        with self._without_bias(), self._keeping(entered):
            y = self._forward(self.local_input(entered), *args, **kwargs)
        return self.finish(self.leave(y, x, self.module._parameters.get("bias")))

    def _keeping(self, x: Tensor) -> AbstractContextManager[None]:
        """Inside, autograd saves as little as can be of an input."""
        kept = self.keep(x)
        return nullcontext() if kept is None or is_kept_by_others() else saved_as_shard(x, *kept)

    @contextmanager
    def _without_bias(self) -> Iterator[None]:
        """Inside, the module has no bias of its own where it is added to the sum."""
        parameters = self.module._parameters
        bias = parameters.get("bias")
        if bias is None or not self.adds_bias:
            yield
            return
        # Conv1D cannot do without one.
        nothing: Any = None if isinstance(self.module, nn.Linear) else torch.zeros_like(bias)
        parameters["bias"] = nothing
        try:
            yield
        finally:
            parameters["bias"] = bias

    @property
    def adds_bias(self) -> bool:
        """Whether the bias is whole and :meth:`leave` adds it."""
        return False

    def enter(self, x: Tensor) -> Tensor:
        """The input, with whatever its gradient needs."""
        return x

    def keep(self, x: Tensor) -> tuple[Tensor, KeptShard] | None:
        """What may be kept of an input that was entered, and how to have all of it again; None: all of it is."""
        return None

    def local_input(self, x: Tensor) -> Tensor:
        """What the layer's own forward is given for an input."""
        return x

    def leave(self, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output, from what its own forward made; ``y`` is used up."""
        return y

    def finish(self, y: Tensor) -> Tensor:
        """What others get of the layer's output."""
        return y

    def bias_gradient(self, own: Tensor) -> Tensor:
        """The gradient of a bias that :meth:`leave` adds, from the sum of the gradients of what that made."""
        return own

    def own_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient of what the layer's own forward made, from that of what :meth:`leave` made."""
        return dy

    def whole_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient of the output, as :meth:`own_gradient` and a bias that is whole need it; asked for once."""
        return dy


class ColumnParallel(ShardedLayer):
    """From a whole input, this rank's part of the output.

    Collective: one all-reduce in the backward pass; from shards, an all-gather forwards, and backwards a reduce-scatter
    and another all-gather: of the input only the shard is kept. Layers that read the same share all of them.
    """

    kind = Kind.COLUMN

    def keep(self, x: Tensor) -> tuple[Tensor, KeptShard] | None:
        return self.crossings.keep(x)

    def enter(self, x: Tensor) -> Tensor:
        if not self.from_shards:
            return self.crossings.copy(x)
        copied = self.crossings.copy(self.crossings.join(self.crossings.with_places(x, is_shard=True)))
        return copied.flatten(0, 1) if x.dim() == 2 else copied

    def leave(self, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        self.crossings.enter(y)
        return y


class GatheredColumnParallel(ShardedLayer):
    """From a whole input, the whole output, put together where somebody needs it whole (see :class:`LazyWhole`).

    Collective: one all-reduce in the backward pass; of a whole bias, one all-gather there. Without gradients, not in
    a step, one all-gather in the forward pass.
    """

    kind = Kind.GATHERED_COLUMN

    def __init__(self, module: nn.Module, crossings: Crossings, width: int):
        super().__init__(module, crossings)
        self._width = width

    @property
    def adds_bias(self) -> bool:
        return True

    def enter(self, x: Tensor) -> Tensor:
        self.crossings.leave()
        x = self.crossings.copy(x)
        self.crossings.leave()
        return x

    def leave(self, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        return y if bias is None else y + take_own_part(bias, self.crossings.group, y.shape[-1])

    def finish(self, y: Tensor) -> Tensor:
        # Without gradients a script may look at the result on one rank alone; backward needs all of them anyway.
        keeps_parts = self.crossings.keeps_parts or torch.is_grad_enabled()
        if not keeps_parts or is_fake(y) or torch.compiler.is_compiling():
            return gather_from_ranks(y, self.crossings.group, self._width)
        return lazily_whole(y, self.crossings.group, y.dim() - 1, self._width)

    def bias_gradient(self, own: Tensor) -> Tensor:
        return self.crossings.group.all_gather_along(own, 0)[: self._width]


class RowParallel(ShardedLayer):
    """From this rank's part of the input, the whole output.

    Collective: one all-reduce in the forward pass; to shards, a reduce-scatter forwards and an all-gather backwards.
    """

    kind = Kind.ROW

    @property
    def adds_bias(self) -> bool:
        return True

    def enter(self, x: Tensor) -> Tensor:
        self.crossings.leave()
        return x

    def leave(self, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.to_shards:
            self.crossings.again(y)
            shard = sum_sequence(self.crossings.with_places(y, is_shard=False), bias, self.crossings.group)
            return shard.flatten(0, 1) if y.dim() == 2 else shard
        whole = sum_over_ranks(y, self.crossings.group)
        return whole if bias is None else whole + bias

    def whole_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return joined_shards(dy, x.shape[1], self.crossings.group) if self.to_shards else dy


class VocabParallel(ShardedLayer):
    """An embedding by its rows; ids are whole, and so is what comes out. Collective: one all-reduce forwards."""

    kind = Kind.VOCAB

    def __init__(self, module: nn.Module, crossings: Crossings, num_rows: int):
        super().__init__(module, crossings)
        self._first, self._num_rows = crossings.group.rank * num_rows, num_rows
        padding: Any = getattr(module, "padding_idx", None)
        if padding is not None:
            own = 0 <= padding - self._first < num_rows
            vars(module)["padding_idx"] = padding - self._first if own else None

    def _is_foreign(self, ids: Tensor) -> Tensor:
        return (ids < self._first) | (ids >= self._first + self._num_rows)

    def local_input(self, x: Tensor) -> Tensor:
        return (x - self._first).masked_fill(self._is_foreign(x), 0)

    def leave(self, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        return sum_over_ranks(self.own_gradient(y, x), self.crossings.group)

    def own_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        # The same rows count forwards and backwards.
        return dy.masked_fill(self._is_foreign(x).unsqueeze(-1), 0)
