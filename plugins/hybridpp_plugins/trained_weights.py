"""The weights that a rank trains: where their gradients lie, their masters, and which part this replica updates."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.checkpoint import swap_value, without_flat_weights
from hybridpp.cluster import Group, gather_numbers
from hybridpp.config import OptimizerConfig, Precision, ZeroConfig
from hybridpp.data_parallel import (
    FlatWeights,
    GradientSharding,
    Replicas,
    ShardedWeights,
    ShardLayout,
    layout_of,
    offloaded_parameters,
    parts_of,
)
from hybridpp.errors import ConfigError
from hybridpp.nn import walk
from hybridpp.partition import StagedModel, UnitGather, finest_units, has_compiled_forward
from hybridpp.precision import MasterWeights, ReplicatedTarget, ShardedTarget
from hybridpp.tensor_parallel import sharding_of
from hybridpp_plugins.layout import Layout
from hybridpp_plugins.optimizer_state import Segment

# Of the model's elements. Smaller units (norms beside blocks) are gathered with what no unit has.
_LEAST_SHARE = 1 / 256
_IN_PASS = "in a pass through a model with zero_stage=3, of which replicas agree on the order of units"


class UpdateRules(NamedTuple):
    """What of an optimizer and a plugin decides how weights are updated.

    Attributes:
        config: of the optimizer.
        zero: what replicas divide among themselves; nothing, if there is one.
        indivisible: parameters, by name, that one replica must update whole.
        summed: parameters, by name, whose gradients are summed over the tensor-parallel ranks.
        is_elementwise: whether it was found that the update of each element depends on that element only.
    """

    config: OptimizerConfig
    zero: ZeroConfig
    indivisible: Collection[str]
    summed: Collection[str]
    is_elementwise: bool


class TrainedWeights(NamedTuple):
    """The weights that a rank trains.

    Attributes:
        parameters: trainable ones, by name, in the order of the forward.
        masters: fp32 masters of them, or of the pieces that this replica updates; none in fp32.
        layout: of their gradients, and of the weights with ZeRO; None: there is no optimizer.
        flat: the weights, where replicas exchange pieces of them; else None.
        replicas: that reduce gradients.
        zero: what they divide among themselves.
        ranks_of: the pipeline positions that hold each of the complete model's parameters.
        in_half: whether there are masters, here or on other replicas.
    """

    parameters: Mapping[str, nn.Parameter]
    masters: MasterWeights
    layout: ShardLayout | None
    flat: FlatWeights | None
    replicas: Replicas
    zero: ZeroConfig
    ranks_of: Mapping[str, tuple[int, ...]]
    in_half: bool

    @property
    def segment(self) -> Segment:
        """What this replica updates of every bucket."""
        if self.flat is None or self.layout is None:
            return Segment()
        return Segment(self.layout.index, self.layout.num_segments)

    @property
    def sharding(self) -> GradientSharding:
        """What this replica keeps of the sums of gradients."""
        if self.zero.zero_stage < 2:
            return GradientSharding.SCATTERED if self.zero.zero_stage else GradientSharding.NONE
        return GradientSharding.MICROBATCH if self.zero.reduces_each_microbatch else GradientSharding.STEP

    @property
    def sharded(self) -> ShardedWeights | None:
        """The weights, if they are gathered only where they are used; else None."""
        return self.flat if isinstance(self.flat, ShardedWeights) else None

    def internal(self) -> AbstractContextManager[None]:
        """A context in which parameters may be listed that have no values."""
        return nullcontext() if self.sharded is None else self.sharded.internal()

    def unsharded(self) -> AbstractContextManager[None]:
        """A context in which all weights are there. Collective: all replicas, if they are sharded."""
        return nullcontext() if self.sharded is None else self.sharded.unsharded()

    def check_readable(self, what: str) -> None:
        """Refuse to read weights that are sharded.

        Raises:
            ConfigError: the weights are not there.
        """
        if self.sharded is not None and not self.sharded.is_readable:
            raise ConfigError(
                f"{what} needs all weights, of which each replica holds a part: got zero_stage=3. Use `with "
                "booster.unsharded(model):` on every rank around it, booster.save_model, or booster.averaged(model) "
                "for averages."
            )

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """What this replica updates of a tensor of a parameter's shape."""
        return tensor if self.flat is None else self.flat.parts[name](tensor)

    def target(self, model: nn.Module) -> ReplicatedTarget:
        """What the optimizer of a model updates."""
        frozen = [one for name, one in walk.named_parameters(model) if name not in self.parameters]
        flat = self.flat
        if flat is None:
            return ReplicatedTarget(self.parameters, self.masters, frozen)
        return ShardedTarget(self.parameters, self.masters, flat, frozen)


