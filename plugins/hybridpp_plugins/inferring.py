"""A tensor-parallel plan for a model that nobody has described: run it once, then try how its blocks can be divided."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hybridpp.cluster import Group
from hybridpp.errors import ConfigError
from hybridpp.partition import dissect
from hybridpp.pipeline import call_arguments
from hybridpp.tensor_parallel import Division, Inference, Kind, Part, Plan, infer_plan, parse_style
from hybridpp_plugins.sample import Samples

SampleCall = tuple[tuple[Any, ...], dict[str, Any]]


def inferred_plan(model: nn.Module, find_samples: Callable[[], Samples], size: int, control: Group) -> Plan:
    """What of the model's blocks can be divided, and why the rest cannot.

    The model runs once, on a sample. On the meta device it cannot, and stays whole.

    Collective: all ranks; one small all-gather of host memory.

    Raises:
        ConfigError: the ranks came to different plans.
    """
    blocks = dissect(model, 1).blocks
    if any(parameter.is_meta for parameter in model.parameters()):
        return Plan({}, reasons={"": "a model on the meta device cannot be run"})
    calls = _calls(model, blocks, find_samples())
    plan, left = _plain(infer_plan(model, blocks, calls, size), blocks)
    if left:
        # Less of them, but that which can be done.
        plan = _both(plan, _plain(infer_plan(model, left, calls, size, styles_only=True), left)[0])
    digest = zlib.crc32(str((sorted(plan.styles.items()), sorted(plan.summed))).encode())
    rows = control.all_gather(torch.tensor([float(digest)], dtype=torch.float64))
    others = [rank for rank, row in enumerate(rows) if float(row) != float(rows[0])]
    if others:
        raise ConfigError(
            f"the ranks found different ways to divide {type(model).__name__}: rank {others[0]} differs from rank 0. "
            "Give all of them the same sample, or name the layers in tensor_parallel_plan."
        )
    return plan


def _calls(model: nn.Module, blocks: Sequence[str], samples: Samples) -> dict[str, SampleCall]:
    """What each block is called with in a run on the first sample that the model runs on."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with samples.explained(model), _watched(model, blocks) as calls, torch.no_grad():
        *others, last = [
            call_arguments(pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device, copy=True), batch))
            for batch in samples.batches
        ]
        for args, kwargs in others:
            try:
                model(*args, **kwargs)
            except Exception:  # whatever a model's forward raises
                calls.clear()
                continue
            return calls
        model(*last[0], **last[1])
    return calls


@contextmanager
def _watched(model: nn.Module, blocks: Sequence[str]) -> Iterator[dict[str, SampleCall]]:
    """Inside, the first call of each block is noted; nothing is dropped out and no statistics move."""
    calls: dict[str, SampleCall] = {}

    def noting(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs)))

        return note

    modes = [(module, module.training) for module in model.modules()]
    hooks = [model.get_submodule(name).register_forward_pre_hook(noting(name), with_kwargs=True) for name in blocks]
    model.eval()
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training


def _both(one: Plan, other: Plan) -> Plan:
    return Plan(
        {**one.styles, **other.styles},
        {**one.attributes, **other.attributes},
        {**one.reasons, **other.reasons},
        one.summed | other.summed,
        {**one.arguments, **other.arguments},
        {**one.results, **other.results},
    )


def _plain(inference: Inference, blocks: Sequence[str]) -> tuple[Plan, list[str]]:
    """The plan without the blocks that styles and parts of arguments do not say all about; and those."""
    styles, attributes, summed = dict(inference.plan.styles), dict(inference.plan.attributes), inference.summed
    reasons = dict(inference.plan.reasons)
    arguments, results = _by_module(inference.division.arguments), _by_module(inference.division.results)
    left: list[str] = []
    for block in blocks:
        inside = {name: style for name, style in styles.items() if _within(name, block)}
        reason = _beyond_styles(block, inside, inference.division)
        if reason is None:
            continue
        reasons[block] = reason
        left.append(block)
        styles = {name: style for name, style in styles.items() if name not in inside}
        attributes = {name: values for name, values in attributes.items() if not _within(name, block)}
        summed = frozenset(name for name in summed if not _within(name, block))
        arguments = {name: parts for name, parts in arguments.items() if not _within(name, block)}
        results = {name: parts for name, parts in results.items() if not _within(name, block)}
    known = set(inference.division.parts) | inference.division.first_only
    return Plan(styles, attributes, reasons, summed - known, arguments, results), left


def _by_module(parts: Mapping[tuple[str, int], Part]) -> dict[str, dict[int, Part]]:
    found: dict[str, dict[int, Part]] = {}
    for (name, number), part in parts.items():
        found.setdefault(name, {})[number] = part
    return found


def _within(inner: str, outer: str) -> bool:
    return f"{inner}.".startswith(f"{outer}.")


def _beyond_styles(block: str, styles: dict[str, str], division: Division) -> str | None:
    """What is to be done to a block that its layers' styles do not say."""
    kinds: dict[str, Kind] = {}
    for name, text in styles.items():
        try:
            kinds[name] = parse_style(text).kind
        except ConfigError:
            return f"{name!r} would be divided as {text!r}, which is not built yet"
    rows = {name for name, kind in kinds.items() if kind is Kind.ROW}
    columns = {name for name, kind in kinds.items() if kind not in (Kind.ROW, Kind.SUMMED)}

    def of_block(names: Any) -> set[str]:
        return {name for name in names if _within(name, block)}

    others = of_block(name.rpartition(".")[0] for name in division.parts) - set(kinds)
    others |= of_block(division.spreads)
    others |= of_block(division.enters) ^ columns | of_block(division.sums) ^ rows
    others |= of_block(name.rpartition(".")[0] for name in division.first_only) - rows
    return f"dividing {min(others) or block!r} is not built yet" if others else None
