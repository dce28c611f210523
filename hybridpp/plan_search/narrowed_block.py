"""A copy of a large block with fewer channels and experts, on which a search tries what it would try on the block.

How a block may be divided depends on its code and on what the number of ranks divides, not on how wide it is. A block
of a Llama of 405 billion parameters takes 26 GB in double precision; with an eighth of its width, a fiftieth.
"""

import copy
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import gcd
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from hybridpp.nn import walk
from hybridpp.nn.hollow import Hollow
from hybridpp.nn.torch_private import has_no_data, pytree
from hybridpp.plan_search.block_run import SampleCall, call_in, filled_copy
from hybridpp.plan_search.training_mode import Operations, constant_draws
from hybridpp.plan_search.trial_errors import is_machine_failure
from hybridpp.sharding_plan.sharding_spec import DimShard, ShardingSpec

LARGE = 2**20
"""Elements of a block that is narrowed."""

# Elements that are few enough, channels below which kernels of attention want no fewer, and experts.
_FEW, _LEAST_CHANNELS, _LEAST_EXPERTS = 2**20, 16, 4
# Kernels of stacked experts want rows of a rank's shard to be multiples of 16 bytes.
_ALIGNED = 8
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
# Copies that are run: each takes some hundredths of a second.
_MOST_RUNS = 120

# What an attribute says by its name: how many there are of something, or a size that no weight has. A wrong guess makes
# the copy run otherwise than the block, and so is found.
_EXPERTS = re.compile(r"experts$|^n_?experts|^num_experts$")
_HEADS = re.compile(r"heads?$|^n_?heads?|^h$|heads_|_heads?_|key_value_groups|query_groups")
_COUNTS = re.compile(rf"{_HEADS.pattern}|experts|per_tok|top_?k|groups?$|layers?$|repeat|n_rep")
_OTHERS = re.compile(
    r"idx|index|_id$|max_|position|window|vocab|epoch|seed|kernel|stride|padding|dilation|patch|image|chunk|block|seq|"
    r"length|ctx|num_embeddings|version|batch|interval|steps|bits|^layer"
)
_SIZES = re.compile(r"dim|size|width|per_head|features|channels|hidden|inner|embd|rank|shape|^n[xf]$")

_Shape: TypeAlias = tuple[int, ...]


class _Sizes(NamedTuple):
    """Sizes of everything in a block and in its calls.

    Attributes:
        params: shapes, by name.
        buffers: the same.
        attributes: numbers, by the ``id`` of what has the attribute and its name.
        arguments: of each call, the shapes of the leaves that are tensors; None: no call.
    """

    params: dict[str, _Shape]
    buffers: dict[str, _Shape]
    attributes: dict[tuple[int, str], Any]
    arguments: list[list[_Shape | None] | None]


class _Step(NamedTuple):
    """Sizes of which some are divided by a prime.

    Attributes:
        values: that are divided.
        ways: the sizes after it: where a value is that of other things, too, there are several.
    """

    values: frozenset[int]
    ways: Iterator[_Sizes]


class _Structure(NamedTuple):
    """What a block runs.

    Attributes:
        run: its calls and operations, in order, with the shapes of what they read.
        shapes: of the leaves of each module's arguments and results, by the module's name, which of both, and number.
    """

    run: list[Any]
    shapes: dict[tuple[str, str, int], _Shape]