def trained_weights(
    staged: StagedModel,
    values: Mapping[str, Tensor],
    precision: Precision,
    rules: UpdateRules | None,
    layout: Layout,
    placement: tuple[int, ...],
    device: torch.device,
) -> TrainedWeights:
    """Choose where gradients lie, and make the masters. The model is on its device, in its working dtypes.

    Args:
        staged: this rank's part of the model.
        values: trainable weights before they were cast, by name.
        precision: of the plugin.
        rules: of the update; None: there is no optimizer.
        layout: the ranks.
        placement: the pipeline position of each stage.
        device: where this rank computes.
    """
    model = staged.model
    parameters = {name: parameter for name, parameter in walk.named_parameters(model) if parameter.requires_grad}
    ranks_of = {name: tuple(sorted({placement[stage] for stage in stages})) for name, stages in staged.owners.items()}
    in_half = precision is not Precision.FP32
    with_masters = {name: p for name, p in parameters.items() if in_half and p.is_floating_point()}
    if rules is None:
        masters = MasterWeights(with_masters, values)
        return TrainedWeights(parameters, masters, None, None, layout.dp, ZeroConfig(), ranks_of, in_half)
    shared = {name for name in parameters if len(ranks_of[name]) > 1 or name in rules.summed}
    shared |= {name for name, p in parameters.items() if (sharding := sharding_of(p)) and sharding.has_copies()}
    own = {stage for stage, position in enumerate(placement) if position == layout.here.pp}

    def stages_of(names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(sorted(own.intersection(staged.owners[name]))) for name in names}

    unit_names = gathering_units(model) if rules.zero.zero_stage == 3 and staged.num_stages == 1 else {}
    units = units_of(model, unit_names)
    num_shards = rules.zero.num_shards(layout.dp.size)
    replicas = layout.dp if not rules.zero.zero_stage else layout.replicas(num_shards)
    buckets = layout_of(
        parameters,
        replicas,
        rules.config.ddp_bucket_cap_mb,
        shared=shared,
        indivisible=rules.indivisible if rules.zero.zero_stage else (),
        stages=stages_of(parameters),
        units=units,
    )
    on_host = offloaded_parameters(buckets, parameters, rules.zero.offload_optimizer)
    if not in_half:
        with_masters = {name: parameters[name] for name in parameters if name in on_host}
    parts = parts_of(buckets, with_masters) if rules.zero.zero_stage else None
    masters = MasterWeights(with_masters, values, parts, on_host=on_host, are_copies=not in_half)
    if not rules.zero.zero_stage:
        return TrainedWeights(parameters, masters, buckets, None, replicas, rules.zero, ranks_of, in_half)
    recurrent = [module for module in walk.modules(model) if isinstance(module, nn.RNNBase)]
    with torch.no_grad(), without_flat_weights(recurrent):
        if rules.zero.zero_stage < 3:
            flat = FlatWeights(buckets, parameters, replicas, device, _move)
        else:
            frozen = {name: p for name, p in walk.named_parameters(model) if not p.requires_grad and not p.is_complex()}
            capacity = rules.config.ddp_bucket_cap_mb
            frozen_buckets = layout_of(frozen, replicas, capacity, stages=stages_of(frozen), units=units)
            group = layout.dp_weights(num_shards)
            flat = ShardedWeights(buckets, parameters, group, device, _copy, frozen_buckets, frozen)
            masters.update_pieces(flat.pieces)
            if staged.num_stages == 1:
                _gather_units(staged, flat, unit_names, layout.control)
    return TrainedWeights(parameters, masters, buckets, flat, replicas, rules.zero, ranks_of, in_half)


def gathering_units(model: nn.Module) -> dict[str, int]:
    """The units of a model that are large enough to gather by themselves, by name, with their numbers."""
    least = _LEAST_SHARE * sum(parameter.numel() for parameter in walk.parameters(model))
    sizes = {name: sum(p.numel() for p in walk.parameters(walk.submodule(model, name))) for name in finest_units(model)}
    return {name: number for number, name in enumerate(name for name, size in sizes.items() if size > least)}


def units_of(model: nn.Module, units: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The numbers of the units that use each parameter."""
    names = {id(parameter): name for name, parameter in walk.named_parameters(model)}
    found: dict[str, tuple[int, ...]] = {}
    for unit, number in units.items():
        for parameter in walk.parameters(walk.submodule(model, unit)):
            name = names[id(parameter)]
            found[name] = (*found.get(name, ()), number)
    return found


def _gather_units(staged: StagedModel, weights: ShardedWeights, units: Mapping[str, int], control: Group) -> None:
    exchange = partial(gather_numbers, control, _IN_PASS)

    is_compiled = any(has_compiled_forward(module) for module in walk.modules(staged.model))
    gather = UnitGather(weights, units, learns=not is_compiled, exchange=exchange)
    weights.gather_as_others, weights.after_cancel = gather.gather_as_others, gather.reset
    weights.after_update = gather.release_kept
    staged.gather_units(gather)


def _copy(parameter: nn.Parameter, view: Tensor) -> None:
    """Copy a parameter to where it lies."""
    if parameter.is_meta:
        # Not the view, with which it would share the counter of versions.
        swap_value(parameter, torch.zeros((), dtype=view.dtype, device=view.device).expand(parameter.shape))
    else:
        view.copy_(parameter.data)


def _move(parameter: nn.Parameter, view: Tensor) -> None:
    if parameter.is_meta:
        # ``data`` has its own counter of versions: what is written to the parameter is not written to the piece.
        swap_value(parameter, view.data)
    else:
        view.copy_(parameter.data)
        parameter.data = view
