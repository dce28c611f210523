"""How long epochs take."""

import time
from typing import Any

from hybridpp.trainer.hooks.log_metrics import LogWriter
from hybridpp.trainer.state import TrainerState


class LogTimingByEpochHook(LogWriter):
    """One line after each epoch: ``Epoch [2]: 41.2 s, 0.103 s per step, 310 samples/s``, evaluations left out.

    Also in ``trainer.metrics``, as ``time/epoch``, ``time/step`` (s) and ``time/samples_per_second`` over all replicas.

    Args:
        logger: as that of :class:`LogMetricByEpochHook`.
    """

    def __init__(self, logger: Any = None):
        super().__init__(logger)
        self._started = self._ended = 0.0
        self._num_steps = self._num_samples = 0

    def before_epoch(self, trainer: TrainerState) -> None:
        self._started = self._ended = time.perf_counter()
        self._num_steps = self._num_samples = 0

    def after_step(self, trainer: TrainerState) -> None:
        self._ended = time.perf_counter()
        self._num_steps += 1
        self._num_samples += trainer.batches.num_samples

    def after_epoch(self, trainer: TrainerState) -> None:
        (num_samples,) = trainer.sum_over_replicas(self._num_samples)
        seconds = self._ended - self._started
        if not self._num_steps or seconds <= 0:
            return
        per_step, rate = seconds / self._num_steps, num_samples / seconds
        trainer.metrics.update({"time/epoch": seconds, "time/step": per_step, "time/samples_per_second": rate})
        self.write(
            trainer, f"Epoch [{trainer.epoch + 1}]: {seconds:.3g} s, {per_step:.3g} s per step, {rate:.3g} samples/s"
        )
