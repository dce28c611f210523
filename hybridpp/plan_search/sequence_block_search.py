"""Search for a way to run one sharded block on sequence shards."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.nn.linear import is_linear, linear_shapes
from hybridpp.nn.torch_private import NormWithStatistics, pytree
from hybridpp.plan_search.block_run import ReferenceBlock, ResultKey, SampleCall, randomized_copy
from hybridpp.plan_search.narrowed_block import narrowed_block
from hybridpp.plan_search.run_formats import BlockFormats
from hybridpp.plan_search.sequence_dataflow import SequenceDataflow, sequence_dataflow
from hybridpp.plan_search.sequence_verify import training_obstacle, verify_sequence
from hybridpp.plan_search.trial_errors import failure_reason
from hybridpp.plan_search.verify import Rejected, common_error
from hybridpp.sharding_plan.sharding_spec import ShardingSpec
from hybridpp.tensor_parallel.sequence_block import Key, RegionIO, SequenceBlock

_MAX_CANDIDATES = 24


class SequenceBlockPlan(NamedTuple):
    """How one block runs on sequence shards, or why it does not; names are inside the block.

    Attributes:
        block: how; None: it does not.
        partial_grad: its replicated parameters whose gradients are sums over the ranks.
        reason: why it does not.
    """

    block: SequenceBlock | None = None
    partial_grad: frozenset[str] = frozenset()
    reason: str = ""

    def way(self, inner: str) -> Hashable:
        """What is done to a module inside, for shards: false where nothing is, or the block does not run on them."""
        if self.block is None:
            return None
        gathers, region = self.block.gather_inputs.get(inner), self.block.replicated.get(inner)
        is_row = inner in self.block.rows
        return (gathers, region, is_row) if gathers is not None or region is not None or is_row else None


def search_sequence_block(
    block: nn.Module,
    calls: Sequence[SampleCall | None],
    spec: ShardingSpec,
    tp_size: int,
    formats: BlockFormats | None = None,
    collected: Collection[ResultKey] = (),
) -> SequenceBlockPlan:
    """The first way to run a block on sequence shards that reproduces its results and gradients.

    Args:
        block: with full parameters; it is not changed.
        calls: arguments of its forward; then those in training or None, and those of other samples.
        spec: how it will be sharded.
        tp_size: number of ranks.
        formats: in which the block will run; None: not known.
        collected: results of modules inside that hooks collect, and that must be complete.
    """
    narrow = narrowed_block(block, calls, tp_size)
    inner = None if narrow is None else narrow.narrowed(spec)
    if narrow is not None and inner is not None:
        block, calls, spec = narrow.block, narrow.calls, inner
    calls = [call and _with_distinct_positions(call) for call in calls]
    try:
        return _Search(randomized_copy(block, calls, formats, collected), spec, tp_size).run()
    except Exception as error:  # random numbers may make the block raise anything
        return SequenceBlockPlan(reason=f"cannot run alone ({failure_reason(error)})")


def _with_distinct_positions(call: SampleCall) -> SampleCall:
    """With random hidden states: a norm of nearly constant ones has no gradient to compare."""
    leaves, tree = pytree.tree_flatten(call)
    numbers = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if numbers:
        hidden = leaves[numbers[0]]
        values = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
        leaves[numbers[0]] = values.to(hidden.device, hidden.dtype).requires_grad_(hidden.requires_grad)
    randomized: SampleCall = pytree.tree_unflatten(leaves, tree)
    return randomized


class _Search:
    """Tries ways to run a block on sequence shards."""

    def __init__(self, reference: ReferenceBlock, spec: ShardingSpec, tp_size: int):
        self._reference = reference
        self._spec = spec
        self._tp_size = tp_size
        layers = linear_shapes(reference.block)
        self._rows = tuple(sorted(spec.reduce_outputs & layers.keys()))
        self._columns = sorted(spec.copy_inputs & layers.keys())
        floating = [index for index, tensor in enumerate(reference.call.tensors) if tensor.is_floating_point()]
        self._hidden_index = floating[0] if floating else None
        self._reason = "on sequence shards, it gives different results"

    def run(self) -> SequenceBlockPlan:
        """The first way that reproduces the reference block's results and gradients."""
        reason = self._obstacle()
        if reason is not None:
            return SequenceBlockPlan(reason=reason)
        rejections: list[Rejected] = []
        for block in islice(self._candidates(), _MAX_CANDIDATES):
            partial_grad = verify_sequence(self._reference, self._spec, block, self._tp_size)
            if not isinstance(partial_grad, Rejected):
                return SequenceBlockPlan(block, partial_grad)
            rejections.append(partial_grad)
        error = common_error(rejections)
        return SequenceBlockPlan(reason=f"on sequence shards, it raises {error}" if error else self._reason)

    def _obstacle(self) -> str | None:
        if not self._rows:
            return "it has no sharded row layer"
        shape = () if self._hidden_index is None else tuple(self._reference.call.tensors[self._hidden_index].shape)
        if len(shape) != 3 or shape[1] < 2:
            return f"its activations must be [batch, sequence, hidden], with two positions or more: got {shape}"
        return training_obstacle(self._reference, shape[1])

    def _candidates(self) -> Iterator[SequenceBlock]:
        """Ways to run the block: gathered as close to the column layers as possible, then further out.

        Then with replicated sequences in all modules that are not sharded; then in one of the modules that hold row
        layers.
        """
        assert self._hidden_index is not None, "_obstacle checked it"
        flow = sequence_dataflow(self._reference, self._hidden_index)
        if flow.hidden is None:
            return
        needed = {name: self._around(name, flow) for name in _reading_all_positions(self._reference.block)}
        for name, around in needed.items():
            if around is None:
                self._reason = (
                    f"{name or 'it'!r} may read all positions at once, and no module around it takes hidden states"
                )
                return
        # Experts get the tokens routed to them, which have no sequence dimension to shard.
        needed |= {row: self._around(row, flow) for row in self._rows if not flow.results.get(row)}
        shape = self._reference.call.tensors[self._hidden_index].shape
        leaves = self._reference.outcome.results.items()
        results = tuple(n for (name, n), x in leaves if not name and x.dim() == 3 and x.shape[:2] == shape[:2])
        others = self._idle(flow)
        for more in ([], *([others] if others else []), *([name] for name in self._around_row_layers(flow))):
            outermost = _outermost(name for name in (*needed.values(), *more) if name is not None)
            replicated = {name: RegionIO(tuple(flow.reads[name]), _leaves(flow, name)) for name in outermost}
            rows = tuple(name for name in self._rows if not _is_in(name, replicated))
            for gathers in product(*self._chains(flow, replicated)) if rows else ():
                yield SequenceBlock(flow.hidden, results, dict(gathers), rows, replicated)

    def _chains(self, flow: SequenceDataflow, replicated: Iterable[str]) -> list[list[tuple[str, tuple[Key, ...]]]]:
        """The modules before which each activation that column layers read may be gathered, with arguments."""
        together: dict[tuple[int, str], list[str]] = {}
        for name in self._columns:
            for tensor in flow.reads.get(name, {}).values() if not _is_in(name, replicated) else ():
                together.setdefault((id(tensor), name.rpartition(".")[0]), []).append(name)
        return [
            [(name, _gathered_keys(flow.reads[name], read)) for name in _outwards(names) if flow.reads.get(name)]
            for (read, _), names in together.items()
        ]

    def _around(self, name: str, flow: SequenceDataflow) -> str | None:
        """The smallest module around this one that takes and returns hidden states."""
        return next((n for n in _outwards([name]) if flow.reads.get(n) and _leaves(flow, n)), None)

    def _around_row_layers(self, flow: SequenceDataflow) -> list[str]:
        """Modules around row layers that add to their own input: gathered, it would not fit a shard."""
        return [
            name
            for name, results in flow.results.items()
            if results
            and flow.reads[name]
            and name not in self._rows
            and any(_is_in(row, [name]) for row in self._rows)
        ]

    def _idle(self, flow: SequenceDataflow) -> list[str]:
        """The largest modules with hidden states and weights that are not sharded: attention that stays replicated."""
        found: list[str] = []
        for name, results in flow.results.items():
            module = self._reference.block.get_submodule(name)
            is_sharded = any(_is_in(layer, [name]) for layer in (*self._columns, *self._rows))
            if (
                flow.reads[name]
                and results
                and not is_sharded
                and not is_linear(module)
                and any(map(_has_matrix, module.modules()))
            ):
                found.append(name)
        return _outermost(found)