@dataclass(frozen=True)
class NarrowedBlock:
    """A narrow copy of a block, which runs the same operations on smaller tensors.

    Attributes:
        block: the copy, without values.
        calls: of it.
        share: the largest factor between a size of the block and of the copy.
    """

    block: nn.Module
    calls: list[SampleCall | None]
    share: int
    _real: nn.Module
    _shapes: tuple[Mapping[Any, _Shape], Mapping[Any, _Shape]] = field(repr=False)

    @property
    def first_call(self) -> SampleCall:
        """The call in evaluation."""
        call = self.calls[0]
        assert call is not None, "a block that is tried is called"
        return call

    def narrowed(self, spec: ShardingSpec) -> ShardingSpec | None:
        """A spec of the block, for the copy; None: it has sizes that the copy does not have."""
        return self._converted(spec, 0)

    def widened(self, spec: ShardingSpec) -> ShardingSpec | None:
        """A spec of the copy, for the block; None: it has sizes of which the block's are not known."""
        return self._converted(spec, 1)

    def _converted(self, spec: ShardingSpec, source: int) -> ShardingSpec | None:
        blocks, shapes = (self._real, self.block), self._shapes
        old, new = blocks[source], blocks[1 - source]

        def ratio(kind: str, name: str, number: int, dim: int) -> tuple[int, int]:
            key = name, kind, number
            return shapes[1 - source][key][dim], shapes[source][key][dim]

        def resized(part: DimShard, sizes: tuple[int, int]) -> DimShard:
            return replace(part, widths=tuple(_scaled(width, sizes) for width in part.widths))

        def of_parameter(name: str, part: DimShard) -> DimShard:
            one, other = new.get_parameter(name), old.get_parameter(name)
            return resized(part, (one.shape[part.dim], other.shape[part.dim]))

        try:
            return replace(
                spec,
                params={name: of_parameter(name, part) for name, part in spec.params.items()},
                attributes={
                    (name, key): _scaled(value, (_attribute(new, name, key), _attribute(old, name, key)))
                    for (name, key), value in spec.attributes.items()
                },
                arguments={
                    (name, number): resized(part, ratio("argument", name, number, part.dim))
                    for (name, number), part in spec.arguments.items()
                },
                results={
                    (name, number): resized(part, ratio("result", name, number, part.dim))
                    for (name, number), part in spec.results.items()
                },
                gather_inputs={
                    name: resized(part, ratio("argument", name, 0, part.dim))
                    for name, part in spec.gather_inputs.items()
                },
                local_width_args={
                    (name, number): _scaled(width, ratio("argument", name, number, -1))
                    for (name, number), width in spec.local_width_args.items()
                },
            )
        except (_NoWholeNumber, KeyError, IndexError):
            return None


class _NoWholeNumber(Exception):
    """A size would not be a whole number in the other block."""


def _scaled(value: int, sizes: tuple[int, int]) -> int:
    new, old = sizes
    if not old or value * new % old:
        raise _NoWholeNumber
    return value * new // old


def _attribute(block: nn.Module, name: str, key: str) -> int:
    value: Any = walk.submodule(block, name)
    for part in key.split("."):
        value = vars(value)[part]
    return int(value)


def narrowed_block(block: nn.Module, calls: Sequence[SampleCall | None], tp_size: int) -> NarrowedBlock | None:
    """A narrow copy of a large block; None: it is small, or none was found that runs the same.

    Sizes of weights, and of what is computed with them, are divided: head counts are not, as ranks divide heads. What
    a divisor of ``tp_size`` divides, it divides in the copy, and what it does not, it does not. Whether a copy runs the
    same operations, with the same weights, in the same order, is seen in a run of each without values
    (:class:`~hybridpp.nn.hollow.Hollow`), in evaluation and in training.

    Args:
        block: may be on the meta device.
        calls: arguments of its forward; then those in training or None, and those of other samples.
        tp_size: number of ranks.
    """
    if sum(held.numel() for held in walk.parameters(block)) < LARGE:
        return None
    return _Narrowing(block, calls, tp_size).run()


class NarrowCopies:
    """Narrow copies of the blocks of a model, made once for searches with several numbers of ranks.

    Args:
        tp_size: a multiple of these numbers; 1: each search has a copy of its own.
    """

    def __init__(self, tp_size: int = 1):
        self._tp_size = tp_size
        self._made: dict[Hashable, NarrowedBlock | None] = {}

    def of(
        self, kind: Hashable, block: nn.Module, calls: Sequence[SampleCall | None], tp_size: int
    ) -> NarrowedBlock | None:
        """See :func:`narrowed_block`; ``kind``: equal for blocks and calls that may have the same copy."""
        # What divisors of the multiple divide is kept, so what divisors of the number do, too.
        multiple = self._tp_size if self._tp_size % tp_size == 0 else tp_size
        if (kind, multiple) not in self._made:
            self._made[kind, multiple] = narrowed_block(block, calls, multiple)
        return self._made[kind, multiple]


