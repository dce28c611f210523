"""Run a schedule: micro-batches, transport, executor."""

from hybridpp.pipeline.batch import Microbatch, SplitBatch, call_arguments, num_samples, plain, split_batch
from hybridpp.pipeline.executor import Executor, RankProgram, rank_programs
from hybridpp.pipeline.handshake import Report, agree, read_batch
from hybridpp.pipeline.layers import Gradients, Layer, layer_of
from hybridpp.pipeline.merge import merge_outputs
from hybridpp.pipeline.recorder import DeviceRecorder, HostRecorder, Recorder
from hybridpp.pipeline.stage import Stage, StagePlan, TensorSpec
from hybridpp.pipeline.stage_manager import StageManager
from hybridpp.pipeline.step import Step, StepResult
from hybridpp.pipeline.transport import Lanes, Transport
from hybridpp.pipeline.weight_gradients import WeightGradients

__all__ = [
    "DeviceRecorder",
    "Executor",
    "Gradients",
    "HostRecorder",
    "Lanes",
    "Layer",
    "Microbatch",
    "RankProgram",
    "Recorder",
    "Report",
    "SplitBatch",
    "Stage",
    "StageManager",
    "StagePlan",
    "Step",
    "StepResult",
    "TensorSpec",
    "Transport",
    "WeightGradients",
    "agree",
    "call_arguments",
    "layer_of",
    "merge_outputs",
    "num_samples",
    "plain",
    "rank_programs",
    "read_batch",
    "split_batch",
]
