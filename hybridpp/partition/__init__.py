"""Cut a model into stages by tracing its own forward."""

from hybridpp.partition.annotations import annotate_split_points, set_execution_sequence
from hybridpp.partition.block_calls import block_calls
from hybridpp.partition.blocks import ModuleUnits, find_units, finest_units
from hybridpp.partition.calls import CallArguments, TensorSpec, Trace, UnitCall
from hybridpp.partition.common_traces import CommonTraces, has_global_hooks, surroundings
from hybridpp.partition.compile_blocks import compile_blocks
from hybridpp.partition.compiled import compiled_parts, has_compiled_forward
from hybridpp.partition.concrete_fallback import UntraceableUnitError
from hybridpp.partition.containers import is_cache
from hybridpp.partition.derivatives import MadeUpDerivatives
from hybridpp.partition.describe import (
    StageSummary,
    TracedModel,
    describe_cut,
    shared_parameters,
    stages_of,
    trace_model,
)
from hybridpp.partition.drawing_code import asks_for_mode
from hybridpp.partition.flops import FlopCounter
from hybridpp.partition.hook_inspection import Reachable
from hybridpp.partition.hook_inspection import is_users as is_users_hook
from hybridpp.partition.kept_state import KeptState, KeptValue
from hybridpp.partition.memory import MemoryBudget, StateBytes, TrainingStateSpec
from hybridpp.partition.module_outputs import MODULE_INTERNALS
from hybridpp.partition.plan import BoundarySharding, CutPoint, StagePlan, owners, stage_plan, unit_homes, uses
from hybridpp.partition.prune import parameter_names
from hybridpp.partition.recompute import blocks_by_stage, recomputed_blocks
from hybridpp.partition.samples import describe_sample, has_samples, make_samples
from hybridpp.partition.staged_model import StagedModel
from hybridpp.partition.staging_options import StagingOptions
from hybridpp.partition.trace import Tracer
from hybridpp.partition.unit_gather import UnitGather, is_watched

__all__ = [
    "MODULE_INTERNALS",
    "BoundarySharding",
    "CallArguments",
    "CommonTraces",
    "CutPoint",
    "FlopCounter",
    "KeptState",
    "KeptValue",
    "MadeUpDerivatives",
    "MemoryBudget",
    "ModuleUnits",
    "Reachable",
    "StagePlan",
    "StageSummary",
    "StagedModel",
    "StagingOptions",
    "StateBytes",
    "TensorSpec",
    "Trace",
    "TracedModel",
    "Tracer",
    "TrainingStateSpec",
    "UnitCall",
    "UnitGather",
    "UntraceableUnitError",
    "annotate_split_points",
    "asks_for_mode",
    "block_calls",
    "blocks_by_stage",
    "compile_blocks",
    "compiled_parts",
    "describe_cut",
    "describe_sample",
    "find_units",
    "finest_units",
    "has_compiled_forward",
    "has_global_hooks",
    "has_samples",
    "is_cache",
    "is_users_hook",
    "is_watched",
    "make_samples",
    "owners",
    "parameter_names",
    "recomputed_blocks",
    "set_execution_sequence",
    "shared_parameters",
    "stage_plan",
    "stages_of",
    "surroundings",
    "trace_model",
    "unit_homes",
    "uses",
]
