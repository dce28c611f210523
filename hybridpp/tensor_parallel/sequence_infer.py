"""Find out which blocks of a divided model can run on shards of sequences, and how; checked by number."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.tensor_parallel.division import Division
from hybridpp.tensor_parallel.inference.block import SampleCall
from hybridpp.tensor_parallel.inference.model import kind_of
from hybridpp.tensor_parallel.inference.run import Whole, made_up
from hybridpp.tensor_parallel.linear import layer_of
from hybridpp.tensor_parallel.plan import Kind, Plan, parse_style
from hybridpp.tensor_parallel.regions import holders
from hybridpp.tensor_parallel.sequence import Ends, Key, SequenceBlock
from hybridpp.tensor_parallel.sequence_compare import obstacle_in_training, summed_on_shards
from hybridpp.tensor_parallel.sequence_flow import SequenceFlow, sequence_flow
from hybridpp.tensor_parallel.shard import is_linear

_MAX_TRIES = 24


class SequencePlan(NamedTuple):
    """Which blocks run on shards of sequences.

    Attributes:
        blocks: how, by name.
        summed: their parameters that every rank has whole and uses on its shards: their gradients are to be summed.
        reasons: why the other blocks do not, by name.
    """

    blocks: Mapping[str, SequenceBlock] = {}
    summed: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = {}


class _Found(NamedTuple):
    """How one block runs on shards, or why it does not; names are inside the block."""

    block: SequenceBlock | None = None
    summed: frozenset[str] = frozenset()
    reason: str = ""


def infer_sequence(
    model: nn.Module, blocks: Iterable[str], sample_calls: Mapping[str, SampleCall], plan: Plan, tp_size: int
) -> SequencePlan:
    """Which blocks can run on shards of sequences so that every number stays what it is.

    Of each kind of block one is copied, given made-up weights, divided as the plan says over in-process ranks, and
    compared with the whole one: results and every gradient.

    Args:
        model: whole; it is left as it was, and its weights' values do not matter.
        blocks: names of the modules to look into.
        sample_calls: for each block what it was called with once; blocks without are left as they are.
        plan: how the model will be divided.
        tp_size: over how many ranks.
    """
    known: dict[Hashable, _Found] = {}
    found: dict[str, _Found] = {}
    for name in blocks:
        if name not in sample_calls:
            found[name] = _Found(reason="was not called")
            continue
        inner = _inside(plan, name)
        kind = (kind_of(model.get_submodule(name), *sample_calls[name]), str(inner))
        if kind not in known:
            known[kind] = _find(model.get_submodule(name), sample_calls[name], inner, tp_size)
        found[name] = known[kind]
    _leave_shared(model, found)
    return SequencePlan(
        {name: one.block for name, one in found.items() if one.block is not None},
        frozenset(f"{name}.{inner}" for name, one in found.items() for inner in one.summed),
        {name: one.reason for name, one in found.items() if one.block is None},
    )


def _leave_shared(model: nn.Module, found: dict[str, _Found]) -> None:
    """Leave blocks whose summed gradients others add to, who have the whole of it already."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    while True:
        summed = {f"{name}.{inner}": name for name, one in found.items() for inner in one.summed}
        bad = {summed[n] for same in names.values() if not same <= summed.keys() for n in same & summed.keys()}
        if not bad:
            return
        for name in bad:
            found[name] = _Found(reason="shares parameters with modules that do not run on shards")


def _inside(plan: Plan, block: str) -> Plan:
    """What a plan says about one block; names are inside of it."""
    rest = Division(**{item.name: _named(getattr(plan.rest, item.name), block) for item in fields(Division)})
    values = {name: _named(value, block) for name, value in plan._asdict().items() if name != "rest"}
    return Plan(**values, rest=rest)


def _named(values: Any, block: str) -> Any:
    """Those of a mapping or set whose name, or the name in whose key, is inside a block."""
    short = {key: _within(key, block) for key in values}
    short = {key: inner for key, inner in short.items() if inner is not None}
    return (
        {inner: values[key] for key, inner in short.items()}
        if isinstance(values, Mapping)
        else frozenset(short.values())
    )


