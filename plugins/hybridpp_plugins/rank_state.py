"""Bytes that a rank holds all through training: from the layouts of its buckets, without allocating them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from hybridpp.config import ZeroConfig
from hybridpp.data_parallel import ShardLayout, layout_of, offloaded_parameters
from hybridpp.data_parallel.layout import BucketLayout
from hybridpp.estimate import RankState
from hybridpp.optim import AdamKernels, adam_update_bytes
from hybridpp_plugins.estimate_runs import LocalParameter
from hybridpp_plugins.solo_group import SoloGroup

_FP32 = 4
# While two buckets are reduced, a third one fills.
_OPEN_BUCKETS = 3
# At the peak, when the backward pass begins, the weights of the last units are gathered, and their buckets are open.
_LAST_UNITS = 2


@dataclass(frozen=True, kw_only=True)
class StateRules:
    """What decides how much a rank keeps of each parameter.

    Attributes:
        has_masters: whether there are fp32 master weights.
        num_moments: optimizer states of each weight.
        zero: what replicas divide.
        num_replicas: of the model.
        bucket_mib: size of a bucket.
        kernels: of the update, by Adam; "fused" also for one that takes no temporary memory.
    """

    has_masters: bool
    num_moments: int
    zero: ZeroConfig
    num_replicas: int
    bucket_mib: float = 25.0
    kernels: AdamKernels = "fused"


def rank_state(
    parameters: Mapping[str, LocalParameter],
    stages: Mapping[str, tuple[int, ...]],
    shared: Collection[str],
    rules: StateRules,
    units: Mapping[str, tuple[int, ...]] | None = None,
) -> RankState:
    """What a rank holds.

    Args:
        parameters: of the rank, by name.
        stages: the rank's stages that use each.
        shared: parameters of whose gradients several ranks of a replica hold summands.
        rules: of training.
        units: the numbers of the units that use each, where weights are gathered by unit.
    """
    zero, shards = rules.zero, rules.zero.num_shards(rules.num_replicas)
    trained = {name: one.meta for name, one in parameters.items() if one.is_trained}
    frozen = sum(one.meta.nbytes for one in parameters.values() if not one.is_trained)
    layout = layout_of(trained, SoloGroup(shards), rules.bucket_mib, shared=shared, stages=stages, units=units)
    wide = {name: max(tensor.dtype.itemsize, _FP32) for name, tensor in trained.items()}
    on_host = set(offloaded_parameters(layout, trained, zero.offload_optimizer)) if zero.offload_optimizer else set()
    own = {name: piece.size for name, piece in layout.pieces.items()} if zero.zero_stage else _all(trained)
    here = {name: size for name, size in own.items() if name not in on_host}
    in_buckets = sum(bucket.size * _itemsize(bucket, trained) for bucket in layout.buckets)
    sums = sum(bucket.size * _sum_itemsize(bucket, wide) for bucket in layout.buckets)
    weights = in_buckets if zero.zero_stage else sum(tensor.nbytes for tensor in trained.values())
    gradients, buffers = sums, 0
    if zero.zero_stage >= 2 and rules.num_replicas > 1:
        gradients = sums // shards
        open_sizes = sorted((b.size * _sum_itemsize(b, wide) for b in layout.buckets if not b.is_shared), reverse=True)
        buffers = sum(open_sizes[:_OPEN_BUCKETS]) if zero.reduces_each_microbatch else sums
        if units is not None and zero.reduces_each_microbatch:
            buffers = _last_units([(b.units, b.size * _sum_itemsize(b, wide)) for b in layout.buckets])
        gradients += sum(b.size * _sum_itemsize(b, wide) for b in layout.buckets if b.is_shared)
    if zero.zero_stage == 3 and rules.num_replicas > 1:
        buffers += _gathered(layout, trained, rules, stages)
        weights, frozen = in_buckets // shards, frozen // shards
    # Buffers of replicas are not in use then.
    updated = [here[name] * size for name, size in wide.items() if name in here]  # in the optimizer's order
    update = adam_update_bytes(updated, rules.kernels) - buffers
    masters = sum(size * wide[name] for name, size in here.items()) if rules.has_masters else 0
    return RankState(
        weights=weights + frozen,
        gradients=gradients,
        masters=masters,
        moments=sum(size * wide[name] * rules.num_moments for name, size in here.items()),
        buffers=buffers,
        update=max(0, update),
        host=sum(own[name] * wide[name] * (2 + rules.num_moments) for name in on_host & own.keys()),
    )


def _gathered(
    layout: ShardLayout, trained: Mapping[str, Tensor], rules: StateRules, stages: Mapping[str, tuple[int, ...]]
) -> int:
    """Weights that are gathered at a time."""
    sizes = [(bucket.units, bucket.size * _itemsize(bucket, trained)) for bucket in layout.buckets]
    if any(units for units, _ in sizes):
        # What no unit has for itself is there all the time.
        return sum(size for units, size in sizes if not units) + _last_units(sizes)
    num_stages = len({stage for at in stages.values() for stage in at})
    share = min(num_stages, rules.zero.num_gathered_stages(num_stages) + 1) / max(num_stages, 1)
    return int(sum(size for _, size in sizes) * share)


def _last_units(sizes: Iterable[tuple[tuple[int, ...], int]]) -> int:
    by_unit: dict[tuple[int, ...], int] = {}
    for units, size in sizes:
        if units:
            by_unit[units] = by_unit.get(units, 0) + size
    return sum(size for _, size in sorted(by_unit.items())[-_LAST_UNITS:])


def _all(trained: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in trained.items()}


def _itemsize(bucket: BucketLayout, tensors: Mapping[str, Tensor]) -> int:
    return tensors[bucket.slots[0].name].dtype.itemsize


def _sum_itemsize(bucket: BucketLayout, wide: Mapping[str, int]) -> int:
    return wide[bucket.slots[0].name]