def _leaves(flow: SequenceDataflow, name: str) -> tuple[int, ...]:
    """Which leaves of a module's results depend on hidden states position by position."""
    return tuple(sorted((*flow.results.get(name, ()), *flow.flat.get(name, ()))))


def _reading_all_positions(block: nn.Module) -> list[str]:
    """Modules that may read all positions at once, without a sign of it in the numbers of one run.

    Batch normalization does in training. A matrix that is no linear layer's may be a router's, which records its
    choices.
    """
    return [
        name
        for name, module in block.named_modules()
        if isinstance(module, NormWithStatistics)
        or (_has_matrix(module) and not is_linear(module) and not isinstance(module, nn.Embedding))
    ]


def _has_matrix(module: nn.Module) -> bool:
    return any(sum(size > 1 for size in held.shape) > 1 for held in module.parameters(recurse=False))


def _outermost(names: Iterable[str]) -> list[str]:
    """The names that are inside none of the others."""
    distinct = sorted(set(names))
    return [name for name in distinct if not _is_in(name, [other for other in distinct if other != name])]


def _is_in(name: str, modules: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _gathered_keys(read: Mapping[Key, Tensor], tensor_id: int) -> tuple[Key, ...]:
    """The arguments of a module with this ``id``; if none, all: what column layers inside read depends on them."""
    return tuple(key for key, x in read.items() if id(x) == tensor_id) or tuple(read)


def _outwards(names: list[str]) -> Iterator[str]:
    """The smallest module that holds all of these (it may be one of them), then those around it, without the block."""
    first, *others = names
    while first:
        if all(f"{name}.".startswith(f"{first}.") for name in others):
            yield first
        first = first.rpartition(".")[0]