def _within(key: Any, block: str) -> Any:
    name, *others = key if isinstance(key, tuple) else (key,)
    if not f"{name}.".startswith(f"{block}."):
        return None
    inner = name.removeprefix(block).removeprefix(".")
    return (inner, *others) if isinstance(key, tuple) else inner


def _find(block: nn.Module, call: SampleCall, plan: Plan, tp_size: int) -> _Found:
    try:
        return _Search(made_up(block, *_lively(call)), plan, tp_size).run()
    except Exception as error:  # the block's own, on numbers that it was not made for
        return _Found(reason=f"cannot be tried alone ({type(error).__name__}: {error})")


def _lively(call: SampleCall) -> SampleCall:
    """With hidden states that differ from place to place: a norm of nearly constant ones has no gradient to look at."""
    leaves, tree = pytree.tree_flatten(call)
    numbers = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if numbers:
        hidden = leaves[numbers[0]]
        made = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
        leaves[numbers[0]] = made.to(hidden.device, hidden.dtype).requires_grad_(hidden.requires_grad)
    lively: SampleCall = pytree.tree_unflatten(leaves, tree)
    return lively


class _Search:
    """Tries how a block can run on shards."""

    def __init__(self, whole: Whole, plan: Plan, tp_size: int):
        self._whole = whole
        self._plan = plan
        self._tp_size = tp_size
        kinds = {name: parse_style(style).kind for name, style in plan.styles.items()}
        rest = [name for name in holders(plan.rest) if layer_of(whole.block.get_submodule(name)) is not None]
        rows = {name for name, kind in kinds.items() if kind is Kind.ROW}
        self._rows = tuple(sorted(rows | plan.rest.sums.intersection(rest)))
        columns = {name for name, kind in kinds.items() if kind in (Kind.COLUMN, Kind.FUSED_COLUMN)}
        self._columns = sorted(columns | plan.rest.enters.intersection(rest))
        floating = [place for place, tensor in enumerate(whole.call.tensors) if tensor.is_floating_point()]
        self._place = floating[0] if floating else None
        self._why = "on shards of sequences, it gives other numbers"

    def run(self) -> _Found:
        """The first way that gives the whole block's numbers."""
        reason = self._obstacle()
        if reason is not None:
            return _Found(reason=reason)
        for block in islice(self._tries(), _MAX_TRIES):
            summed = summed_on_shards(self._whole, self._plan, block, self._tp_size)
            if summed is not None:
                return _Found(block, summed)
        return _Found(reason=self._why)

    def _obstacle(self) -> str | None:
        if not self._rows:
            return "no row layer of it is divided"
        shape = () if self._place is None else tuple(self._whole.call.tensors[self._place].shape)
        if len(shape) != 3 or shape[1] < 2:
            return f"its activations are to be [batch, sequence, hidden], two places or more: the sample's are {shape}"
        return obstacle_in_training(self._whole, shape[1])

    def _tries(self) -> Iterator[SequenceBlock]:
        """Joined as near to the column layers as can be, then further out.

        Then with whole sequences for all others; then for one of those modules that hold row layers.
        """
        assert self._place is not None, "looked at before"
        flow = sequence_flow(self._whole, self._place)
        if flow.hidden is None:
            return
        needed = {name: self._around(name, flow) for name in _of_all_places(self._whole.block)}
        for name, around in needed.items():
            if around is None:
                self._why = f"{name or 'it'!r} may look at all places at once, and is given no hidden states alone"
                return
        # Where experts are given the samples routed to them, there are no places to be put in shards.
        needed |= {row: self._around(row, flow) for row in self._rows if not flow.results.get(row)}
        shape = self._whole.call.tensors[self._place].shape
        leaves = self._whole.outcome.results.items()
        results = tuple(n for n, x in leaves if x.dim() == 3 and x.shape[:2] == shape[:2])
        others = self._idle(flow)
        for more in ([], *([others] if others else []), *([name] for name in self._around_rows(flow))):
            outermost = _outermost(name for name in (*needed.values(), *more) if name is not None)
            wholes = {name: Ends(tuple(flow.reads[name]), _leaves(flow, name)) for name in outermost}
            rows = tuple(name for name in self._rows if not _is_in(name, wholes))
            for places in product(*self._chains(flow, wholes)) if rows else ():
                yield SequenceBlock(flow.hidden, results, dict(places), rows, wholes)

    def _chains(self, flow: SequenceFlow, wholes: Iterable[str]) -> list[list[tuple[str, tuple[Key, ...]]]]:
        """For each activation that column layers read, where it may be joined, and which arguments are."""
        together: dict[tuple[int, str], list[str]] = {}
        for name in self._columns:
            for tensor in flow.reads.get(name, {}).values() if not _is_in(name, wholes) else ():
                together.setdefault((id(tensor), name.rpartition(".")[0]), []).append(name)
        return [
            [(name, _joined_keys(flow.reads[name], read)) for name in _outwards(names) if flow.reads.get(name)]
            for (read, _), names in together.items()
        ]

    def _around(self, name: str, flow: SequenceFlow) -> str | None:
        """The smallest module around this one that is given hidden states and returns some."""
        return next((n for n in _outwards([name]) if flow.reads.get(n) and _leaves(flow, n)), None)

    def _around_rows(self, flow: SequenceFlow) -> list[str]:
        """Modules with hidden states that add to what they were given behind a row layer: whole, it would not fit."""
        return [
            name
            for name, results in flow.results.items()
            if results
            and flow.reads[name]
            and name not in self._rows
            and any(_is_in(row, [name]) for row in self._rows)
        ]

    def _idle(self, flow: SequenceFlow) -> list[str]:
        """The largest modules with hidden states and weights, none of them divided: attention that is left whole."""
        found: list[str] = []
        for name, results in flow.results.items():
            module = self._whole.block.get_submodule(name)
            divided = any(_is_in(layer, [name]) for layer in (*self._columns, *self._rows))
            if (
                flow.reads[name]
                and results
                and not divided
                and not is_linear(module)
                and any(map(_has_matrix, module.modules()))
            ):
                found.append(name)
        return _outermost(found)


