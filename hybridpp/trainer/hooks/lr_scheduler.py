"""Steps of the learning rate."""

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from hybridpp.errors import ConfigError
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
        if metric is not None and not by_epoch:
            raise ConfigError(f"a metric is known after an epoch: got metric={metric!r}. Pass by_epoch=True, too.")
        self._lr_scheduler, self._by_epoch, self._metric = lr_scheduler, by_epoch, metric

    def before_fit(self, trainer: TrainerState) -> None:
        scheduler = self._of(trainer)
        if not callable(getattr(scheduler, "step", None)):
            raise ConfigError(
                f"LRSchedulerHook needs a learning-rate schedule: got {scheduler!r}. Pass one to booster.boost."
            )
        plain = scheduler.unwrap() if hasattr(scheduler, "unwrap") else scheduler
        if isinstance(plain, ReduceLROnPlateau) and self._metric is None:
            raise ConfigError(
                "ReduceLROnPlateau steps by a metric. Add LRSchedulerHook(by_epoch=True, metric='test/loss') to hooks."
            )

    def after_step(self, trainer: TrainerState) -> None:
        if not self._by_epoch:
            self._of(trainer).step()

    def after_epoch(self, trainer: TrainerState) -> None:
        if self._by_epoch:
            values = () if self._metric is None else (trainer.metric(self._metric),)
            self._of(trainer).step(*values)

    def _of(self, trainer: TrainerState) -> Any:
        return self._lr_scheduler if self._lr_scheduler is not None else trainer.lr_scheduler
