"""A tensor-parallel plan for a model that nobody has described: run it once, then try how its blocks can be divided."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.checkpoint import gather_objects
from hybridpp.cluster import Group, preserved_random_state
from hybridpp.errors import ConfigError
from hybridpp.partition import block_calls, dissect, is_cache, untouched
from hybridpp.pipeline import call_arguments
from hybridpp.tensor_parallel import (
    Inference,
    Kind,
    Plan,
    infer_ends,
    infer_plan,
    large_tables,
    parse_style,
    watched_tables,
)
from hybridpp_plugins.sample import Samples

Found = TypeVar("Found")
SampleCall = tuple[tuple[Any, ...], dict[str, Any]]


def inferred_plan(model: nn.Module, find_samples: Callable[[], Samples], size: int, control: Group) -> Plan:
    """What of the model's blocks can be divided, and why the rest cannot.

    The first rank finds out for all, so that a block of each kind gets memory on it alone. The model runs there, on a
    sample; on the meta device it is traced instead.

    Collective: all ranks; two all-gathers of host memory.

    Raises:
        Exception: whatever the first rank's model or block raises, on every rank.
    """

    def find() -> Plan:
        blocks = dissect(model, 1).blocks
        with watched_tables(large_tables(model, blocks)) as uses:
            calls = calls_of_blocks(model, blocks, find_samples())
        with preserved_random_state(torch.device("cpu")):
            plan, ends = _with_styles(infer_plan(model, blocks, calls, size)), infer_ends(uses)
        return plan._replace(styles={**plan.styles, **ends.styles}, reasons={**plan.reasons, **ends.reasons})

    return of_first_rank(find, control)


def of_first_rank(find: Callable[[], Found], control: Group) -> Found:
    """What the first rank finds, or the error that it raises, on every rank. Collective: two all-gathers."""
    error: Exception | None = None
    message = b""
    if control.rank == 0:
        try:
            message = pickle.dumps(find())
        except Exception as raised:  # whatever a model raises; the others must not wait for it
            error = raised
            message = _pickled(raised)
    found: Found | Exception = pickle.loads(bytes.fromhex(gather_objects(control, message.hex())[0]))
    if isinstance(found, Exception):
        raise error or found
    return found


def _pickled(error: Exception) -> bytes:
    try:
        message = pickle.dumps(error)
        pickle.loads(message)
    except Exception:  # some errors take other arguments than they keep
        message = pickle.dumps(ConfigError(f"on rank 0: {type(error).__name__}: {error}"))
    return message


def calls_of_blocks(model: nn.Module, blocks: Sequence[str], samples: Samples) -> dict[str, SampleCall]:
    """What each block is called with on the first sample that the model runs on."""
    *others, last = samples.batches
    with samples.explained(model):
        for batch in others:
            with suppress(Exception):  # whatever a model's forward raises
                return _without_caches(_calls_on(model, blocks, batch))
        return _without_caches(_calls_on(model, blocks, last))


def _calls_on(model: nn.Module, blocks: Sequence[str], batch: Any) -> dict[str, SampleCall]:
    """In evaluation mode, in which nothing is dropped; in training, if the forward runs on the sample in that alone."""
    calls_on = _traced if any(parameter.is_meta for parameter in model.parameters()) else _run
    try:
        return calls_on(model, blocks, batch, training=False)
    except Exception:  # whatever a model's forward raises
        with suppress(Exception):
            return calls_on(model, blocks, batch, training=True)
        raise


def _without_caches(calls: dict[str, SampleCall]) -> dict[str, SampleCall]:
    """A key-value cache is full after the run, of whole heads; a block does without."""
    without: dict[str, SampleCall] = pytree.tree_map(lambda leaf: None if is_cache(leaf) else leaf, calls)
    return without


def _run(model: nn.Module, blocks: Sequence[str], batch: Any, training: bool) -> dict[str, SampleCall]:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    batch = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device, copy=True), batch)
    args, kwargs = call_arguments(batch)
    with (
        untouched(model),
        _untouched_numbers(model, device),
        _watched(model, blocks, training) as calls,
        torch.enable_grad(),
    ):
        model(*args, **kwargs)
    return calls


def _traced(model: nn.Module, blocks: Sequence[str], batch: Any, training: bool) -> dict[str, SampleCall]:
    """Without weights; numbers that stem from them are made up."""
    return block_calls(model, blocks, call_arguments(batch), training)


@contextmanager
def _untouched_numbers(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back, afterwards, what buffers hold and where random numbers are."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with preserved_random_state(device):
            yield
    finally:
        with torch.no_grad():
            for buffer, numbers in before:
                buffer.copy_(numbers)


@contextmanager
def _watched(model: nn.Module, blocks: Sequence[str], training: bool) -> Iterator[dict[str, SampleCall]]:
    """Inside, the first call of each block is noted; nothing is dropped out and no statistics move, except in training.

    Glue keeps its graph, so that it is known which arguments want gradients; blocks, which would hold much, do not.
    """
    calls: dict[str, SampleCall] = {}

    def noting(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, pytree.tree_map_only(Tensor, _alone, (args, kwargs)))
            torch.set_grad_enabled(False)

        return note

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        torch.set_grad_enabled(True)
        # Copies, because glue may write to them.
        return pytree.tree_map_only(Tensor, lambda leaf: _wanting(leaf, leaf.is_floating_point()).clone(), output)

    modes = [(module, module.training) for module in model.modules()]
    found = [(name, model.get_submodule(name)) for name in blocks]
    hooks = [block.register_forward_pre_hook(noting(name), with_kwargs=True) for name, block in found]
    hooks += [block.register_forward_hook(leave) for _, block in found]
    model.train(training)
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training


def _alone(leaf: Tensor) -> Tensor:
    """A copy that belongs to no graph."""
    return _wanting(leaf.clone(), leaf.requires_grad)


def _wanting(leaf: Tensor, wants: bool) -> Tensor:
    return leaf.detach().requires_grad_(wants)


def _with_styles(inference: Inference) -> Plan:
    """The plan with styles where they say all about a layer, and the rest of the division."""
    styles, division = {}, inference.division
    for name, text in inference.plan.styles.items():
        kind = _kind(text)
        around = division.sums if kind is Kind.ROW else division.enters
        if kind is Kind.SUMMED or (kind is not None and name in around):
            styles[name] = text
    rest = replace(
        division,
        parts={name: part for name, part in division.parts.items() if name.rpartition(".")[0] not in styles},
        enters=division.enters - styles.keys(),
        sums=division.sums - styles.keys(),
        first_only=frozenset(name for name in division.first_only if name.rpartition(".")[0] not in styles),
        attributes={},
    )
    known = set(division.parts) | division.first_only
    return Plan(styles, inference.plan.attributes, inference.plan.reasons, inference.summed - known, rest)


def _kind(style: str) -> Kind | None:
    """Of a style that can be applied; None: it is the inference's name for more than that."""
    try:
        return parse_style(style).kind
    except ConfigError:
        return None
