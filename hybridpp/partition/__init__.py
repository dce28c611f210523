"""Cut a model into stages by tracing its own forward."""

from hybridpp.partition.blocks import Anatomy, dissect
from hybridpp.partition.plan import CutPoint, StagePlan
from hybridpp.partition.staged_model import StagedModel
from hybridpp.partition.strip import parameter_names
from hybridpp.partition.trace import TensorSpec, Trace, Tracer, UnitCall

__all__ = [
    "Anatomy",
    "CutPoint",
    "StagePlan",
    "StagedModel",
    "TensorSpec",
    "Trace",
    "Tracer",
    "UnitCall",
    "dissect",
    "parameter_names",
]
