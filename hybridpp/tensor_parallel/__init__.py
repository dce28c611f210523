"""The tensor-parallel runtime: shard a model over ranks as a spec says, and run it."""

from hybridpp.tensor_parallel.layers import ShardedLayer
from hybridpp.tensor_parallel.parameter_sharding import ParameterSharding, sharding_of
from hybridpp.tensor_parallel.script_reads import ScriptReads
from hybridpp.tensor_parallel.sequence_block import SequenceBlock, run_sequence_parallel
from hybridpp.tensor_parallel.shard import ShardedModel, shard
from hybridpp.tensor_parallel.tp_context import TensorParallelContext

__all__ = [
    "ParameterSharding",
    "ScriptReads",
    "SequenceBlock",
    "ShardedLayer",
    "ShardedModel",
    "TensorParallelContext",
    "run_sequence_parallel",
    "shard",
    "sharding_of",
]
