"""Which blocks of a model run on shards of sequences, beside the plan that divides its layers; and between stages."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group, preserved_random_state
from hybridpp.errors import ConfigError
from hybridpp.partition import TensorSpec, dissect
from hybridpp.tensor_parallel import (
    Plan,
    SequenceBlock,
    SequencePlan,
    infer_sequence,
    lazily_joined,
    shard_lengths,
    shard_of,
)
from hybridpp_plugins.inferring import calls_of_blocks, of_first_rank
from hybridpp_plugins.sample import Samples


def sequence_plan(
    model: nn.Module, plan: Plan, find_samples: Callable[[], Samples], size: int, control: Group
) -> SequencePlan:
    """How the model's blocks run on shards of sequences once the plan has divided their layers over ``size`` ranks.

    The first rank finds out for all. The model runs there once, on a sample; on the meta device it is traced instead.

    Collective: all ranks; two all-gathers of host memory.

    Raises:
        ConfigError: no block can.
        Exception: whatever the first rank's model raises, on every rank.
    """

    def find() -> SequencePlan:
        blocks = dissect(model, 1).blocks
        with preserved_random_state(torch.device("cpu")):
            return infer_sequence(model, blocks, calls_of_blocks(model, blocks, find_samples()), plan, size)

    found = of_first_rank(find, control)
    if not found.blocks:
        name, reason = next(iter(found.reasons.items()), ("", "it has no blocks"))
        raise ConfigError(
            f"sequence parallelism finds no block of {type(model).__name__} that can run on shards of sequences: "
            f"{name or 'all'}: {reason}. Leave enable_sequence_parallelism out."
        )
    return found


class ShardsBetweenStages:
    """What blocks on shards hand to the next stage: each rank its shard, to the rank in the same place there.

    Args:
        blocks: by name.
        group: the ranks that share layers.
    """

    def __init__(self, blocks: Mapping[str, SequenceBlock], group: Group):
        self._blocks = blocks
        self._group = group

    def spec(self, name: str, leaf: int, whole: TensorSpec) -> TensorSpec | None:
        """This rank's shard of a result of a block; None: it travels whole, as there are not enough places."""
        if name not in self._blocks or leaf not in self._blocks[name].results:
            return None
        batch, length, *others = whole.shape
        if length < self._group.size:
            return None
        return replace(whole, shape=(batch, shard_lengths(length, self._group.size)[self._group.rank], *others))

    def part(self, whole: Tensor) -> Tensor:
        """This rank's shard."""
        return shard_of(whole, self._group)

    def whole(self, part: Tensor, spec: TensorSpec) -> Tensor:
        """What looks whole, of the shard that arrived."""
        return lazily_joined(part, spec.shape[1], self._group)
