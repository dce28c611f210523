"""Sharded layers: what each kind computes around the layer's own forward.

A call is ``post_forward(combine(own forward(local_input(pre_forward(x)))))``, so any class of linear layer or embedding
works.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hybridpp.nn.checkpointing import has_saved_tensor_hooks
from hybridpp.nn.torch_private import has_no_data, parameters_of
from hybridpp.sharded_activations.collectives import gather_from_ranks, scatter_to_ranks, sum_over_ranks
from hybridpp.sharded_activations.deferred_gather import deferred_gather
from hybridpp.sharded_activations.deferred_logits_gather import DeferredLogitsTensor
from hybridpp.sharded_activations.saved_shard import SavedShard, save_as_shard
from hybridpp.sharded_activations.sequence_collectives import (
    full_gradient,
    reduce_scatter_sequence,
    replicated_sum,
)
from hybridpp.sharding_plan.plan import ShardKind
from hybridpp.tensor_parallel.tp_context import TensorParallelContext


class ShardedLayer:
    """A layer of which this rank holds a shard.

    Its module keeps its class; :meth:`run` is put around its forward.

    Attributes:
        kind: how it is divided.
        module: with this rank's shard as weight.
        gathers_input: whether a column layer's input is a sequence shard, ``[B, s, H]``.
        scatters_output: whether a row layer's output is one.
    """

    kind = ShardKind.REPLICATED
    gathers_input = False
    scatters_output = False

    def __init__(self, module: nn.Module, context: TensorParallelContext):
        self.module = module
        self.context = context

    def run(self, forward: Callable[..., Tensor], x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
        """The layer around the module's own forward, which computes with this rank's shard."""
        full_input = self.pre_forward(x)
        with self._without_bias(), self._saving_shard(full_input):
            y = forward(self.local_input(full_input), *args, **kwargs)
        return self.post_forward(self.combine(y, x, parameters_of(self.module).get("bias")))

    def _saving_shard(self, x: Tensor) -> AbstractContextManager[None]:
        """Inside, autograd saves as little of an input as possible."""
        saved = self.save_input(x)
        return nullcontext() if saved is None or has_saved_tensor_hooks() else save_as_shard(x, *saved)

    @contextmanager
    def _without_bias(self) -> Iterator[None]:
        """Inside, the module has no bias if it is added after the sum."""
        parameters = parameters_of(self.module)
        bias = parameters.get("bias")
        if bias is None or not self.adds_bias:
            yield
            return
        # Conv1D needs one.
        no_bias: Any = None if isinstance(self.module, nn.Linear) else torch.zeros_like(bias)
        parameters["bias"] = no_bias
        try:
            yield
        finally:
            parameters["bias"] = bias

    @property
    def adds_bias(self) -> bool:
        """Whether the bias is replicated and :meth:`combine` adds it."""
        return False

    def pre_forward(self, x: Tensor) -> Tensor:
        """The input, with the communication that its gradient needs."""
        return x

    def save_input(self, x: Tensor) -> tuple[Tensor, SavedShard] | None:
        """What can be saved of the result of :meth:`pre_forward`, and how to get the rest; None: all is saved."""
        return None

    def local_input(self, x: Tensor) -> Tensor:
        """The argument of the layer's own forward."""
        return x

    def combine(self, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output, from that of its own forward; ``y`` is overwritten."""
        return y

    def post_forward(self, y: Tensor) -> Tensor:
        """The output that the caller gets."""
        return y

    def bias_grad(self, local: Tensor) -> Tensor:
        """The gradient of a bias that :meth:`combine` adds, from the sum of the output's gradients."""
        return local

    def local_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient of the own forward's output, from the gradient of :meth:`combine`'s."""
        return dy

    def pre_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """The output's gradient as :meth:`local_grad` and a replicated bias need it; computed once."""
        return dy


class ColumnParallel(ShardedLayer):
    """From a replicated input, this rank's shard of the output.

    Collective: one all-reduce in the backward pass. With a sequence shard as input: an all-gather forwards; backwards a
    reduce-scatter and another all-gather, as only the shard is saved. Layers with the same input share all of them.
    """

    kind = ShardKind.COLUMN

    def save_input(self, x: Tensor) -> tuple[Tensor, SavedShard] | None:
        return self.context.saved_shard_of(x)

    def pre_forward(self, x: Tensor) -> Tensor:
        if not self.gathers_input:
            return self.context.copy_to_tp_region(x)
        copied = self.context.copy_to_tp_region(
            self.context.gather_from_sp_region(self.context.unflatten_sequence(x, is_shard=True))
        )
        return copied.flatten(0, 1) if x.dim() == 2 else copied

    def combine(self, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        self.context.fork_rng(y)
        return y


class UncopiedColumnParallel(ColumnParallel):
    """A column layer whose input was copied to the ranks where it was computed: replicated modules read it, too."""

    def pre_forward(self, x: Tensor) -> Tensor:
        return x


class GatheredColumnParallel(ShardedLayer):
    """From a replicated input, the full output, gathered where it is read in full (see :class:`DeferredLogitsTensor`).

    Collective: one all-reduce in the backward pass; for a replicated bias, one all-gather there. Without gradients
    outside of a step, one all-gather in the forward pass.
    """

    kind = ShardKind.GATHERED_COLUMN

    def __init__(self, module: nn.Module, context: TensorParallelContext, width: int):
        super().__init__(module, context)
        self._width = width

    @property
    def adds_bias(self) -> bool:
        return True

    def pre_forward(self, x: Tensor) -> Tensor:
        self.context.restore_rng()
        x = self.context.copy_to_tp_region(x)
        self.context.restore_rng()
        return x

    def combine(self, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        return y if bias is None else y + scatter_to_ranks(bias, self.context.group, y.shape[-1])

    def post_forward(self, y: Tensor) -> Tensor:
        # Without gradients a script may read the result on one rank alone; a backward pass needs all ranks anyway.
        keeps_logits_sharded = self.context.keeps_logits_sharded or torch.is_grad_enabled()
        if not keeps_logits_sharded or has_no_data(y) or torch.compiler.is_compiling():
            return gather_from_ranks(y, self.context.group, self._width)
        return deferred_gather(y, self.context.group, y.dim() - 1, self._width, kind=DeferredLogitsTensor)

    def bias_grad(self, local: Tensor) -> Tensor:
        return gather_from_ranks(local, self.context.group, self._width)


class RowParallel(ShardedLayer):
    """From this rank's shard of the input, the full output.

    Collective: one all-reduce in the forward pass; to sequence shards, a reduce-scatter forwards and an all-gather
    backwards.
    """

    kind = ShardKind.ROW

    @property
    def adds_bias(self) -> bool:
        return True

    def pre_forward(self, x: Tensor) -> Tensor:
        self.context.restore_rng()
        return x

    def combine(self, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.scatters_output:
            self.context.refork_rng(y)
            shard = reduce_scatter_sequence(
                self.context.unflatten_sequence(y, is_shard=False), bias, self.context.group
            )
            return shard.flatten(0, 1) if y.dim() == 2 else shard
        full = sum_over_ranks(y, self.context.group)
        return full if bias is None else full + bias

    def pre_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        return full_gradient(dy, x.shape[1], self.context.group) if self.scatters_output else dy

    def bias_grad(self, local: Tensor) -> Tensor:
        return replicated_sum(local, self.context.group) if self.scatters_output else local


class VocabParallel(ShardedLayer):
    """An embedding divided by rows; ids and outputs are replicated. Collective: one all-reduce forwards.

    Attributes:
        local_padding_idx: the padding's row in this rank's shard; None: it is on another rank, or there is none.
    """

    kind = ShardKind.VOCAB

    def __init__(self, module: nn.Module, context: TensorParallelContext, num_rows: int):
        super().__init__(module, context)
        self._first, self._num_rows = context.group.rank * num_rows, num_rows
        padding: Any = getattr(module, "padding_idx", None)
        is_own = padding is not None and 0 <= padding - self._first < num_rows
        self.local_padding_idx: int | None = padding - self._first if is_own else None

    def _is_foreign(self, ids: Tensor) -> Tensor:
        return (ids < self._first) | (ids >= self._first + self._num_rows)

    def local_input(self, x: Tensor) -> Tensor:
        return (x - self._first).masked_fill(self._is_foreign(x), 0)

    def combine(self, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        return sum_over_ranks(self.local_grad(y, x), self.context.group)

    def local_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        # The same rows count forwards and backwards.
        return dy.masked_fill(self._is_foreign(x).unsqueeze(-1), 0)
