"""Search a tensor-parallel plan for a model: run it once, then try how its blocks can be sharded."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group, gather_objects, preserved_random_state
from hybridpp.config import Precision
from hybridpp.errors import ConfigError
from hybridpp.nn import walk
from hybridpp.nn.names import qualified
from hybridpp.nn.snapshot import preserved_buffer_values, preserved_modules, put_entry
from hybridpp.nn.torch_private import is_functorch_active, pytree
from hybridpp.nn.weight_reads import WeightReads
from hybridpp.partition import (
    CallArguments,
    MadeUpDerivatives,
    asks_for_mode,
    block_calls,
    find_units,
    is_cache,
)
from hybridpp.pipeline import call_arguments
from hybridpp.plan_search import (
    EmbeddingsAndHeads,
    NarrowCopies,
    RunFormats,
    infer_embeddings_and_heads,
    infer_plan,
    large_tables,
    record_table_uses,
    recorded_ways,
)
from hybridpp.precision import find_module_dtypes, fp32_norms, torch_dtype
from hybridpp.sharding_plan import Plan, spec_of_styles
from hybridpp_plugins.common_plans import CommonPlans
from hybridpp_plugins.hook_collections import watched_collections
from hybridpp_plugins.sample import Samples

_T = TypeVar("_T")


class WatchedBlocks(NamedTuple):
    """What a run of a model shows of its blocks: the same for all numbers of ranks.

    Attributes:
        names: of the blocks that may be sharded.
        calls: of them.
        transformed: why others must not be.
        entered: the modules of each block that are called from outside of it.
        read: the weights of each block that are read while it does not run.
        ends: how embeddings and heads can be sharded.
        ways: of each block's first calls.
    """

    names: tuple[str, ...]
    calls: "BlockCalls"
    transformed: Mapping[str, str]
    entered: Mapping[str, set[str]]
    read: Mapping[str, list[str]]
    ends: EmbeddingsAndHeads
    ways: Mapping[str, frozenset[int]]


def watch_blocks(model: nn.Module, samples: Samples) -> WatchedBlocks:
    """Run a model on samples, or trace it if it is on the meta device.

    Raises:
        Exception: the error that the model raises.
    """
    blocks = find_units(model, 1).blocks
    transformed: dict[str, str] = {}
    with (
        record_table_uses(large_tables(model, blocks)) as uses,
        watched_insides(model, blocks, transformed) as entered,
        watched_reads(model, blocks) as read,
        recorded_ways(model, blocks) as ways,
    ):
        calls = calls_of_blocks(model, blocks, samples)
    names = tuple(name for name in blocks if name not in transformed)
    return WatchedBlocks(names, calls, transformed, entered, read, infer_embeddings_and_heads(uses), ways)


def find_tp_plan(
    model: nn.Module,
    find_samples: Callable[[], Samples],
    size: int,
    control: Group,
    common: CommonPlans | None = None,
    formats: RunFormats | None = None,
) -> Plan:
    """The layers of the model's blocks that can be sharded, and why others cannot.

    Rank 0 searches for all ranks, so that only it needs memory for a block of each kind. It runs the model on a sample,
    or traces it if it is on the meta device. It takes the plan that ``common`` has of an equal model. What ``formats``
    says of the run, kernels must take: None, the dtypes are not known.

    Collective: all ranks; two all-gathers of host memory.

    Raises:
        Exception: the error that the model or a block raises on rank 0, on every rank.
    """

    def find() -> Plan:
        samples = find_samples()
        settings = size, formats and formats.described(model)
        return common.get(settings, model, samples, lambda: search(samples)) if common else search(samples)

    def search(samples: Samples) -> Plan:
        return plan_of_blocks(model, watch_blocks(model, samples), size, formats)

    return of_first_rank(find, control)


def plan_of_blocks(
    model: nn.Module,
    watched: WatchedBlocks,
    size: int,
    formats: RunFormats | None = None,
    smaller: Plan | None = None,
    copies: NarrowCopies | None = None,
) -> Plan:
    """The plan of a model's blocks over ``size`` ranks; ``smaller`` and ``copies`` as in :func:`infer_plan`."""
    calls, more, collected = watched.calls
    with preserved_random_state(torch.device("cpu")):
        found = infer_plan(model, watched.names, calls, size, more, formats, collected, smaller, copies)
        outside = {**_read_by_others(found, watched.read), **_divided_for_others(found, watched.entered)}
        if outside:
            others = [name for name in watched.names if name not in outside]
            found = infer_plan(model, others, calls, size, more, formats, collected, smaller, copies)
    ends = watched.ends
    return found._replace(
        spec=found.spec | spec_of_styles(model, ends.styles, size),
        styles={**found.styles, **ends.styles},
        reasons={**found.reasons, **ends.reasons, **outside, **watched.transformed},
        ways=watched.ways,
    )


