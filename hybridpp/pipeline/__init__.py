"""Run a schedule: micro-batches, transport, executor."""

from hybridpp.pipeline.batch import Microbatch, SplitBatch, call_arguments, num_samples, plain, split_batch
from hybridpp.pipeline.executor import Executor, Step, StepResult
from hybridpp.pipeline.handshake import Report, agree, read_batch
from hybridpp.pipeline.merge import merge_outputs
from hybridpp.pipeline.stage import Stage, StagePlan, TensorSpec
from hybridpp.pipeline.stage_manager import StageManager
from hybridpp.pipeline.transport import Transport

__all__ = [
    "Executor",
    "Microbatch",
    "Report",
    "SplitBatch",
    "Stage",
    "StageManager",
    "StagePlan",
    "Step",
    "StepResult",
    "TensorSpec",
    "Transport",
    "agree",
    "call_arguments",
    "merge_outputs",
    "num_samples",
    "plain",
    "read_batch",
    "split_batch",
]
