"""Which parameters are updated in host memory."""

from collections.abc import Mapping

from torch import Tensor

from hybridpp.data_parallel.bucket import accumulation_dtype
from hybridpp.data_parallel.layout import ShardLayout


def offloaded_parameters(layout: ShardLayout, parameters: Mapping[str, Tensor], share: float) -> frozenset[str]:
    """The parameters in the last buckets that have at least a share of the bytes of all; alike on all replicas.

    Args:
        layout: the buckets.
        parameters: in them, by name.
        share: from 0 to 1.
    """
    sizes = [
        sum(slot.size * accumulation_dtype(parameters[slot.name]).itemsize for slot in bucket.slots)
        for bucket in layout.buckets
    ]
    missing, names = share * sum(sizes), set[str]()
    for bucket, size in zip(reversed(layout.buckets), reversed(sizes), strict=True):
        if missing <= 0:
            break
        names.update(slot.name for slot in bucket.slots)
        missing -= size
    return frozenset(names)
