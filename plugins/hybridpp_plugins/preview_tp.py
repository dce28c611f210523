"""How tensor parallelism would shard a model's layers, without sharding them."""

import copy
from collections.abc import Mapping

import torch
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.config import ParallelConfig, Precision
from hybridpp.module_adapter import ModuleAdapter
from hybridpp.plan_search import SequencePlan
from hybridpp.plugin import SequenceParallelBlock, TensorParallelPreview
from hybridpp.sharding_plan import Plan
from hybridpp.tensor_parallel import SequenceBlock, shard
from hybridpp_plugins.apply_sp import sequence_plan
from hybridpp_plugins.find_tp_plan import default_formats, find_tp_plan
from hybridpp_plugins.sample import Samples, find_samples


def preview_tensor_parallel(
    model: nn.Module, config: ParallelConfig, precision: Precision = Precision.FP32
) -> TensorParallelPreview:
    """The sharding that ``boost`` would find without a dataloader and a sample; the model is not changed.

    Args:
        model: may be on the meta device.
        config: ``tp_size`` and ``enable_sequence_parallelism`` are used.
        precision: of the run.

    Raises:
        ConfigError: no samples can be made from the model's configuration, or no block can run on sequence shards.
    """
    control = current_world().control()

    def samples() -> Samples:
        return find_samples(model, None, None, torch.device("cpu"))

    formats = default_formats(model, precision, "cpu")
    plan, sequences = find_tp_plan(model, samples, config.tp_size, control, formats=formats), SequencePlan()
    shapes = _shapes(model, plan, config.tp_size)
    # If no layer is sharded, sequence parallelism would raise a less helpful error.
    if config.enable_sequence_parallelism and any(shapes[name] != p.shape for name, p in model.named_parameters()):
        sequences = sequence_plan(model, plan, samples, config.tp_size, control, formats=formats)
    return TensorParallelPreview(
        plan.styles,
        plan.reasons,
        shapes,
        _sequence_parallel(sequences.blocks),
        sequences.reasons,
        plan.differences,
    )


def _sequence_parallel(blocks: Mapping[str, SequenceBlock]) -> dict[str, SequenceParallelBlock]:
    return {
        name: SequenceParallelBlock(tuple(one.gather_inputs), one.rows, tuple(one.replicated))
        for name, one in blocks.items()
    }


def _shapes(model: nn.Module, plan: Plan, tp_size: int) -> dict[str, tuple[int, ...]]:
    def of_first_rank() -> dict[str, tuple[int, ...]]:
        group = current_world().split([range(tp_size)])
        if group is None or group.rank:
            return {}
        divided = copy.deepcopy(model)
        shard(ModuleAdapter(divided), plan.spec, group)
        return {name: tuple(parameter.shape) for name, parameter in divided.named_parameters()}

    return Loopback(tp_size).run(of_first_rank)[0]