def default_formats(model: nn.Module, precision: Precision, device_type: str) -> RunFormats:
    """The formats of a model that will run in a precision, with the settings that plugins have by default.

    Args:
        model: complete.
        precision: of the run.
        device_type: of the device that it will run on; trials are run on the CPU.
    """
    half = torch_dtype(precision)
    module_dtypes = find_module_dtypes(model, (), half, fp32_norms(model, None, device_type))
    return RunFormats(precision, module_dtypes, True, torch.device("cpu"))


def of_first_rank(find: Callable[[], _T], control: Group) -> _T:
    """The result of ``find`` on rank 0, or the error that it raises, on every rank. Collective: two all-gathers."""
    error: Exception | None = None
    message = b""
    if control.rank == 0:
        try:
            message = pickle.dumps(find())
        except Exception as raised:  # whatever a model raises; the others must not wait for it
            error = raised
            message = _pickled(raised)
    rows = gather_objects(control, "in booster.boost, which searches a tensor-parallel plan", message.hex())
    found: _T | Exception = pickle.loads(bytes.fromhex(rows[0]))
    if isinstance(found, Exception):
        raise error or found
    return found


def _pickled(error: Exception) -> bytes:
    try:
        message = pickle.dumps(error)
        pickle.loads(message)
    except Exception:  # some errors cannot be built from their args
        message = pickle.dumps(ConfigError(f"on rank 0: {type(error).__name__}: {error}"))
    return message


class BlockCalls(NamedTuple):
    """The arguments of each block's first call, by name.

    Attributes:
        calls: in evaluation mode, without dropout; in training mode, if the forward runs only in that.
        more: that in training mode, if it is of another kind (never, if the container code asks for no mode), or else
            None; and those of other samples in which other arguments are tensors or given at all.
        collected: the results of modules inside that hooks collect, as a module's name in the block and a number among
            the leaves of what it returns.
    """

    calls: dict[str, CallArguments]
    more: dict[str, list[CallArguments | None]]
    collected: dict[str, set[tuple[str, int]]]


def calls_of_blocks(model: nn.Module, blocks: Sequence[str], samples: Samples) -> BlockCalls:
    """The arguments of each block's calls, for the first sample that the model runs on, of each kind of samples."""
    found = BlockCalls({}, {}, {})
    with samples.explained(model), watched_collections(model, blocks) as collected:
        for kind in samples.kinds:
            other = _calls_of_kind(model, blocks, kind)
            for name, call in other.calls.items():
                if name not in found.calls:
                    found.calls[name] = call
                    found.more.update({name: other.more[name]} if name in other.more else {})
                    continue
                known = [found.calls[name], *(one for one in found.more.get(name, ()) if one is not None)]
                for one in (call, *other.more.get(name, ())):
                    if one is not None and all(_form(one) != _form(before) for before in known):
                        known.append(one)
                        found.more.setdefault(name, [None]).append(one)
    return found._replace(collected=collected)


