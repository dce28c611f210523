"""Steps of the learning rate."""

from typing import Any

from hybridpp.trainer.hook import Hook
from hybridpp.trainer.state import TrainerState


class LRSchedulerHook(Hook):
    """Calls ``lr_scheduler.step()`` after each step, or after each epoch.

    Args:
        lr_scheduler: that ``boost`` returned; None: the trainer's.
        by_epoch: whether it steps once per epoch.
        metric: name of a metric that ``step`` gets, for ``ReduceLROnPlateau``; only with ``by_epoch``.
    """

    priority = 1

    def __init__(self, lr_scheduler: Any = None, by_epoch: bool = False, metric: str | None = None):
        self._lr_scheduler, self._by_epoch, self._metric = lr_scheduler, by_epoch, metric

    def after_step(self, trainer: TrainerState) -> None:
        if not self._by_epoch:
            self._of(trainer).step()

    def after_epoch(self, trainer: TrainerState) -> None:
        if self._by_epoch:
            values = () if self._metric is None else (trainer.metric(self._metric),)
            self._of(trainer).step(*values)

    def _of(self, trainer: TrainerState) -> Any:
        return self._lr_scheduler if self._lr_scheduler is not None else trainer.lr_scheduler
