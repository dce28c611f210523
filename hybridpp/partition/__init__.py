"""Cut a model into stages by tracing its own forward."""

from hybridpp.partition.block_calls import block_calls
from hybridpp.partition.blocks import Anatomy, dissect, finest_units
from hybridpp.partition.calls import TensorSpec, Trace, UnitCall
from hybridpp.partition.cut import CutPoint
from hybridpp.partition.describe import StageSummary, describe_cut, shared_parameters
from hybridpp.partition.marks import annotate_split_points, set_execution_sequence
from hybridpp.partition.plan import Parts, StagePlan
from hybridpp.partition.samples import make_samples
from hybridpp.partition.staged_model import StagedModel
from hybridpp.partition.staging import Staging
from hybridpp.partition.strip import parameter_names
from hybridpp.partition.structure import is_cache
from hybridpp.partition.trace import Tracer
from hybridpp.partition.untouched import untouched

__all__ = [
    "Anatomy",
    "CutPoint",
    "Parts",
    "StagePlan",
    "StageSummary",
    "StagedModel",
    "Staging",
    "TensorSpec",
    "Trace",
    "Tracer",
    "UnitCall",
    "annotate_split_points",
    "block_calls",
    "describe_cut",
    "dissect",
    "finest_units",
    "is_cache",
    "make_samples",
    "parameter_names",
    "set_execution_sequence",
    "shared_parameters",
    "untouched",
]
