"""Search for a way to shard a model's layers over ranks, by trials on copies of its blocks."""

from hybridpp.plan_search.block_ways import WayRecorder, recorded_ways
from hybridpp.plan_search.embeddings_and_heads import (
    EmbeddingsAndHeads,
    infer_embeddings_and_heads,
    large_tables,
    record_table_uses,
)
from hybridpp.plan_search.hf_tp_plan import hf_tp_plan
from hybridpp.plan_search.later_call import LaterCall, LaterTrial, SizesOfShard, UnshardedBlock, Verdict, try_later_call
from hybridpp.plan_search.layer_trial import own_forwards, refused_layers
from hybridpp.plan_search.model_search import infer_plan, kind_of
from hybridpp.plan_search.narrowed_block import NarrowCopies
from hybridpp.plan_search.plan_check import CheckedPlan, PlanFault, SampleRun, check_plan
from hybridpp.plan_search.run_formats import RunFormats
from hybridpp.plan_search.sequence_search import SequencePlan, infer_sequence

__all__ = [
    "CheckedPlan",
    "EmbeddingsAndHeads",
    "LaterCall",
    "LaterTrial",
    "NarrowCopies",
    "PlanFault",
    "RunFormats",
    "SampleRun",
    "SequencePlan",
    "SizesOfShard",
    "UnshardedBlock",
    "Verdict",
    "WayRecorder",
    "check_plan",
    "hf_tp_plan",
    "infer_embeddings_and_heads",
    "infer_plan",
    "infer_sequence",
    "kind_of",
    "large_tables",
    "own_forwards",
    "record_table_uses",
    "recorded_ways",
    "refused_layers",
    "try_later_call",
]
