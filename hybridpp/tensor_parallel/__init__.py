"""Divide the layers of a model over ranks."""

from hybridpp.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from hybridpp.tensor_parallel.crossings import Crossings
from hybridpp.tensor_parallel.division import Division, Part
from hybridpp.tensor_parallel.inference.ends import infer_ends, large_tables, watched_tables
from hybridpp.tensor_parallel.inference.model import Inference, infer_plan
from hybridpp.tensor_parallel.layers import ShardedLayer
from hybridpp.tensor_parallel.lazy_whole import LazyWhole, gathered
from hybridpp.tensor_parallel.patterns import plan_from_patterns
from hybridpp.tensor_parallel.placement import Placement, placement_of
from hybridpp.tensor_parallel.plan import Kind, Layout, Plan, Style, parse_style
from hybridpp.tensor_parallel.sequence import SequenceBlock, run_on_shards
from hybridpp.tensor_parallel.sequence_collectives import shard_lengths
from hybridpp.tensor_parallel.sequence_infer import SequencePlan, infer_sequence
from hybridpp.tensor_parallel.sequence_kept import KeptShard, is_checkpointed
from hybridpp.tensor_parallel.sequence_lazy import lazily_joined, shard_of
from hybridpp.tensor_parallel.shard import Sharding, fitting_sizes, shard

__all__ = [
    "Crossings",
    "Division",
    "Inference",
    "KeptShard",
    "Kind",
    "Layout",
    "LazyWhole",
    "Part",
    "Placement",
    "Plan",
    "SequenceBlock",
    "SequencePlan",
    "ShardedLayer",
    "Sharding",
    "Style",
    "fitting_sizes",
    "gathered",
    "infer_ends",
    "infer_plan",
    "infer_sequence",
    "is_checkpointed",
    "large_tables",
    "lazily_joined",
    "parse_style",
    "placement_of",
    "plan_from_patterns",
    "run_on_shards",
    "shard",
    "shard_lengths",
    "shard_of",
    "vocab_parallel_cross_entropy",
    "watched_tables",
]
