"""Checkpoints of the run."""

from pathlib import Path

from hybridpp.trainer.hook import Hook, check_intervals
from hybridpp.trainer.state import TrainerState


class SaveCheckpointHook(Hook):
    """Calls ``booster.save``; ``fit(resume_from=path)`` goes on from the newest checkpoint.

    Args:
        path: the folder of the run's checkpoints.
        interval: epochs from one checkpoint to the next; the last epoch has one in any case.
        steps: steps from one to the next instead, and none at the ends of epochs.
        keep_last: how many stay; None: all.
        asynchronous: whether they are written while training goes on.

    Raises:
        ConfigError: ``interval`` or ``steps`` is below 1.
    """

    priority = 30
    saves_runs = True

    def __init__(
        self,
        path: str | Path,
        interval: int = 1,
        *,
        steps: int | None = None,
        keep_last: int | None = None,
        asynchronous: bool = False,
    ):
        check_intervals(interval=interval, steps=1 if steps is None else steps)
        self._path, self._interval, self._steps = path, interval, steps
        self._keep_last, self._asynchronous = keep_last, asynchronous
        self._is_due = False

    def after_step(self, trainer: TrainerState) -> None:
        if self._steps is None or trainer.step % self._steps or trainer.booster.interrupted:
            return
        # At the end of an epoch it is saved with the epoch's metrics, so that a resumed run need not evaluate it again.
        self._is_due = trainer.batches.is_last
        if not self._is_due:
            self._save(trainer)

    def after_epoch(self, trainer: TrainerState) -> None:
        is_at_interval = (trainer.epoch + 1) % self._interval == 0 or trainer.epoch + 1 == trainer.num_epochs
        if self._is_due or (self._steps is None and (is_at_interval or trainer.should_stop)):
            self._save(trainer)
        self._is_due = False

    def on_stop(self, trainer: TrainerState) -> None:
        self._save(trainer)

    def after_fit(self, trainer: TrainerState) -> None:
        if self._asynchronous:
            trainer.booster.wait_for_save()

    def _save(self, trainer: TrainerState) -> None:
        trainer.booster.save(
            self._path,
            step=trainer.step,
            extras={"trainer": trainer.state_dict()},
            keep_last=self._keep_last,
            asynchronous=self._asynchronous,
        )
