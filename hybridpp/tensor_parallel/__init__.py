"""The tensor-parallel runtime: shard a model over ranks, and run it."""

from hybridpp.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from hybridpp.tensor_parallel.deferred_gather import DeferredGatherTensor, gathered
from hybridpp.tensor_parallel.deferred_sequence_gather import deferred_sequence_gather, local_sequence_shard
from hybridpp.tensor_parallel.layers import ShardedLayer
from hybridpp.tensor_parallel.parameter_sharding import ParameterSharding, sharding_of
from hybridpp.tensor_parallel.plan import FusedLayout, LayerStyle, Plan, ShardKind, parse_style
from hybridpp.tensor_parallel.plan_patterns import plan_from_patterns
from hybridpp.tensor_parallel.saved_shard import SavedShard
from hybridpp.tensor_parallel.sequence_block import SequenceBlock, run_sequence_parallel
from hybridpp.tensor_parallel.sequence_collectives import shard_lengths
from hybridpp.tensor_parallel.shard import ShardedModel, shard
from hybridpp.tensor_parallel.sharding_spec import DimShard, ShardingSpec
from hybridpp.tensor_parallel.style_spec import fitting_sizes, spec_of_styles, styles_of_spec
from hybridpp.tensor_parallel.tp_context import TensorParallelContext

__all__ = [
    "DeferredGatherTensor",
    "DimShard",
    "FusedLayout",
    "LayerStyle",
    "ParameterSharding",
    "Plan",
    "SavedShard",
    "SequenceBlock",
    "ShardKind",
    "ShardedLayer",
    "ShardedModel",
    "ShardingSpec",
    "TensorParallelContext",
    "deferred_sequence_gather",
    "fitting_sizes",
    "gathered",
    "local_sequence_shard",
    "parse_style",
    "plan_from_patterns",
    "run_sequence_parallel",
    "shard",
    "shard_lengths",
    "sharding_of",
    "spec_of_styles",
    "styles_of_spec",
    "vocab_parallel_cross_entropy",
]
