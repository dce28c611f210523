"""Search a tensor-parallel plan for a model: run it once, then try how its blocks can be sharded."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group, gather_objects, preserved_random_state
from hybridpp.errors import ConfigError
from hybridpp.nn.snapshot import preserved_buffer_values, preserved_modules
from hybridpp.nn.torch_private import pytree
from hybridpp.partition import CallArguments, block_calls, find_units, is_cache
from hybridpp.pipeline import call_arguments
from hybridpp.plan_search import infer_embeddings_and_heads, infer_plan, large_tables, record_table_uses
from hybridpp.sharding_plan import Plan, spec_of_styles
from hybridpp_plugins.common_plans import CommonPlans
from hybridpp_plugins.sample import Samples

_T = TypeVar("_T")


def find_tp_plan(
    model: nn.Module,
    find_samples: Callable[[], Samples],
    size: int,
    control: Group,
    common: CommonPlans | None = None,
) -> Plan:
    """The layers of the model's blocks that can be sharded, and why others cannot.

    Rank 0 searches for all ranks, so that only it needs memory for a block of each kind. It runs the model on a sample,
    or traces it if it is on the meta device. It takes the plan that ``common`` has of an equal model.

    Collective: all ranks; two all-gathers of host memory.

    Raises:
        Exception: the error that the model or a block raises on rank 0, on every rank.
    """

    def find() -> Plan:
        samples = find_samples()
        return common.get(size, model, samples, lambda: search(samples)) if common else search(samples)

    def search(samples: Samples) -> Plan:
        blocks = find_units(model, 1).blocks
        with record_table_uses(large_tables(model, blocks)) as uses, _watched_insides(model, blocks) as entered:
            calls = calls_of_blocks(model, blocks, samples)
        with preserved_random_state(torch.device("cpu")):
            found = infer_plan(model, blocks, calls, size)
            outside = _divided_for_others(found, entered)
            if outside:
                found = infer_plan(model, [name for name in blocks if name not in outside], calls, size)
            ends = infer_embeddings_and_heads(uses)
        return found._replace(
            spec=found.spec | spec_of_styles(model, ends.styles, size),
            styles={**found.styles, **ends.styles},
            reasons={**found.reasons, **ends.reasons, **outside},
        )

    return of_first_rank(find, control)


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


def calls_of_blocks(model: nn.Module, blocks: Sequence[str], samples: Samples) -> dict[str, CallArguments]:
    """The arguments of each block's call, for the first sample that the model runs on."""
    *others, last = samples.batches
    with samples.explained(model):
        for batch in others:
            with suppress(Exception):  # whatever a model's forward raises
                return _without_caches(_calls_on(model, blocks, batch))
        return _without_caches(_calls_on(model, blocks, last))


def _calls_on(model: nn.Module, blocks: Sequence[str], batch: Any) -> dict[str, CallArguments]:
    """The calls in evaluation mode, without dropout; in training mode, if the forward runs only in that."""
    calls_on = _traced if any(parameter.is_meta for parameter in model.parameters()) else _run
    try:
        return calls_on(model, blocks, batch, training=False)
    except Exception:  # whatever a model's forward raises
        with suppress(Exception):
            return calls_on(model, blocks, batch, training=True)
        raise


def _without_caches(calls: dict[str, CallArguments]) -> dict[str, CallArguments]:
    """The calls without key-value caches, which the run has filled with unsharded heads; blocks run without them."""
    without: dict[str, CallArguments] = pytree.tree_map(lambda leaf: None if is_cache(leaf) else leaf, calls)
    return without


def _run(model: nn.Module, blocks: Sequence[str], batch: Any, training: bool) -> dict[str, CallArguments]:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    batch = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device, copy=True), batch)
    args, kwargs = call_arguments(batch)
    with (
        preserved_buffer_values(model),
        preserved_random_state(device),
        _watched(model, blocks, training) as calls,
        torch.enable_grad(),
    ):
        model(*args, **kwargs)
    return calls


def _traced(model: nn.Module, blocks: Sequence[str], batch: Any, training: bool) -> dict[str, CallArguments]:
    """The calls by a trace, without weights; values that depend on weights are random."""
    return block_calls(model, blocks, call_arguments(batch), training)


@contextmanager
def _watched(model: nn.Module, blocks: Sequence[str], training: bool) -> Iterator[dict[str, CallArguments]]:
    """A context that records the first call of each block. Afterwards all modules are as before.

    Container code keeps its autograd graph, which shows which arguments require gradients; blocks, whose graphs would
    be large, do not.
    """
    calls: dict[str, CallArguments] = {}

    def noting(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, pytree.tree_map_only(Tensor, _alone, (args, kwargs)))
            torch.set_grad_enabled(False)

        return note

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        torch.set_grad_enabled(True)
        # Copies, because container code may write to them.
        return pytree.tree_map_only(Tensor, lambda leaf: _wanting(leaf, leaf.is_floating_point()).clone(), output)

    with preserved_modules(model):
        for name in blocks:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(noting(name), with_kwargs=True)
            block.register_forward_hook(leave)
        model.train(training)
        yield calls


@contextmanager
def _watched_insides(model: nn.Module, blocks: Sequence[str]) -> Iterator[dict[str, set[str]]]:
    """A context that records the modules of each block that are called from outside of the block (as in DiT)."""
    entered: dict[str, set[str]] = {}
    running: set[str] = set()
    hooks = []

    def noting(name: str, inner: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            if name not in running:
                entered.setdefault(name, set()).add(inner)

        return note

    for name in blocks:
        block = model.get_submodule(name)
        hooks.append(block.register_forward_pre_hook(lambda *_, name=name: running.add(name)))
        hooks.append(block.register_forward_hook(lambda *_, name=name: running.discard(name), always_call=True))
        hooks += [m.register_forward_pre_hook(noting(name, inner)) for inner, m in block.named_modules() if inner]
    try:
        yield entered
    finally:
        for hook in hooks:
            hook.remove()


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
