"""Where tensor parallelism meets the rest: divided layers in the backward pass of a schedule, sums, whole tensors."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group, get_dist_logger
from hybridpp.config import ParallelConfig
from hybridpp.data_parallel import GradientBuckets
from hybridpp.partition import Parts
from hybridpp.pipeline import Gradients, Layer, WeightGradients, layer_of
from hybridpp.tensor_parallel import (
    KeptShard,
    Kind,
    Placement,
    Plan,
    SequencePlan,
    ShardedLayer,
    Sharding,
    is_checkpointed,
    placement_of,
    plan_from_patterns,
    run_on_shards,
)
from hybridpp.tensor_parallel import shard as apply_plan
from hybridpp_plugins.inferring import inferred_plan
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.sample import Samples
from hybridpp_plugins.sequences import ShardsBetweenStages, sequence_plan

_NUMBER = r"(?<=\.)\d+(?=[.':]|$)"


class Divided(NamedTuple):
    """A model whose layers are divided, or were found to need no dividing.

    Attributes:
        weight_gradients: runs its layers.
        summed: parameters whose gradients are sums over all ranks that share layers, by name.
        between_stages: what of the values between stages travels; None: all of it.
        in_a_step: what to be in while a schedule runs.
    """

    weight_gradients: WeightGradients
    summed: frozenset[str]
    between_stages: Parts | None = None
    in_a_step: Callable[[], AbstractContextManager[None]] = nullcontext


def divide_model(
    model: nn.Module, config: ParallelConfig, layout: Layout, find_samples: Callable[[], Samples]
) -> Divided:
    """Let this rank hold its part of the model's layers; before the model is cut.

    The user says what is divided; else it is found out. Collective: all ranks, where it is.
    """
    tp = layout.tp
    if tp.size == 1:
        return Divided(WeightGradients(model), frozenset())
    kinds = {module: layer_of(module) for module in model.modules()}
    if config.tensor_parallel_plan is not None:
        plan = plan_from_patterns(model, config.tensor_parallel_plan, tp.size)
    else:
        plan = inferred_plan(model, find_samples, tp.size, layout.control)
    sequences = SequencePlan()
    if config.enable_sequence_parallelism:
        sequences = sequence_plan(model, plan, find_samples, tp.size, layout.control)
    sharding = apply_plan(model, plan, tp)
    for name, block in sequences.blocks.items():
        run_on_shards(model, name, block, sharding)
    if plan.reasons or sequences.reasons or not sharding.layers:
        get_dist_logger().warning(_left_whole(model, plan, sequences), ranks=[0])
    weight_gradients = WeightGradients(model, _joined(kinds, sharding))
    sharding.crossings.meanwhile = weight_gradients.release
    between = ShardsBetweenStages(sequences.blocks, tp) if sequences.blocks else None
    return Divided(weight_gradients, sharding.summed | sequences.summed, between, sharding.crossings.in_parts)


def _left_whole(model: nn.Module, plan: Plan, sequences: SequencePlan) -> str:
    """One line that lists what every rank has all of, and why."""
    listed: dict[str, int] = {}
    reasons = [*plan.reasons.items(), *((name, f"whole sequences, {why}") for name, why in sequences.reasons.items())]
    for name, reason in reasons:
        line = f"{re.sub(_NUMBER, '*', name) or 'all'}: {re.sub(_NUMBER, '*', reason)}"
        listed[line] = listed.get(line, 0) + 1
    lines = "; ".join(listed) or "no layer is named"
    return (
        f"tensor parallelism leaves parts of {type(model).__name__} whole, which all ranks that share its layers "
        f"compute alike ({lines}). Name layers to divide in tensor_parallel_plan, like "
        "{'*.q_proj': 'column', '*.o_proj': 'row'}."
    )


def _joined(kinds: Mapping[nn.Module, Layer | None], sharding: Sharding) -> dict[nn.Module, Layer]:
    """How the divided layers compute, apart from their weights' gradients."""
    return {module: _join(kind, part) for module, part in sharding.layers.items() if (kind := kinds[module])}


