"""Data parallelism: disjoint data per replica, one gradient for all."""

from hybridpp.data_parallel.bucket import GradientSharding, layout_of
from hybridpp.data_parallel.buckets import GradientBuckets
from hybridpp.data_parallel.buffer_broadcast import BufferBroadcast, buffers_to_send
from hybridpp.data_parallel.collate import stack_samples
from hybridpp.data_parallel.flat_weights import FlatWeights, parts_of
from hybridpp.data_parallel.gradient_checks import GradientChecks
from hybridpp.data_parallel.iterable_dataset import RepeatedSamples, ShardedIterableDataset
from hybridpp.data_parallel.layout import ShardLayout
from hybridpp.data_parallel.offload_share import offloaded_parameters
from hybridpp.data_parallel.reducer import GradientReducer
from hybridpp.data_parallel.replicas import HybridReplicas, Replicas
from hybridpp.data_parallel.running_statistics import BufferWriteDetector, RunningStatistics
from hybridpp.data_parallel.sampler import PassStart, ShardedBatchSampler
from hybridpp.data_parallel.seeding import SeededCollate, SeededDataset
from hybridpp.data_parallel.sharded_weights import ShardedWeights, give_memory
from hybridpp.data_parallel.update_target import UpdateTarget

__all__ = [
    "BufferBroadcast",
    "BufferWriteDetector",
    "FlatWeights",
    "GradientBuckets",
    "GradientChecks",
    "GradientReducer",
    "GradientSharding",
    "HybridReplicas",
    "PassStart",
    "RepeatedSamples",
    "Replicas",
    "RunningStatistics",
    "SeededCollate",
    "SeededDataset",
    "ShardLayout",
    "ShardedBatchSampler",
    "ShardedIterableDataset",
    "ShardedWeights",
    "UpdateTarget",
    "buffers_to_send",
    "give_memory",
    "layout_of",
    "offloaded_parameters",
    "parts_of",
    "stack_samples",
]
