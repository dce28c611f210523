"""Metrics in the log."""

from logging import Logger
from typing import Any

from hybridpp.cluster import get_dist_logger
from hybridpp.trainer.hook import Hook, check_intervals
from hybridpp.trainer.state import TrainerState


class LogWriter(Hook):
    """A hook that writes lines on rank 0.

    Args:
        logger: of :func:`hybridpp.get_dist_logger` or of ``logging``; None: the first.
    """

    priority = 20

    def __init__(self, logger: Any = None):
        self._logger = logger

    def write(self, trainer: TrainerState, text: str) -> None:
        """Write a line, on rank 0."""
        if self._logger is None or not isinstance(self._logger, Logger):
            (self._logger or get_dist_logger()).info(text, ranks=[0])
        elif trainer.coordinator.is_master():
            self._logger.info(text)


class LogMetricByEpochHook(LogWriter):
    """One line with all metrics but times after each epoch: ``Epoch [2]: train/loss 0.412, test/accuracy 0.93``.

    Args:
        logger: of :func:`hybridpp.get_dist_logger` or of ``logging``; None: the first. Rank 0 writes.
        interval: epochs from one line to the next.
    """

    def __init__(self, logger: Any = None, interval: int = 1):
        super().__init__(logger)
        check_intervals(interval=interval)
        self._interval = interval

    def after_epoch(self, trainer: TrainerState) -> None:
        if (trainer.epoch + 1) % self._interval == 0:
            # Times have a line of their own, which may follow this one.
            found = {name: value for name, value in trainer.metrics.items() if not name.startswith("time/")}
            values = ", ".join(f"{name} {value:.6g}" for name, value in found.items())
            self.write(trainer, f"Epoch [{trainer.epoch + 1}]: {values}")


class LogMetricByStepHook(LogWriter):
    """The loss of this replica's batch and the learning rates: ``Step 20: loss 1.23, lr 0.001``.

    Args:
        logger: as that of :class:`LogMetricByEpochHook`.
        interval: steps from one line to the next.
    """

    def __init__(self, logger: Any = None, interval: int = 1):
        super().__init__(logger)
        check_intervals(interval=interval)
        self._interval = interval

    def after_step(self, trainer: TrainerState) -> None:
        if trainer.step % self._interval == 0:
            values = ", ".join(f"{name} {value:.6g}" for name, value in trainer.step_values().items())
            self.write(trainer, f"Step {trainer.step}: {values}")
