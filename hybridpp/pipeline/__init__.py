"""Running a schedule: micro-batches, transport, executor."""

from hybridpp.pipeline.batch import (
    Microbatch,
    SplitBatch,
    call_arguments,
    num_samples,
    resize_batch,
    split_batch,
    to_plain_containers,
)
from hybridpp.pipeline.batch_checks import RankBatchInfo
from hybridpp.pipeline.batch_dim_checks import check_batch_dims, watch_sequence_axes
from hybridpp.pipeline.batch_dims import leaf_dims, map_sample_lists
from hybridpp.pipeline.batch_reader import (
    BatchReader,
    BatchUse,
    check_equal,
    read_batch,
    start_batch_check,
    step_call,
)
from hybridpp.pipeline.batch_statistics import StatisticsLook
from hybridpp.pipeline.boundary import Transport
from hybridpp.pipeline.compiled_wgrad import compile_keywords, makes_cuda_graphs
from hybridpp.pipeline.criterion import CriterionAdapter, SignatureCache
from hybridpp.pipeline.criterion_form import check_reduction, form_of, takes_targets
from hybridpp.pipeline.deferred_wgrad import is_deferred_layer
from hybridpp.pipeline.device_marks import DeviceMarks
from hybridpp.pipeline.executor import Executor
from hybridpp.pipeline.forward_signature import ForwardSignature
from hybridpp.pipeline.loss_form import combined, loss_form_of, matched, observed
from hybridpp.pipeline.loss_graph import GraphLoss, LossComparison, read_loss, weigh
from hybridpp.pipeline.loss_items import LossForm, Measured, NotCountedError, ReplicaCounts, add_up, no_items
from hybridpp.pipeline.loss_reduction import (
    LossReduction,
    confirm_sum,
    duplicate_samples,
    select_samples,
    with_another,
    with_unlike_samples,
)
from hybridpp.pipeline.loss_trace import LossTrace
from hybridpp.pipeline.memory_in_use import memory_reader
from hybridpp.pipeline.merge import merge_outputs
from hybridpp.pipeline.rank_program import RankProgram, rank_programs
from hybridpp.pipeline.read_ahead import ReadAheadIterator
from hybridpp.pipeline.recorder import ActiveRecording, DeviceRecorder, HostRecorder, Recorder
from hybridpp.pipeline.rest_of_step import EndedInsideError, RestOfStep
from hybridpp.pipeline.selected_inputs import InputSelection, with_selection
from hybridpp.pipeline.split_backward_ops import Gradients, SplitBackwardOps, split_backward_ops
from hybridpp.pipeline.stage import PipelineStage, StageIO, TensorMeta
from hybridpp.pipeline.stage_manager import StageManager
from hybridpp.pipeline.step import MicrobatchLoss, PipelineStep, StepResult
from hybridpp.pipeline.weight_gradients import WeightGradients

__all__ = [
    "ActiveRecording",
    "BatchReader",
    "BatchUse",
    "CriterionAdapter",
    "DeviceMarks",
    "DeviceRecorder",
    "EndedInsideError",
    "Executor",
    "ForwardSignature",
    "Gradients",
    "GraphLoss",
    "HostRecorder",
    "InputSelection",
    "LossComparison",
    "LossForm",
    "LossReduction",
    "LossTrace",
    "Measured",
    "Microbatch",
    "MicrobatchLoss",
    "NotCountedError",
    "PipelineStage",
    "PipelineStep",
    "RankBatchInfo",
    "RankProgram",
    "ReadAheadIterator",
    "Recorder",
    "ReplicaCounts",
    "RestOfStep",
    "SignatureCache",
    "SplitBackwardOps",
    "SplitBatch",
    "StageIO",
    "StageManager",
    "StatisticsLook",
    "StepResult",
    "TensorMeta",
    "Transport",
    "WeightGradients",
    "add_up",
    "call_arguments",
    "check_batch_dims",
    "check_equal",
    "check_reduction",
    "combined",
    "compile_keywords",
    "confirm_sum",
    "duplicate_samples",
    "form_of",
    "is_deferred_layer",
    "leaf_dims",
    "loss_form_of",
    "makes_cuda_graphs",
    "map_sample_lists",
    "matched",
    "memory_reader",
    "merge_outputs",
    "no_items",
    "num_samples",
    "observed",
    "rank_programs",
    "read_batch",
    "read_loss",
    "resize_batch",
    "select_samples",
    "split_backward_ops",
    "split_batch",
    "start_batch_check",
    "step_call",
    "takes_targets",
    "to_plain_containers",
    "watch_sequence_axes",
    "weigh",
    "with_another",
    "with_selection",
    "with_unlike_samples",
]