def _form(call: CallArguments) -> Any:
    """Equal for calls that have tensors in the same places, of as many dimensions, and equal other values."""
    leaves, tree = pytree.tree_flatten(call)
    return tree, [(leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]


def _calls_of_kind(model: nn.Module, blocks: Sequence[str], batches: Sequence[Any]) -> BlockCalls:
    *others, last = batches
    for batch in others:
        with suppress(Exception):  # whatever a model's forward raises
            return _calls_on(model, blocks, batch)
    return _calls_on(model, blocks, last)


def _calls_on(model: nn.Module, blocks: Sequence[str], batch: Any) -> BlockCalls:
    is_traced = any(parameter.is_meta for parameter in model.parameters())
    calls_on = _traced if is_traced else _run
    # By block: what it returned, where the container code is run once more.
    results: dict[str, list[Any]] | None = {} if _asks_for_mode(model, blocks) else None
    try:
        calls = calls_on(model, blocks, batch, training=False, results=results)
    except Exception:  # whatever a model's forward raises
        with suppress(Exception):
            return BlockCalls(_without_caches(calls_on(model, blocks, batch, training=True)), {}, {})
        raise
    calls = _without_caches(calls)
    in_training: dict[str, list[CallArguments | None]] = {}
    if results is not None:
        # It need not run in training: it may want other inputs there. What it did until then is known.
        with suppress(Exception), nullcontext() if is_traced else _answering(model, results):
            for name, call in _without_caches(calls_on(model, blocks, batch, training=True)).items():
                if name in calls and _kind(call) != _kind(calls[name]):
                    in_training[name] = [call]
    return BlockCalls(calls, in_training, {})


def _asks_for_mode(model: nn.Module, blocks: Sequence[str]) -> bool:
    """Whether code around the blocks may do something else in training than in evaluation."""
    inside = {part for name in blocks for part in walk.modules(walk.submodule(model, name))}
    return any(asks_for_mode(module) for module in walk.modules(model) if module not in inside)


def _kind(call: CallArguments) -> Any:
    """Equal for calls of one kind: with the same structure, tensors of the same shapes, and the same other values."""
    leaves, tree = pytree.tree_flatten(call)
    return tree, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf)) for leaf in leaves]


def _without_caches(calls: dict[str, CallArguments]) -> dict[str, CallArguments]:
    """The calls without key-value caches, which the run has filled with unsharded heads; blocks run without them."""
    without: dict[str, CallArguments] = pytree.tree_map(lambda leaf: None if is_cache(leaf) else leaf, calls)
    return without


def _run(
    model: nn.Module,
    blocks: Sequence[str],
    batch: Any,
    training: bool,
    results: dict[str, list[Any]] | None = None,
) -> dict[str, CallArguments]:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    batch = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device, copy=True), batch)
    args, kwargs = call_arguments(batch)
    with (
        preserved_buffer_values(model),
        preserved_random_state(device),
        _watched(model, blocks, training, results) as calls,
        torch.enable_grad(),
        MadeUpDerivatives(),
    ):
        model(*args, **kwargs)
    return calls


def _traced(
    model: nn.Module,
    blocks: Sequence[str],
    batch: Any,
    training: bool,
    results: dict[str, list[Any]] | None = None,
) -> dict[str, CallArguments]:
    """The calls by a trace, without weights; values that depend on weights are random."""
    return block_calls(model, blocks, call_arguments(batch), training)


@contextmanager
def _answering(model: nn.Module, results: Mapping[str, list[Any]]) -> Iterator[None]:
    """Inside, blocks do not run: they return what they returned before."""

    def answer(left: list[Any], *_: Any, **__: Any) -> Any:
        return left.pop(0)

    with preserved_modules(model):
        for name, left in results.items():
            put_entry(vars(model.get_submodule(name)), "forward", partial(answer, left))
        yield


