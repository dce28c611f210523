"""The memory that training needs per weight, by optimizer and precision."""

import torch
from torch.optim import Optimizer

from hybridpp.config import Precision, ZeroConfig
from hybridpp.optim import JoinedOptimizer
from hybridpp.partition import TrainingStateSpec


def optimizer_memory(
    optimizer: Optimizer | None,
    precision: Precision,
    zero: ZeroConfig | None = None,
    num_stages: int = 1,
) -> TrainingStateSpec:
    """Gradients, masters and optimizer state per weight; ``optimizer`` None: the model is not trained.

    SGD keeps one number per weight with momentum, else none. All other optimizers are counted as Adam: two numbers per
    weight, or three with ``amsgrad``. Replicas divide what ``zero`` says among themselves. The model has
    ``num_stages``.
    """
    masters = precision is not Precision.FP32
    if optimizer is None:
        return TrainingStateSpec(None, masters)
    moments = max((_moments(optimizer, group) for group in optimizer.param_groups), default=0)
    zero = zero or ZeroConfig()
    shards = zero.num_shards(1)
    gradient_shards = shards if zero.reduces_each_microbatch else 1
    copies = zero.weight_copies(shards, num_stages)
    return TrainingStateSpec(moments, masters, shards, gradient_shards, zero.offload_optimizer, copies)


def _moments(optimizer: Optimizer, group: dict[str, object]) -> int:
    if isinstance(optimizer, JoinedOptimizer):
        own = next(one for one in optimizer.optimizers if any(group is its for its in one.param_groups))
        return _moments(own, group)
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group["momentum"] else 0
    return 3 if group.get("amsgrad") else 2