def _join(kind: Layer, part: ShardedLayer) -> Layer:
    """A kind of layer with what is around it where a rank holds a part."""

    def forward(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = kind.forward(module, part.local_input(x), weight, None if part.adds_bias else bias)
        return part.leave(y, x, bias)

    def input_gradient(module: nn.Module, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return kind.input_gradient(module, part.own_gradient(dy, x), x, weight)

    def weight_gradients(module: nn.Module, dy: Tensor, x: Tensor, weight: Tensor, has_bias: bool) -> Gradients:
        own, local = part.own_gradient(dy, x), part.local_input(x)
        gradient, bias_gradient = kind.weight_gradients(module, own, local, weight, has_bias and not part.adds_bias)
        if has_bias and part.adds_bias:
            bias_gradient = part.bias_gradient(dy.reshape(-1, dy.shape[-1]).sum(0))
        return gradient, bias_gradient

    def keep(x: Tensor, later: bool) -> tuple[Tensor, KeptShard] | None:
        # What is computed again just before it is used may as well be whole, unless it waits for a W then.
        return None if is_checkpointed() and not later else part.keep(x)

    return Layer(
        forward,
        input_gradient,
        weight_gradients,
        # As a list of samples, sequences could not be told apart.
        3 if part.to_shards else kind.input_dims,
        kind.any_dims and not part.to_shards,
        prepare=part.enter,
        finish=part.finish,
        keep=keep if part.kind is Kind.COLUMN else None,
        arrive=part.whole_gradient,
        # Two autograd functions for one are worth it where they hide something.
        may_wait=part.kind in (Kind.COLUMN, Kind.GATHERED_COLUMN) and part.crossings.group.overlaps,
    )


def placements(model: nn.Module) -> dict[str, Placement]:
    """How this rank's divided parameters lie on the ranks, by name."""
    found = {name: placement_of(parameter) for name, parameter in model.named_parameters()}
    return {name: placement for name, placement in found.items() if placement is not None}


def share_copies(buckets: GradientBuckets, lies: Mapping[str, Placement], layout: Layout) -> None:
    """Let gradients of what several ranks of an axis hold the same of be summed over those.

    Collective: all ranks of the world.
    """
    copied = [
        (name, *one)
        for name, gradient in buckets.gradients.items()
        if name in lies
        for one in lies[name].copied(gradient)
    ]
    mine = {size for _, size, _ in copied}
    # Stages differ in what they hold; the world makes groups together.
    rows = layout.control.all_gather(torch.tensor([size in mine for size in range(layout.grid.tp_size + 1)]))
    sizes = [size for size in range(layout.grid.tp_size + 1) if any(bool(row[size]) for row in rows)]
    groups = {size: layout.group_of_copies(size) for size in sizes}
    for name, size, view in copied:
        buckets.share(name, groups[size], view)


def counts_here(name: str, lies: Mapping[str, Placement], tp: Group) -> bool:
    """Whether this rank's part of a parameter counts in a norm over the ranks that share layers."""
    return lies[name].counts_on(tp.rank) if name in lies else tp.rank == 0


def own_state(parameter: nn.Parameter, state: Mapping[str, Any], tp_rank: int) -> dict[str, Any]:
    """This rank's part of what an optimizer had noted about a parameter when it was whole."""
    place = placement_of(parameter)
    if place is None:
        return dict(state)
    return {
        key: place.take(value, tp_rank) if isinstance(value, Tensor) and value.shape == place.full_shape else value
        for key, value in state.items()
    }


def whole_tensors(tensors: Iterator[tuple[str, Tensor]], lies: Mapping[str, Placement], tp: Group) -> dict[str, Tensor]:
    """Tensors with the divided ones put together, on the host; empty except on the first rank of ``tp``.

    Collective: one all-gather over ``tp`` for each divided tensor.
    """
    whole = {}
    for name, tensor in tensors:
        parts = tp.all_gather(tensor.detach()) if name in lies else [tensor]
        if tp.rank == 0:
            whole[name] = lies[name].join([part.cpu() for part in parts]) if name in lies else tensor
    return whole
