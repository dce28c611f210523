"""What a job would take, before it starts: memory of every rank, time of a step."""

from hybridpp.estimate.allocations import Allocation, AllocationLog
from hybridpp.estimate.comparison import plugin_call, plugin_keywords, why_slower
from hybridpp.estimate.cuda_attention import CudaAttention
from hybridpp.estimate.devices import DEVICES, DeviceProfile, find_device, with_links
from hybridpp.estimate.layout_estimate import (
    EstimateInput,
    EstimatesLayouts,
    JobSizes,
    LayoutEstimate,
    LayoutEstimator,
    RankEstimate,
    ScheduleCosts,
)
from hybridpp.estimate.measure_device import clock_of, measure_device, measure_links
from hybridpp.estimate.model_run import Memory, ModelRun
from hybridpp.estimate.op_log import Op, OpLog, Ops
from hybridpp.estimate.rank_memory import ProgramPeak, RankState, StepPeak, step_peak
from hybridpp.estimate.repeated_blocks import (
    NotPeriodicError,
    Repeated,
    repeated_blocks,
    repeated_inside,
    with_repeated_blocks,
)
from hybridpp.estimate.roofline import roofline, with_sums
from hybridpp.estimate.scaled_run import BASES, LARGER_BASES, ScaledRuns
from hybridpp.estimate.search import SearchResult, SearchSpace, search
from hybridpp.estimate.stage_memory import Held, StageMemory, stage_memory
from hybridpp.estimate.step_time import (
    Grid,
    StageWork,
    StepTime,
    rank_ends,
    stage_costs,
    step_time,
    update_ms,
)
from hybridpp.estimate.unit_marks import CannotLeaveOutError, UnitMarks, UnitRecorder
from hybridpp.estimate.unit_times import UnitTimes, median_times
from hybridpp.estimate.values import parts_of, peak_of, values_of
from hybridpp.nn.hollow import Hollow, NeedsValuesError

__all__ = [
    "BASES",
    "DEVICES",
    "LARGER_BASES",
    "Allocation",
    "AllocationLog",
    "CannotLeaveOutError",
    "CudaAttention",
    "DeviceProfile",
    "EstimateInput",
    "EstimatesLayouts",
    "Grid",
    "Held",
    "Hollow",
    "JobSizes",
    "LayoutEstimate",
    "LayoutEstimator",
    "Memory",
    "ModelRun",
    "NeedsValuesError",
    "NotPeriodicError",
    "Op",
    "OpLog",
    "Ops",
    "ProgramPeak",
    "RankEstimate",
    "RankState",
    "Repeated",
    "ScaledRuns",
    "ScheduleCosts",
    "SearchResult",
    "SearchSpace",
    "StageMemory",
    "StageWork",
    "StepPeak",
    "StepTime",
    "UnitMarks",
    "UnitRecorder",
    "UnitTimes",
    "clock_of",
    "find_device",
    "measure_device",
    "measure_links",
    "median_times",
    "parts_of",
    "peak_of",
    "plugin_call",
    "plugin_keywords",
    "rank_ends",
    "repeated_blocks",
    "repeated_inside",
    "roofline",
    "search",
    "stage_costs",
    "stage_memory",
    "step_peak",
    "step_time",
    "update_ms",
    "values_of",
    "why_slower",
    "with_links",
    "with_repeated_blocks",
    "with_sums",
]