@contextmanager
def _watched(
    model: nn.Module, blocks: Sequence[str], training: bool, results: dict[str, list[Any]] | None
) -> Iterator[dict[str, CallArguments]]:
    """A context that records the first call of each block, and what blocks return in ``results`` if there are such.

    Container code keeps its autograd graph, which shows which arguments require gradients; blocks, whose graphs would
    be large, do not. Afterwards all modules are as before.
    """
    calls: dict[str, CallArguments] = {}

    def noting(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_functorch_active():
                return  # the tensors of a transform mean nothing outside of it
            calls.setdefault(name, pytree.tree_map_only(Tensor, _alone, (args, kwargs)))
            torch.set_grad_enabled(False)

        return note

    def leaving(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if is_functorch_active():
                return output
            torch.set_grad_enabled(True)
            if results is not None:
                results.setdefault(name, []).append(pytree.tree_map_only(Tensor, torch.Tensor.detach, output))
            # Copies, because container code may write to them.
            return pytree.tree_map_only(Tensor, lambda leaf: _wanting(leaf, leaf.is_floating_point()).clone(), output)

        return leave

    with preserved_modules(model):
        for name in blocks:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(noting(name), with_kwargs=True)
            block.register_forward_hook(leaving(name))
        model.train(training)
        yield calls


@contextmanager
def watched_insides(
    model: nn.Module, blocks: Sequence[str], transformed: dict[str, str]
) -> Iterator[dict[str, set[str]]]:
    """A context that records the modules of each block that are called from outside of the block (as in DiT).

    Several blocks may hold a module: a call inside of any of them is none from outside.

    Blocks that are called inside a transform of ``torch.func`` are added to ``transformed``, with a reason: collectives
    are not known there, so they must not be sharded.
    """
    entered: dict[str, set[str]] = {}
    running: set[str] = set()
    hooks = []

    def noting(names: Mapping[str, str]) -> Callable[..., None]:
        def note(*_: Any) -> None:
            if running.isdisjoint(names):
                for name, inner in names.items():
                    entered.setdefault(name, set()).add(inner)

        return note

    def begin(name: str, *_: Any) -> None:
        running.add(name)
        if is_functorch_active():
            transformed[name] = "it is called inside a transform of torch.func (grad, vjp, vmap)"

    insides: dict[nn.Module, dict[str, str]] = {}
    for name in blocks:
        block = model.get_submodule(name)
        hooks.append(block.register_forward_pre_hook(partial(begin, name)))
        hooks.append(block.register_forward_hook(lambda *_, name=name: running.discard(name), always_call=True))
        for inner, module in block.named_modules():
            if inner:
                insides.setdefault(module, {})[name] = inner
    hooks += [module.register_forward_pre_hook(noting(names)) for module, names in insides.items()]
    try:
        yield entered
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def watched_reads(model: nn.Module, blocks: Sequence[str]) -> Iterator[dict[str, list[str]]]:
    """A context that records the weights of each block that something reads while no block runs that holds them.

    A penalty that the model's own code computes is such a read: of shards, each rank would compute another one.
    """
    readers: dict[str, list[nn.Module]] = {}
    inner: dict[str, list[tuple[str, str]]] = {}
    names = {id(parameter): name for name, parameter in walk.named_parameters(model)}
    for name in blocks:
        block = walk.submodule(model, name)
        for key, parameter in walk.named_parameters(block):
            readers.setdefault(names[id(parameter)], []).append(block)
            inner.setdefault(names[id(parameter)], []).append((name, key))
    read: dict[str, list[str]] = {}

    def note(weight: str) -> None:
        for name, key in inner[weight]:
            if key not in read.setdefault(name, []):
                read[name].append(key)

    with WeightReads(model, readers, note, with_sizes=True).watched():
        yield read


def _read_by_others(found: Plan, read: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Blocks that must not be sharded, because other code reads a weight of which a rank would have a part.

    Or the gradient of a part: it is summed over the ranks, and that of the other code would count on each.
    """
    spec = found.spec
    parts = {*spec.params, *spec.rank0_only, *spec.partial_grad}
    return {
        name: f"{inner!r} is also read by code outside of the block"
        for name, inners in read.items()
        for inner in reversed(inners)
        if qualified(name, inner) in parts
    }


def _divided_for_others(found: Plan, entered: Mapping[str, set[str]]) -> dict[str, str]:
    """Blocks that must not be sharded, because other code calls a module that the plan would shard; with a reason."""
    spec = found.spec
    touched = {*spec.params, *spec.copy_inputs, *spec.reduce_outputs, *spec.partial_grad}
    return {
        name: f"{inner!r} is also called from outside of the block"
        for name, inners in entered.items()
        for inner in sorted(inners, reverse=True)
        if any(f"{part}.".startswith(f"{name}.{inner}.") for part in touched)
    }


def _alone(leaf: Tensor) -> Tensor:
    """A copy without an autograd graph."""
    return _wanting(leaf.clone(), leaf.requires_grad)


def _wanting(leaf: Tensor, wants: bool) -> Tensor:
    return leaf.detach().requires_grad_(wants)
