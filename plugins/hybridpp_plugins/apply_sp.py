"""Sequence parallelism: which blocks run on sequence shards, and how shards are sent between stages."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hybridpp.cluster import Group, preserved_random_state
from hybridpp.errors import ConfigError
from hybridpp.nn.names import qualified
from hybridpp.partition import TensorSpec, find_units
from hybridpp.plan_search import RunFormats, SequencePlan, infer_sequence
from hybridpp.sharded_activations import deferred_sequence_gather, local_sequence_shard, shard_lengths
from hybridpp.sharding_plan import Plan
from hybridpp.tensor_parallel import SequenceBlock
from hybridpp_plugins.common_plans import CommonPlans
from hybridpp_plugins.find_tp_plan import calls_of_blocks, of_first_rank, watched_insides, watched_reads
from hybridpp_plugins.sample import Samples


def sequence_plan(
    model: nn.Module,
    plan: Plan,
    find_samples: Callable[[], Samples],
    size: int,
    control: Group,
    common: CommonPlans | None = None,
    formats: RunFormats | None = None,
) -> SequencePlan:
    """How the model's blocks run on sequence shards after the plan has sharded their layers over ``size`` ranks.

    Rank 0 searches for all ranks: it runs the model once on a sample, or traces it if it is on the meta device. What
    ``formats`` says of the run, kernels must take: None, the dtypes are not known.

    Collective: all ranks; two all-gathers of host memory.

    Raises:
        ConfigError: no block can run on sequence shards.
        Exception: the error that the model raises on rank 0, on every rank.
    """

    def find() -> SequencePlan:
        samples = find_samples()
        settings = size, pickle.dumps(plan.spec), formats and formats.described(model)
        return common.get(settings, model, samples, lambda: search(samples)) if common else search(samples)

    def search(samples: Samples) -> SequencePlan:
        blocks = find_units(model, 1).blocks
        with preserved_random_state(torch.device("cpu")):
            with watched_insides(model, blocks, {}) as entered, watched_reads(model, blocks) as read:
                calls, more, collected = calls_of_blocks(model, blocks, samples)
            found = infer_sequence(model, blocks, calls, plan.spec, size, more, formats, collected)
            outside = _used_elsewhere(found, entered, read)
            if outside:
                others = [name for name in blocks if name not in outside]
                found = infer_sequence(model, others, calls, plan.spec, size, more, formats, collected)
        return found._replace(reasons={**found.reasons, **outside})

    plan_of_blocks = of_first_rank(find, control)
    if not plan_of_blocks.blocks:
        name, reason = next(iter(plan_of_blocks.reasons.items()), ("", "it has no blocks"))
        raise ConfigError(
            f"no block of {type(model).__name__} can run on sequence shards: "
            f"{name or 'all'}: {reason}. Leave enable_sequence_parallelism out."
        )
    return plan_of_blocks


def _used_elsewhere(
    found: SequencePlan, entered: Mapping[str, set[str]], read: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Blocks on sequence shards of which other code calls a module, with complete sequences; with a reason.

    Or reads a weight whose gradient is a sum over the ranks: that of the other code would count on each of them.
    """
    holders = {name.rpartition(".")[0] for name in found.partial_grad}
    outside: dict[str, str] = {}
    for name, block in found.blocks.items():
        changed = {*block.gather_inputs, *block.rows, *block.replicated}
        for inner in reversed(read.get(name, ())):
            if qualified(name, inner) in found.partial_grad:
                outside[name] = f"{inner!r} is also read by code outside of the block"
        for inner in sorted(entered.get(name, ()), reverse=True):
            if inner in changed or qualified(name, inner) in holders:
                outside[name] = f"{inner!r} is also called from outside of the block"
    return outside


class ShardsBetweenStages:
    """Sends sequence shards to the next stage: each rank sends its shard to the same tensor-parallel rank there.

    Args:
        blocks: by name.
        group: the tensor-parallel ranks.
    """

    def __init__(self, blocks: Mapping[str, SequenceBlock], group: Group):
        self._blocks = blocks
        self._group = group

    def shard_spec(self, name: str, leaf: int, full: TensorSpec) -> TensorSpec | None:
        """This rank's shard of a result of a block; None: it is sent unsharded, because it is too short."""
        if name not in self._blocks or leaf not in self._blocks[name].results:
            return None
        batch, length, *others = full.shape
        if length < self._group.size:
            return None
        return replace(full, shape=(batch, shard_lengths(length, self._group.size)[self._group.rank], *others))

    def shard(self, full: Tensor) -> Tensor:
        """This rank's shard."""
        return local_sequence_shard(full, self._group)

    def unshard(self, shard: Tensor, spec: TensorSpec) -> Tensor:
        """The unsharded value, gathered when it is first used."""
        return deferred_sequence_gather(shard, spec.shape[1], self._group)
