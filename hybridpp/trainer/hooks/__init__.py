"""Hooks for a :class:`~hybridpp.trainer.Trainer`; one's own are subclasses of :class:`~hybridpp.trainer.Hook`."""

from hybridpp.trainer.hook import Hook
from hybridpp.trainer.hooks.accuracy import AccuracyHook
from hybridpp.trainer.hooks.checkpoint import SaveCheckpointHook
from hybridpp.trainer.hooks.early_stopping import EarlyStoppingHook
from hybridpp.trainer.hooks.log_metrics import LogMetricByEpochHook, LogMetricByStepHook
from hybridpp.trainer.hooks.loss import LossHook
from hybridpp.trainer.hooks.lr_scheduler import LRSchedulerHook
from hybridpp.trainer.hooks.progress import ProgressHook
from hybridpp.trainer.hooks.record_steps import RecordStepsHook
from hybridpp.trainer.hooks.timing import LogTimingByEpochHook
from hybridpp.trainer.hooks.tracker import TrackerHook

__all__ = [
    "AccuracyHook",
    "EarlyStoppingHook",
    "Hook",
    "LRSchedulerHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "LossHook",
    "ProgressHook",
    "RecordStepsHook",
    "SaveCheckpointHook",
    "TrackerHook",
]
