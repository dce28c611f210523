"""How a model's layers would be divided, told without doing it."""

import copy

import torch
from torch import nn

from hybridpp.cluster import Loopback, current_world
from hybridpp.plugin import LayerDivision
from hybridpp.tensor_parallel import Plan, shard
from hybridpp_plugins.inferring import inferred_plan
from hybridpp_plugins.sample import find_samples


def preview_division(model: nn.Module, tp_size: int) -> LayerDivision:
    """What ``boost`` would find without a dataloader and a sample; the model is left as it was.

    Raises:
        ConfigError: no samples can be made from the model's configuration.
    """
    cpu = torch.device("cpu")
    plan = inferred_plan(model, lambda: find_samples(model, None, None, cpu), tp_size, current_world().control())
    return LayerDivision(plan.styles, plan.reasons, _shapes(model, plan, tp_size))


def _shapes(model: nn.Module, plan: Plan, tp_size: int) -> dict[str, tuple[int, ...]]:
    def of_first_rank() -> dict[str, tuple[int, ...]]:
        group = current_world().split([range(tp_size)])
        if group is None or group.rank:
            return {}
        divided = copy.deepcopy(model)
        shard(divided, plan, group)
        return {name: tuple(parameter.shape) for name, parameter in divided.named_parameters()}

    return Loopback(tp_size).run(of_first_rank)[0]