def _leaves(flow: SequenceFlow, name: str) -> tuple[int, ...]:
    """Which leaves of what a module returns are made of hidden states, place by place."""
    return tuple(sorted((*flow.results.get(name, ()), *flow.flat.get(name, ()))))


def _of_all_places(block: nn.Module) -> list[str]:
    """Modules that may look at all places at once, and not show it in the numbers of one run.

    Batch normalisation does so in training. Weights that are no linear layer's may be a router's, of whose choices
    others make a record.
    """
    return [
        name
        for name, module in block.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        or (_has_matrix(module) and not is_linear(module) and not isinstance(module, nn.Embedding))
    ]


def _has_matrix(module: nn.Module) -> bool:
    return any(sum(size > 1 for size in held.shape) > 1 for held in module.parameters(recurse=False))


def _outermost(names: Iterable[str]) -> list[str]:
    """Those that are in none of the others."""
    different = sorted(set(names))
    return [name for name in different if not _is_in(name, [other for other in different if other != name])]


def _is_in(name: str, modules: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _joined_keys(read: Mapping[Key, Tensor], by_columns: int) -> tuple[Key, ...]:
    """A module's arguments that the column layers in it read, by ``id``; else all: they read what is made of them."""
    return tuple(key for key, x in read.items() if id(x) == by_columns) or tuple(read)


def _outwards(names: list[str]) -> Iterator[str]:
    """The smallest module that holds all of these (it may be one of them), then those around it, but for the block."""
    first, *others = names
    while first:
        if all(f"{name}.".startswith(f"{first}.") for name in others):
            yield first
        first = first.rpartition(".")[0]
