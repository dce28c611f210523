"""Find out which blocks of a divided model can run on shards of sequences, and how; checked by number."""

import copy
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import islice, product
from typing import Any, NamedTuple

from torch import Tensor, nn

from hybridpp.tensor_parallel.division import Division
from hybridpp.tensor_parallel.infer import kind_of
from hybridpp.tensor_parallel.infer_block import SampleCall
from hybridpp.tensor_parallel.infer_layers import layer_of
from hybridpp.tensor_parallel.infer_run import Whole, made_up
from hybridpp.tensor_parallel.plan import Kind, Plan, parse_style
from hybridpp.tensor_parallel.regions import holders
from hybridpp.tensor_parallel.sequence import Key, SequenceBlock
from hybridpp.tensor_parallel.sequence_compare import draws_by_sample, summed_on_shards
from hybridpp.tensor_parallel.shard import is_linear

_MAX_TRIES = 16


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
        return _Search(made_up(block, *call), plan, tp_size).run()
    except Exception as error:  # the block's own, on numbers that it was not made for
        return _Found(reason=f"cannot be tried alone ({type(error).__name__}: {error})")


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

    def run(self) -> _Found:
        """The first way that gives the whole block's numbers."""
        reason = self._obstacle()
        if reason is not None:
            return _Found(reason=reason)
        for block in islice(self._tries(), _MAX_TRIES):
            summed = summed_on_shards(self._whole, self._plan, block, self._tp_size)
            if summed is not None:
                return _Found(block, summed)
        return _Found(reason="on shards of sequences, it gives other numbers")

    @property
    def _hidden(self) -> Tensor:
        assert self._place is not None, "looked at first"
        return self._whole.call.tensors[self._place]

    def _obstacle(self) -> str | None:
        if not self._rows:
            return "no row layer of it is divided"
        if self._place is None or self._hidden.dim() != 3 or self._hidden.shape[1] < 2:
            shape = None if self._place is None else tuple(self._hidden.shape)
            return f"its activations are to be [batch, sequence, hidden], two places or more: the sample's are {shape}"
        for name, module in self._whole.block.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                return f"{name!r} normalises over places"
            held = module.parameters(recurse=False)
            has_matrix = any(sum(size > 1 for size in parameter.shape) > 1 for parameter in held)
            if has_matrix and not (is_linear(module) or isinstance(module, nn.Embedding)):
                return f"{name!r} has weights of its own, of {type(module).__name__}"
        if draws_by_sample(self._whole, self._hidden.shape[1]):
            return "it draws random numbers for samples, not for places in them"
        return None

    def _tries(self) -> Iterator[SequenceBlock]:
        """Joined as near to the column layers as can be, then further out."""
        hidden, reads = self._reads()
        if hidden is None:
            return
        together: dict[int, list[str]] = {}
        for name in self._columns:
            for tensor in reads.get(name, {}).values():
                together.setdefault(id(tensor), []).append(name)
        chains = [
            [(name, _joined_keys(reads[name], read)) for name in _outwards(names) if reads.get(name)]
            for read, names in together.items()
        ]
        leaves = self._whole.outcome.results.items()
        results = tuple(n for n, x in leaves if x.dim() == 3 and x.shape[:2] == self._hidden.shape[:2])
        for places in product(*chains):
            yield SequenceBlock(hidden, results, dict(places), self._rows)

    def _reads(self) -> tuple[Key | None, dict[str, dict[Key, Tensor]]]:
        """The argument that is the hidden states, and, by module, those made of them that have a place each."""
        block, call = copy.deepcopy(self._whole.block).requires_grad_(False), self._whole.call
        tensors = [x.detach().requires_grad_(place == self._place) for place, x in enumerate(call.tensors)]
        tensors = [x.clone() for x in tensors]
        reads: dict[str, dict[Key, Tensor]] = {}

        def noting(name: str) -> Any:
            def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                reads.setdefault(name, {key: x for key, x in _keyed(args, kwargs) if self._is_made_of_hidden(x)})

            return note

        for name, module in block.named_modules():
            if name:
                module.register_forward_pre_hook(noting(name), with_kwargs=True)
        call.run(block, tensors)
        assert self._place is not None, "looked at first"
        hidden = next((key for key, x in _keyed(*call.arguments(tensors)) if x is tensors[self._place]), None)
        return hidden, reads

    def _is_made_of_hidden(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.requires_grad and x.dim() == 3 and x.shape[:2] == self._hidden.shape[:2]


def _keyed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Key, Any]]:
    return [*enumerate(args), *kwargs.items()]


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
