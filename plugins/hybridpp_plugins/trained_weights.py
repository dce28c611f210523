"""The weights that a rank trains: where their gradients lie, their masters, and which part this replica updates."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridpp.checkpoint import swap_value, without_flat_weights
from hybridpp.config import OptimizerConfig, Precision, ZeroConfig
from hybridpp.data_parallel import FlatWeights, GradientSharding, ShardLayout, layout_of, offloaded_parameters, parts_of
from hybridpp.partition import StagedModel
from hybridpp.precision import MasterWeights, ReplicatedTarget, ShardedTarget
from hybridpp.tensor_parallel import sharding_of
from hybridpp_plugins.layout import Layout


class UpdateRules(NamedTuple):
    """What of an optimizer and a plugin decides how weights are updated.

    Attributes:
        config: of the optimizer.
        zero: what replicas divide among themselves; nothing, if there is one.
        indivisible: parameters, by name, that one replica must update whole.
        summed: parameters, by name, whose gradients are summed over the tensor-parallel ranks.
    """

    config: OptimizerConfig
    zero: ZeroConfig
    indivisible: Collection[str]
    summed: Collection[str]


class TrainedWeights(NamedTuple):
    """The weights that a rank trains.

    Attributes:
        parameters: trainable ones, by name, in the order of the forward.
        masters: fp32 masters of them, or of the pieces that this replica updates; none in fp32.
        layout: of their gradients, and of the weights with ZeRO; None: there is no optimizer.
        flat: the weights, where replicas exchange pieces of them; else None.
        zero: what replicas divide among themselves.
        ranks_of: the pipeline positions that hold each of the complete model's parameters.
        in_half: whether there are masters, here or on other replicas.
    """

    parameters: Mapping[str, nn.Parameter]
    masters: MasterWeights
    layout: ShardLayout | None
    flat: FlatWeights | None
    zero: ZeroConfig
    ranks_of: Mapping[str, tuple[int, ...]]
    in_half: bool

    @property
    def sharding(self) -> GradientSharding:
        """What this replica keeps of the sums of gradients."""
        if self.zero.zero_stage < 2:
            return GradientSharding.SCATTERED if self.zero.zero_stage else GradientSharding.NONE
        return GradientSharding.MICROBATCH if self.zero.reduces_each_microbatch else GradientSharding.STEP

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """What this replica updates of a tensor of a parameter's shape."""
        return tensor if self.flat is None else self.flat.parts[name](tensor)

    def whole_masters(self) -> Mapping[str, Tensor]:
        """The masters in their parameters' shapes, unless they are copies of weights.

        Collective: all replicas, if they divide the parameters.
        """
        if not self.in_half:
            return {}
        if self.flat is None:
            return self.masters.masters
        return {name: tensor.clone() for name, tensor in self.flat.gathered(self.masters.masters)}

    def target(self) -> ReplicatedTarget:
        """What the optimizer updates."""
        if self.flat is None:
            return ReplicatedTarget(self.parameters, self.masters)
        return ShardedTarget(self.parameters, self.masters, self.flat.pieces, self.flat.gather)


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
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    ranks_of = {name: tuple(sorted({placement[stage] for stage in stages})) for name, stages in staged.owners.items()}
    in_half = precision is not Precision.FP32
    with_masters = {name: p for name, p in parameters.items() if in_half and p.is_floating_point()}
    if rules is None:
        masters = MasterWeights(with_masters, values)
        return TrainedWeights(parameters, masters, None, None, ZeroConfig(), ranks_of, in_half)
    shared = {name for name in parameters if len(ranks_of[name]) > 1 or name in rules.summed}
    shared |= {name for name, p in parameters.items() if (sharding := sharding_of(p)) and sharding.has_copies()}
    own = {stage for stage, position in enumerate(placement) if position == layout.here.pp}
    buckets = layout_of(
        parameters,
        layout.dp,
        rules.config.ddp_bucket_cap_mb,
        shared=shared,
        indivisible=rules.indivisible if rules.zero.zero_stage else (),
        stages={name: tuple(sorted(own.intersection(staged.owners[name]))) for name in parameters},
    )
    on_host = offloaded_parameters(buckets, parameters, rules.zero.offload_optimizer)
    if not in_half:
        with_masters = {name: parameters[name] for name in parameters if name in on_host}
    parts = parts_of(buckets, with_masters) if rules.zero.zero_stage else None
    masters = MasterWeights(with_masters, values, parts, on_host=on_host, are_copies=not in_half)
    if not rules.zero.zero_stage:
        return TrainedWeights(parameters, masters, buckets, None, rules.zero, ranks_of, in_half)
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    with torch.no_grad(), without_flat_weights(recurrent):
        flat = FlatWeights(buckets, parameters, layout.dp, device, _move)
    return TrainedWeights(parameters, masters, buckets, flat, rules.zero, ranks_of, in_half)


def _move(parameter: nn.Parameter, view: Tensor) -> None:
    if parameter.is_meta:
        swap_value(parameter, view)
    else:
        view.copy_(parameter.data)
        parameter.data = view
