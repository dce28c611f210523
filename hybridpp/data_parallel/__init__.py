"""Replicas: disjoint data, one gradient."""

from hybridpp.data_parallel.buckets import GradientBuckets
from hybridpp.data_parallel.sampler import ShardedBatchSampler

__all__ = ["GradientBuckets", "ShardedBatchSampler"]
