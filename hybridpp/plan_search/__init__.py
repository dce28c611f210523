"""Search for a way to shard a model's layers over ranks, by trials on copies of its blocks."""

from hybridpp.plan_search.embeddings_and_heads import infer_embeddings_and_heads, large_tables, record_table_uses
from hybridpp.plan_search.hf_tp_plan import hf_tp_plan
from hybridpp.plan_search.layer_trial import own_forwards, refused_layers
from hybridpp.plan_search.model_search import infer_plan
from hybridpp.plan_search.plan_check import CheckedPlan, PlanFault, SampleRun, check_plan
from hybridpp.plan_search.run_formats import RunFormats
from hybridpp.plan_search.sequence_search import SequencePlan, infer_sequence

__all__ = [
    "CheckedPlan",
    "PlanFault",
    "RunFormats",
    "SampleRun",
    "SequencePlan",
    "check_plan",
    "hf_tp_plan",
    "infer_embeddings_and_heads",
    "infer_plan",
    "infer_sequence",
    "large_tables",
    "own_forwards",
    "record_table_uses",
    "refused_layers",
]