class _Narrowing:
    """Searches for the narrow copy: divides some sizes by a prime, and keeps that if the copy runs as before."""

    def __init__(self, block: nn.Module, calls: Sequence[SampleCall | None], tp_size: int):
        self._block, self._calls, self._tp_size = block, list(calls), tp_size
        self._objects = dict(_objects_with_sizes(block))
        self._num_runs = 0
        # The expected structures, by call and mode.
        self._expected: dict[tuple[int, bool], _Structure | None] = {}
        sizes = _sizes_of(block, self._objects, self._calls)
        self._first = sizes

    def run(self) -> NarrowedBlock | None:
        """The copy; None: there is none."""
        sizes = self._first
        for steps in (self._expert_steps, self._width_steps):
            sizes = self._divided(sizes, steps)
        if sizes is self._first or not all(self._is_alike(sizes, *way) for way in self._other_ways()):
            return None
        real, narrow = self._expected[0, False], self._structure(sizes, 0, False)
        if real is None or narrow is None:
            return None
        params = zip(self._first.params.values(), sizes.params.values(), strict=True)
        share = max(one // other for shapes in params for one, other in zip(*shapes, strict=True) if other)
        block, calls = self._copy(sizes)
        return NarrowedBlock(block, calls, share, self._block, (real.shapes, narrow.shapes))

    def _other_ways(self) -> Iterator[tuple[int, bool]]:
        """The calls after the first, by number, and modes in which the copy must run as the block does."""
        for number, call in enumerate(self._calls):
            if number and call is not None:
                yield number, False
                yield number, True

    def _divided(self, sizes: _Sizes, steps: Callable[[_Sizes, int], Iterator["_Step"]]) -> _Sizes:
        """Sizes after as many steps as are needed, and as the copy still runs as the block does."""
        for prime in _PRIMES:
            # What was of no use is of none after another step either.
            useless: set[frozenset[int]] = set()
            while _num_elements(sizes) > _FEW and self._num_runs < _MOST_RUNS:
                step = next((one for one in steps(sizes, prime) if one.values not in useless), None)
                if step is None:
                    break
                found = next(filter(self._is_alike_in_both, step.ways), None)
                if found is None:
                    useless.add(step.values)
                sizes = found or sizes
        return sizes

    def _is_alike_in_both(self, sizes: _Sizes) -> bool:
        return self._is_alike(sizes, 0, False) and self._is_alike(sizes, 0, True)

    def _is_alike(self, sizes: _Sizes, number: int, training: bool) -> bool:
        if (number, training) not in self._expected:
            self._expected[number, training] = self._structure(self._first, number, training)
        expected = self._expected[number, training]
        self._num_runs += 1
        found = self._structure(sizes, number, training)
        if expected is None or found is None:
            # The block does not run so, and neither does the copy: trials will show the same of both.
            return expected is None and found is None and (bool(number) or training)
        return _Likeness(self._first, sizes, self._tp_size).of(expected, found)

    def _structure(self, sizes: _Sizes, number: int, training: bool) -> _Structure | None:
        """What a copy of these sizes runs; None: it raises."""
        try:
            block, calls = self._copy(sizes, on_meta=True)
            call = calls[number]
            assert call is not None, "only calls are run"
            return _run_without_values(block.train(training), call)
        except Exception as error:  # a block may raise anything
            if is_machine_failure(error):
                raise
            return None

    def _expert_steps(self, sizes: _Sizes, prime: int) -> Iterator[_Step]:
        """Steps to fewer experts."""
        heads = {value for (_, key), value in sizes.attributes.items() if type(value) is int and _counts_heads(key)}
        for count in sorted(_expert_counts(sizes) - heads):
            less = count // prime
            if count % prime == 0 and less >= _LEAST_EXPERTS and _keeps(count, less, self._tp_size):
                yield _Step(frozenset({count}), self._fewer_experts(sizes, count, less))

    def _fewer_experts(self, sizes: _Sizes, count: int, less: int) -> Iterator[_Sizes]:
        # A vector of as many numbers may be one of channels.
        for vectors in (True, False):

            def of_shape(shape: _Shape, vectors: bool = vectors) -> _Shape:
                is_of_experts = shape[:1] == (count,) and (len(shape) > 1 or vectors)
                return (less, *shape[1:]) if is_of_experts else shape

            params = {name: of_shape(shape) for name, shape in sizes.params.items()}
            changed = [name for name, shape in params.items() if shape != sizes.params[name]]
            holders = {id(walk.submodule(self._block, name.rpartition(".")[0])) for name in changed}

            def of_attribute(owner: int, key: str, value: Any, holders: Collection[int] = holders) -> Any:
                is_count = _EXPERTS.search(key) or (owner in holders and not re.search("heads|dim", key))
                return less if type(value) is int and value == count and is_count else value

            yield sizes._replace(
                params=params,
                buffers={name: of_shape(shape) for name, shape in sizes.buffers.items()},
                attributes={key: of_attribute(*key, value) for key, value in sizes.attributes.items()},
            )

    def _width_steps(self, sizes: _Sizes, prime: int) -> Iterator[_Step]:
        """Steps to fewer channels: of all that can be divided, then of one alone and its multiples (fused layers)."""
        values = self._divisible(sizes, prime)
        weight: dict[int, int] = {}
        for shape in sizes.params.values():
            for value in values.intersection(shape):
                weight[value] = weight.get(value, 0) + _product(shape)
        chosen = [frozenset(values)]
        for value in sorted(weight, key=lambda value: -weight[value]):
            chosen.append(frozenset({value}))
            chosen.append(frozenset(value * number for number in (1, 2, 3, 4)) & values)
        for some in dict.fromkeys(one for one in chosen if one):
            yield _Step(some, self._fewer_channels(sizes, some, prime))

    def _fewer_channels(self, sizes: _Sizes, values: Set[int], prime: int) -> Iterator[_Sizes]:
        seen = [sizes]
        for vectors, matrices, dims in product((True, False), (True, False), ("last", "any", "none")):
            made = self._narrower(sizes, values, prime, vectors, matrices, dims)
            if made not in seen:
                seen.append(made)
                yield made

    def _divisible(self, sizes: _Sizes, prime: int) -> set[int]:
        """The sizes that can be divided by a prime, with whatever the number of ranks divides still divided."""
        units: dict[int, int] = {}
        for shape in sizes.params.values():
            for dim, value in enumerate(shape):
                # The first of three dimensions counts experts; of more, the last are those of a kernel.
                if (len(shape) == 3 and dim == 0) or (len(shape) > 3 and dim > 1):
                    continue
                units[value] = max(units.get(value, 1), _ALIGNED if len(shape) == 3 else 1)
        for (_, key), value in sizes.attributes.items():
            for one in _numbers_in(value):
                if _SIZES.search(key) and not _OTHERS.search(key):
                    units.setdefault(one, 1)
        return {
            value
            for value, unit in units.items()
            if value % prime == 0
            and value // prime >= _LEAST_CHANNELS
            and _keeps(value, value // prime, unit * self._tp_size)
        }

    def _narrower(
        self, sizes: _Sizes, values: Set[int], prime: int, vectors: bool, matrices: bool, dims: str
    ) -> _Sizes:
        """The sizes with some values divided.

        Args:
            sizes: before.
            values: that are divided.
            prime: by which.
            vectors: whether vectors as long as there are heads, or experts, are of channels.
            matrices: whether such dimensions of other weights are.
            dims: which dimensions of arguments are of channels.
        """

        attributes = sizes.attributes.items()
        counts = {value for (_, key), value in attributes if _is_count(key) and type(value) is int}

        def of_parameter(shape: _Shape) -> _Shape:
            found = []
            for dim, size in enumerate(shape):
                is_count = size in counts and not (vectors if len(shape) == 1 else matrices)
                is_other = (len(shape) == 3 and dim == 0) or (len(shape) > 3 and dim > 1)
                found.append(size if is_count or is_other or size not in values else size // prime)
            return tuple(found)

        def of_argument(shape: _Shape | None, is_floating: bool) -> _Shape | None:
            if not shape or not is_floating or dims == "none":
                return shape
            first = len(shape) - 1 if dims == "last" else 1
            return tuple(size // prime if dim >= first and size in values else size for dim, size in enumerate(shape))

        def of_attribute(owner: int, key: str, value: Any) -> Any:
            is_depthwise = key == "groups" and sizes.attributes.get((owner, "in_channels")) == value
            if not is_depthwise and (_is_count(key) or _OTHERS.search(key)):
                return value
            if isinstance(value, tuple | list):
                # Pieces of a size, or of half of it (the angles of a head).
                are_pieces = len(value) > 1 and bool(values & {sum(value), 2 * sum(value)})
                are_pieces = are_pieces and all(one % prime == 0 for one in value)
                return type(value)(one // prime if one in values or are_pieces else one for one in value)
            return value // prime if value in values else value

        arguments = []
        for call, shapes in zip(self._calls, sizes.arguments, strict=True):
            leaves = [] if call is None else pytree.tree_leaves(call)
            arguments.append(
                None
                if shapes is None
                else [of_argument(shape, _has_fractions(leaf)) for leaf, shape in zip(leaves, shapes, strict=True)]
            )
        buffers = dict(walk.named_buffers(self._block))
        return _Sizes(
            {name: of_parameter(shape) for name, shape in sizes.params.items()},
            {
                name: of_parameter(shape) if _has_fractions(buffers[name]) else shape
                for name, shape in sizes.buffers.items()
            },
            {key: of_attribute(*key, value) for key, value in sizes.attributes.items()},
            arguments,
        )

    def _copy(self, sizes: _Sizes, on_meta: bool = False) -> tuple[nn.Module, list[SampleCall | None]]:
        """A copy of the block with these sizes, and its calls. Its matrices have no values, and no memory either if
        they shall be on the meta device."""
        memo: dict[int, Any] = {}
        for name, held in walk.named_parameters(self._block):
            memo[id(held)] = nn.Parameter(_less(held, sizes.params[name], on_meta), held.requires_grad)
        for name, buffer in walk.named_buffers(self._block):
            if tuple(buffer.shape) != sizes.buffers[name]:
                memo[id(buffer)] = _less(buffer, sizes.buffers[name], on_meta)
        changed: dict[int, dict[str, Any]] = {}
        for (owner, key), value in sizes.attributes.items():
            if value != self._first.attributes[owner, key]:
                changed.setdefault(owner, {})[key] = value
        for owner, values in changed.items():
            thing = self._objects[owner]
            if not isinstance(thing, nn.Module):
                copied = memo[owner] = copy.copy(thing)
                (_held_by(copied) or {}).update(values)
        kept = [v for part in walk.modules(self._block) for v in vars(part).values() if isinstance(v, Tensor)]
        memo |= {id(value): value.detach().clone() for value in kept if id(value) not in memo}
        block = copy.deepcopy(self._block, memo)
        for owner, values in changed.items():
            if isinstance(self._objects[owner], nn.Module):
                vars(memo[owner]).update(values)
        calls: list[SampleCall | None] = []
        for call, shapes in zip(self._calls, sizes.arguments, strict=True):
            if call is None or shapes is None:
                calls.append(None)
                continue
            leaves, tree = pytree.tree_flatten(call)
            cut = [
                leaf if shape is None or tuple(leaf.shape) == shape else _cut(leaf, shape)
                for leaf, shape in zip(leaves, shapes, strict=True)
            ]
            calls.append(pytree.tree_unflatten(cut, tree))
        return block, calls


class _Likeness:
    """Whether a block with other sizes runs as before: the same operations, in which sizes are divided.

    Args:
        first: the block's sizes.
        sizes: the copy's.
        tp_size: number of ranks, which must divide the same of each size.
    """

    def __init__(self, first: _Sizes, sizes: _Sizes, tp_size: int):
        self._tp_size = tp_size
        # What counts heads does so in the copy, too, unless a size with this number was divided, or, in a last
        # dimension, one that is twice as large: half of a head's channels is rotated.
        self._new: dict[int, set[int]] = {}
        for one, other in zip(_all_sizes(first), _all_sizes(sizes), strict=True):
            self._new.setdefault(one, {one}).add(other)
        attributes = first.attributes.items()
        self._counts = {one for (_, key), one in attributes if type(one) is int and _counts_heads(key)}

    def of(self, expected: _Structure, found: _Structure) -> bool:
        """Of two runs."""
        if len(expected.run) != len(found.run) or expected.shapes.keys() != found.shapes.keys():
            return False
        return all(map(self._is_same_entry, expected.run, found.run)) and all(
            self._is_narrower(shape, found.shapes[key]) for key, shape in expected.shapes.items()
        )

    def _is_same_entry(self, expected: Any, found: Any) -> bool:
        if isinstance(expected, str) or isinstance(found, str):
            return bool(expected == found)
        (func, reads), (other, others) = expected, found
        return func is other and len(reads) == len(others) and all(map(self._is_same_read, reads, others))

    def _is_same_read(self, expected: tuple[str | None, _Shape], found: tuple[str | None, _Shape]) -> bool:
        return expected[0] == found[0] and self._is_narrower(expected[1], found[1])

    def _is_narrower(self, shape: _Shape, narrow: _Shape) -> bool:
        return len(shape) == len(narrow) and all(
            size == less or self._is_less(size, less, dim == len(shape) - 1)
            for dim, (size, less) in enumerate(zip(shape, narrow, strict=True))
        )

    def _is_less(self, size: int, less: int, is_last: bool) -> bool:
        if size in self._counts and less not in self._new.get(size, ()):
            is_half = is_last and 2 * less in self._new.get(2 * size, ())
            if not is_half:
                return False
        return bool(less) and size % less == 0 and _keeps(size, less, self._tp_size)


def _is_count(key: str) -> bool:
    return bool(_COUNTS.search(key)) and not _SIZES.search(key)


def _expert_counts(sizes: _Sizes) -> set[int]:
    """Numbers of experts: those of weights of three dimensions."""
    stacked = {shape[0] for shape in sizes.params.values() if len(shape) == 3}
    attributes = sizes.attributes.items()
    named = {value for (_, key), value in attributes if type(value) is int and _EXPERTS.search(key)}
    return stacked & named or stacked


def _counts_heads(key: str) -> bool:
    return bool(_HEADS.search(key)) and not _SIZES.search(key)


def _keeps(size: int, less: int, unit: int) -> bool:
    """Whether of a unit, the same divides both."""
    return gcd(size, unit) == gcd(less, unit)


def _all_sizes(sizes: _Sizes) -> Iterator[int]:
    """Those that are no counts, in order."""
    for shape in (*sizes.params.values(), *sizes.buffers.values()):
        yield from shape[1:] if len(shape) == 3 else shape
    for (_, key), value in sizes.attributes.items():
        yield from () if _is_count(key) else _numbers_in(value)
    for call in sizes.arguments:
        for one in call or ():
            yield from one or ()


def _run_without_values(block: nn.Module, call: SampleCall) -> _Structure:
    """What a block runs, on weights without values. Nothing is computed but what is made of its arguments alone."""
    shapes: dict[tuple[str, str, int], _Shape] = {}

    def note(name: str, kind: str, given: Any) -> None:
        for number, leaf in enumerate(pytree.tree_leaves(given)):
            if isinstance(leaf, Tensor):
                shapes.setdefault((name, kind, number), tuple(leaf.shape))

    with Hollow(), torch.random.fork_rng(devices=[]):
        dtype = torch.float32

        def hollow(held: nn.Parameter) -> nn.Parameter:
            kind = dtype if held.is_floating_point() else held.dtype
            return nn.Parameter(torch.empty(held.shape, dtype=kind), held.is_floating_point())

        copied = filled_copy(block, hollow, dtype).to("cpu")
        for name, module in walk.named_modules(copied):
            module.register_forward_pre_hook(
                partial(lambda name, module, args, kwargs: note(name, "argument", (args, kwargs)), name),
                with_kwargs=True,
            )
            module.register_forward_hook(
                partial(lambda name, module, args, output: note(name, "result", output), name), prepend=True
            )
        made = call_in(dtype, pytree.tree_map_only(Tensor, lambda leaf: leaf.to("cpu"), call))
        operations = Operations(copied)
        with torch.enable_grad(), constant_draws(), operations:
            made.run(copied, [leaf.clone() for leaf in made.tensors])
    return _Structure(operations.run, shapes)


def _objects_with_sizes(block: nn.Module) -> Iterator[tuple[int, Any]]:
    """The block's modules, and the plain objects that they refer to (configurations), by ``id``."""
    for module in walk.modules(block):
        yield id(module), module
        for value in vars(module).values():
            yield from _plain_objects(value, 2)


def _plain_objects(value: Any, depth: int) -> Iterator[tuple[int, Any]]:
    held = _held_by(value)
    if held is not None:
        yield id(value), value
        for inner in held.values() if depth > 1 else ():
            yield from _plain_objects(inner, depth - 1)


def _held_by(thing: Any) -> dict[str, Any] | None:
    """The attributes of a module or of a plain object, or the entries of a dict with names; None: of another thing."""
    if type(thing) is dict:
        return thing if all(type(key) is str for key in thing) else None
    if isinstance(thing, nn.Module):
        return vars(thing)
    is_plain = hasattr(thing, "__dict__") and not isinstance(thing, Tensor | type) and not callable(thing)
    is_plain = is_plain and type(thing).__module__.partition(".")[0] not in ("builtins", "torch", "collections")
    return vars(thing) if is_plain else None


def _sizes_of(block: nn.Module, objects: Mapping[int, Any], calls: Iterable[SampleCall | None]) -> _Sizes:
    own = {
        (number, key): value
        for number, thing in objects.items()
        for key, value in (_held_by(thing) or {}).items()
        if _numbers_in(value)
    }
    return _Sizes(
        {name: tuple(held.shape) for name, held in walk.named_parameters(block)},
        {name: tuple(held.shape) for name, held in walk.named_buffers(block)},
        own,
        [
            None
            if call is None
            else [tuple(x.shape) if isinstance(x, Tensor) else None for x in pytree.tree_leaves(call)]
            for call in calls
        ],
    )


def _numbers_in(value: Any) -> Sequence[int]:
    """The whole numbers that an attribute has: one, or several in a list or a plain tuple."""
    if type(value) is int:
        return (value,)
    if type(value) in (tuple, list, torch.Size) and value and all(type(one) is int for one in value):
        return tuple(value)
    return ()


def _num_elements(sizes: _Sizes) -> int:
    return sum(map(_product, sizes.params.values()))


def _product(shape: _Shape) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def _has_fractions(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _less(held: Tensor, shape: _Shape, on_meta: bool) -> Tensor:
    """The first part of a vector or buffer; a matrix of that shape without values, for they are made up."""
    is_matrix = isinstance(held, nn.Parameter) and held.dim() > 1
    if is_matrix or has_no_data(held):
        return torch.empty(shape, dtype=held.dtype, device="meta" if is_matrix and on_meta else held.device)
    return _cut(held, shape)


def _cut(leaf: Tensor, shape: _Shape) -> Tensor:
    cut = leaf.detach()
    for dim, size in enumerate(shape):
        cut = cut.narrow(dim, 0, size)
    return cut.clone().requires_grad_(leaf.requires_grad)
