"""Activations of which each rank holds a shard: collectives with gradients, and tensors that gather when read."""

from hybridpp.sharded_activations.collectives import is_collective
from hybridpp.sharded_activations.cross_entropy import vocab_parallel_cross_entropy
from hybridpp.sharded_activations.deferred_gather import DeferredGatherTensor, gathered
from hybridpp.sharded_activations.deferred_sequence_gather import deferred_sequence_gather, local_sequence_shard
from hybridpp.sharded_activations.saved_shard import SavedShard
from hybridpp.sharded_activations.sequence_collectives import shard_lengths

__all__ = [
    "DeferredGatherTensor",
    "SavedShard",
    "deferred_sequence_gather",
    "gathered",
    "is_collective",
    "local_sequence_shard",
    "shard_lengths",
    "vocab_parallel_cross_entropy",
]
