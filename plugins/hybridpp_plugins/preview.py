"""How a model's layers would be divided, told without doing it."""

import copy
from collections.abc import Mapping

import torch
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.config import ParallelConfig
from hybridpp.plugin import BlockOnShards, LayerDivision
from hybridpp.tensor_parallel import Plan, SequenceBlock, SequencePlan, shard
from hybridpp_plugins.inferring import inferred_plan
from hybridpp_plugins.sample import Samples, find_samples
from hybridpp_plugins.sequences import sequence_plan


def preview_division(model: nn.Module, config: ParallelConfig) -> LayerDivision:
    """What ``boost`` would find without a dataloader and a sample; the model is left as it was.

    Args:
        model: also on the meta device.
        config: with ``tp_size``, and whether sequences are divided.

    Raises:
        ConfigError: no samples can be made from the model's configuration, or no block can run on shards of sequences.
    """
    control = current_world().control()

    def samples() -> Samples:
        return find_samples(model, None, None, torch.device("cpu"))

    plan, sequences = inferred_plan(model, samples, config.tp_size, control), SequencePlan()
    shapes = _shapes(model, plan, config.tp_size)
    # Where no layer is divided, that says more than that no sequence can be.
    if config.enable_sequence_parallelism and any(shapes[name] != p.shape for name, p in model.named_parameters()):
        sequences = sequence_plan(model, plan, samples, config.tp_size, control)
    return LayerDivision(plan.styles, plan.reasons, shapes, _on_shards(sequences.blocks), sequences.reasons)


def _on_shards(blocks: Mapping[str, SequenceBlock]) -> dict[str, BlockOnShards]:
    return {name: BlockOnShards(tuple(one.joins), one.rows, tuple(one.wholes)) for name, one in blocks.items()}


def _shapes(model: nn.Module, plan: Plan, tp_size: int) -> dict[str, tuple[int, ...]]:
    def of_first_rank() -> dict[str, tuple[int, ...]]:
        group = current_world().split([range(tp_size)])
        if group is None or group.rank:
            return {}
        divided = copy.deepcopy(model)
        shard(divided, plan, group)
        return {name: tuple(parameter.shape) for name, parameter in divided.named_parameters()}

    return Loopback(tp_size).run(of_first_rank)[0]
