"""Search for a way to shard a model's layers over ranks, by trials on copies of its blocks."""

from hybridpp.plan_search.embeddings_and_heads import infer_embeddings_and_heads, large_tables, record_table_uses
from hybridpp.plan_search.hf_tp_plan import hf_tp_plan
from hybridpp.plan_search.model_search import infer_plan
from hybridpp.plan_search.sequence_search import SequencePlan, infer_sequence

__all__ = [
    "SequencePlan",
    "hf_tp_plan",
    "infer_embeddings_and_heads",
    "infer_plan",
    "infer_sequence",
    "large_tables",
    "record_table_uses",
]
